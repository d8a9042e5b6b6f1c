"""One request cannot make an answer that stalls the server: its values are bounded before anything
is computed, and it is encoded while it arrives."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ballast.cluster.output_stream import UNITS_PER_TAKE, OutputStream
from ballast.core.event import TokenOutput
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.whole_answers import WholeAnswers
from ballast.server.generate.answer_size import MOST_VALUES
from ballast.server.http.bodies import SMALL_BYTES
from ballast.server.http.faults import Fault
from tests.server.process import ServerProcess, server
from tests.server.test_api import MODEL

SECTION = """
server:
  keys:
    - {name: whole, key: sk-whole-whole-whole}
    - {name: small, key: sk-small-small-small, answer: 100}
"""
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TURNS = [{"role": "user", "content": "a"}]
TWENTY = {"logprobs": 20}
SCORED = {"logprobs": True, "top_logprobs": 20}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}


@pytest.fixture(scope="module")
def bounded(echo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One model of a fleet may answer with 400 values."""
    directory = tmp_path_factory.mktemp("bounded")
    shutil.copytree(echo_file.parent, directory, dirs_exist_ok=True)
    file = directory / "fleet.yaml"
    text = file.read_text().replace(
        "path: atlas-chat", "path: atlas-chat\n    limits: {answer: 400}"
    )
    file.write_text(text.rstrip() + "\n" + SECTION)
    with server(file, "--echo") as running:
        yield running


