"""What a request leaves open is what the fleet file, or the checkpoint, says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_device import TELL
from tests.server.process import ServerProcess, server
from tests.server.test_api import MODEL

OTHER = "wren-mini"
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def running(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("sampling")
    shutil.copytree(fleet_file.parent, home, dirs_exist_ok=True)
    text = (home / "fleet.yaml").read_text()
    own = "{temperature: 0.3, top_k: 7, repetition_penalty: 1.1, max_tokens: 5}"
    text = text.replace(f"path: {MODEL}", f"path: {MODEL}\n    sampling: {own}")
    (home / "fleet.yaml").write_text(text)
    with server(home / "fleet.yaml", "--echo") as process:
        yield process


def submission(of: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    """What reaches the device."""
    told = of.http.post(path, json={"seed": TELL, "model": MODEL, **body}).json()
    found = json.loads(told["error"]["message"])
    assert isinstance(found, dict)
    return found


def test_a_request_that_names_nothing_has_the_models_values(running: ServerProcess) -> None:
    sent = submission(running, "/v1/chat/completions", **CHAT)
    sampling = sent["sampling"]
    assert (sampling["temperature"], sampling["top_k"]) == (0.3, 7)
    assert (sampling["top_p"], sampling["repetition_penalty"]) == (1.0, 1.1)
    assert (sent["max_tokens"], sent["open_ended"]) == (5, True)
    sent = submission(running, "/v1/completions", prompt="abc")
    assert (sent["sampling"]["temperature"], sent["max_tokens"]) == (0.3, 5)


def test_a_response_says_what_counted(running: ServerProcess) -> None:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 16}
    told = running.http.post("/v1/responses", json=body).json()
    assert (told["temperature"], told["top_p"]) == (0.3, 1.0)
    told = running.http.post("/v1/responses", json={**body, "temperature": 0.5}).json()
    assert told["temperature"] == 0.5


def test_ollamas_clients_are_shown_the_models_values(running: ServerProcess) -> None:
    told = running.http.post("/api/show", json={"model": MODEL}).json()["parameters"].splitlines()
    values = {"temperature 0.3", "top_k 7", "repeat_penalty 1.1", "num_predict 5"}
    assert values <= set(told)
    assert not any(line.startswith("top_p") for line in told)


def test_what_a_request_names_counts(running: ServerProcess) -> None:
    sent = submission(
        running, "/v1/chat/completions", **CHAT, temperature=0, top_k=-1, max_tokens=20
    )
    assert (sent["sampling"]["temperature"], sent["sampling"]["top_k"]) == (0.0, 0)
    assert sent["sampling"]["repetition_penalty"] == 1.1
    assert (sent["max_tokens"], sent["open_ended"]) == (20, False)


def test_a_model_without_values_has_the_apis(running: ServerProcess) -> None:
    sent = submission(running, "/v1/chat/completions", **CHAT, model=OTHER)
    sampling = sent["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, 0)
    assert sent["max_tokens"] + len(sent["prompt"]) == 256, "what the context leaves"


def test_a_conversation_ends_with_the_tokenizers_end_token(running: ServerProcess) -> None:
    """The device's specs name none; a completion has these alone."""
    chat = submission(running, "/v1/chat/completions", **CHAT)
    assert len(chat["stop_token_ids"]) == 1
    ignoring = submission(running, "/v1/chat/completions", **CHAT, ignore_eos=True)
    assert ignoring["stop_token_ids"] == []
    assert submission(running, "/v1/completions", prompt="abc")["stop_token_ids"] == []