def ask(to: ServerProcess, path: str, key: str = "", /, **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return to.http.post(path, json={"model": MODEL, **fields}, headers=headers)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": TURNS, "n": 128, "max_tokens": 200, **SCORED}),
        (CHAT, {"messages": TURNS, "n": 128, "max_completion_tokens": 98, **SCORED}),
        (CHAT, {"messages": TURNS, "n": 128, "max_tokens": 98, **SCORED, "stream": True}),
        (CHAT, {"messages": TURNS, "max_tokens": MOST_VALUES + 1}),
        (TEXT, {"prompt": ["a"] * 256, "max_tokens": 60, "logprobs": 20}),
        (TEXT, {"prompt": ["a"] * 2, "n": 128, "max_tokens": 50, "logprobs": 20}),
        (TEXT, {"prompt": [[40] * 99, [4]], "n": 128, "max_tokens": 0, "echo": True, **TWENTY}),
        (TEXT, {"prompt": [[40] * 100] * 256, "max_tokens": 1, "echo": True, "logprobs": 10}),
        (RESPONSES, {"input": "a", "max_output_tokens": 12_500, **LOGPROBS}),
    ],
)  # fmt: skip
def test_an_answer_that_may_be_too_large_is_refused(
    echo: ServerProcess, path: str, fields: dict[str, Any]
) -> None:
    refused = ask(echo, path, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "answer_too_large"
    assert error["param"] in ("max_tokens", "max_output_tokens")
    assert f"at most {MOST_VALUES} (limits.answer)" in error["message"]


def test_a_request_that_names_no_length_gets_what_fits(echo: ServerProcess) -> None:
    fields = {"messages": TURNS, "n": 128, **SCORED, "ignore_eos": True, "seed": 1}
    answer = ask(echo, CHAT, **fields)
    assert answer.status_code == 200
    fitting = MOST_VALUES // 128 // 21
    assert answer.json()["usage"]["completion_tokens"] == 128 * fitting
    assert {c["finish_reason"] for c in answer.json()["choices"]} == {"length"}


def test_a_model_and_a_key_have_their_own_bounds(bounded: ServerProcess) -> None:
    whole, small = "sk-whole-whole-whole", "sk-small-small-small"
    for key, most, where in (
        (whole, 400, "limits.answer"),
        (small, 100, "answer of the key 'small'"),
    ):
        fields = {"prompt": "a", "n": 10, "ignore_eos": True}
        refused = ask(bounded, TEXT, key, **fields, max_tokens=most // 10 + 1)
        assert f"at most {most} ({where})" in refused.json()["error"]["message"]
        assert ask(bounded, TEXT, key, **fields, max_tokens=most // 10).status_code == 200
        tokens = most // 2 // 10  # of each choice, with its prompt
        fields = {"prompt": "a b", "n": 10, "echo": True, "logprobs": 1}
        assert ask(bounded, TEXT, key, **fields, max_tokens=tokens - 1).status_code == 400
        assert ask(bounded, TEXT, key, **fields, max_tokens=1).status_code == 200
    message = ask(bounded, "/v1/messages", whole, messages=TURNS, max_tokens=10_000)
    assert message.status_code == 200  # its clients have to name a number


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_an_echo_comes_in_parts_and_is_the_same(echo: ServerProcess, logprobs: int | None) -> None:
    """A device scores 512 tokens in a job at most; this one all at once, and a stream's chunks
    together are the whole answer."""
    fields = {"prompt": ["a b c", "d"], "echo": True, "logprobs": logprobs, "max_tokens": 3}
    whole = ask(echo, TEXT, **fields).json()["choices"]
    chunks: list[list[Any]] = [[], []]
    body = {"model": MODEL, **fields, "stream": True}
    with echo.http.stream("POST", TEXT, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                chunks[choice["index"]].append(choice)
    for one, parts in zip(whole, chunks, strict=True):
        assert one["text"] == "".join(part["text"] for part in parts)
        if logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                found = [part["logprobs"][name] for part in parts]
                joined = None if found[0] is None else [value for part in found for value in part]
                assert one["logprobs"][name] == joined


def test_a_reader_of_much_lets_others_run() -> None:
    """Between two parts of outputs that are there already, the loop turns."""

    async def turns() -> tuple[int, int]:
        stream = OutputStream(["a"], lambda ids: None, lambda ids, paused: None)
        for i in range(20 * UNITS_PER_TAKE):
            stream.put(TokenOutput("a", 1, i))
        turned, taken = 0, 0

        async def other() -> None:
            nonlocal turned
            while True:
                turned += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        while stream.unread:
            await stream.take()
            taken += 1
        task.cancel()
        return turned, taken

    turned, taken = asyncio.run(turns())
    assert turned >= taken - 2 > 10


def test_whole_answers_have_a_bound_and_shares() -> None:
    keys = (KeySettings(name="a", key="k" * 16), KeySettings(name="b", key="l" * 16))
    most = 10 * SMALL_BYTES
    for settings in (
        ServerSettings(most_answer_bytes=most),
        ServerSettings(most_answer_bytes=most, keys=keys),
    ):
        answers = WholeAnswers(lambda settings=settings: settings)  # type: ignore[misc]
        half = settings.several_keys
        with answers.holding("a") as hold, answers.holding("a") as more, answers.holding("b") as b:
            hold(SMALL_BYTES)
            assert answers.held == 0
            hold((5 if half else 10) * SMALL_BYTES)
            with pytest.raises(Fault, match="most_answers") as caught:
                more(4 * SMALL_BYTES)
            assert (caught.value.status, caught.value.code) == (429, "overloaded")
            b(2 * SMALL_BYTES)
        assert answers.held == 0


def test_many_embeddings_are_the_same_in_parts(echo: ServerProcess) -> None:
    texts = ["a b", "c"] * 1024
    found = []
    for encoding in ("float", "base64"):
        body = {"model": "wren-mini", "input": texts, "encoding_format": encoding}
        answer = echo.http.post("/v1/embeddings", json=body).json()
        assert [item["index"] for item in answer["data"]] == list(range(2048))
        assert (answer["object"], answer["model"]) == ("list", "wren-mini")
        assert answer["usage"]["prompt_tokens"] > 2048
        found.append({json.dumps(item["embedding"]) for item in answer["data"]})
    assert [len(values) for values in found] == [2, 2]
