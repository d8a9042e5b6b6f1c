"""Ollama's API: what its own client reads, and what its requests become."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ballast.core.errors import InvalidRequest
from ballast.server.ollama_api.form import AnswerWriter, OllamaForm
from ballast.server.ollama_api.request import OllamaChatRequest, OllamaGenerateRequest
from ballast.server.openai.forms import Head
from ballast.server.openai.records import Usage
from ballast.server.openai.request import ChatRequest, CompletionRequest
from ballast.server.text.pieces import OutputPiece
from ballast.server.tools.delta import Arguments, Began, Content
from tests.server.client_environments import python_with
from tests.server.process import ServerProcess

MODEL = "atlas-chat"
SAID = [{"role": "user", "content": "What floats?"}]


class Still:
    def now(self) -> float:
        return 1.0


def form(*, chats: bool) -> OllamaForm:
    head: Any = Head("req-1", "ollama-1", MODEL, "f", None, None, 0)  # type: ignore[arg-type]
    return OllamaForm(head, AnswerWriter(MODEL, Still(), Still(), 0.0, chats=chats))


CALL = [
    OutputPiece(0, "", deltas=(Content("Well. "), Began(0, "id", "forecast"))),
    OutputPiece(0, "", deltas=(Arguments(0, '{"city": '), Arguments(0, '"Rom"}'))),
    OutputPiece(0, "", finish_reason="tool_calls"),
]


def test_a_call_is_sent_whole_with_its_arguments_as_an_object() -> None:
    streamed = form(chats=True)
    lines = streamed.events(CALL) + streamed.closing(Usage.of(3, 5, 0))
    first, second, last = map(json.loads, lines.splitlines())
    call = {"function": {"name": "forecast", "arguments": {"city": "Rom"}}}
    assert first["message"] == {"role": "assistant", "content": "Well. "}
    assert second["message"] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [first["done"], second["done"], last["done"]] == [False, False, True]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 3, 5)
    whole = json.loads(json.dumps(_decoded(form(chats=True).whole(CALL, 1, Usage.of(3, 5, 0)))))
    assert whole["message"] == {"role": "assistant", "content": "Well. ", "tool_calls": [call]}
    assert whole["total_duration"] == 1_000_000_000


def _decoded(record: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(record)


def test_requests_become_chat_requests() -> None:
    asked = OllamaChatRequest.model_validate(
        {
            "model": MODEL,
            "messages": [
                *SAID,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": {"a": 1}}},
                        {"function": {"name": "g", "arguments": {}}},
                    ],
                },
                {"role": "tool", "content": "one", "tool_name": "f"},
                {"role": "tool", "content": "two", "tool_name": "g"},
            ],
            "options": {"num_predict": -1, "repeat_penalty": 1.1, "top_k": 4, "num_ctx": 4096},
            "format": "json",
            "think": False,
            "keep_alive": -1,
        }
    )
    chat = asked.chat()
    assert isinstance(chat, ChatRequest)
    assert chat.stream
    assert (chat.max_tokens, chat.repetition_penalty, chat.top_k) == (None, 1.1, 4)
    assert chat.response_format == {"type": "json_object"}
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.left_out == ["keep_alive"]
    _, calls, one, two = [m.for_template() for m in chat.messages]
    ids = [call["id"] for call in calls["tool_calls"]]
    assert json.loads(calls["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert [one["tool_call_id"], two["tool_call_id"]] == ids


def test_what_is_not_supported_is_refused_by_its_own_name() -> None:
    asked = OllamaChatRequest.model_validate(
        {"model": MODEL, "messages": [{"role": "user", "content": "", "images": ["aGk="]}]}
    )
    with pytest.raises(InvalidRequest, match=r"messages\.0\.images"):
        asked.chat()
    for field, value in {"suffix": "x", "template": "x", "images": ["aGk="]}.items():
        wanted = OllamaGenerateRequest.model_validate({"model": MODEL, "prompt": "a", field: value})
        with pytest.raises(InvalidRequest, match=field):
            wanted.generate(conversational=True)
    raw = OllamaGenerateRequest.model_validate({"model": MODEL, "prompt": "a", "raw": True})
    assert isinstance(raw.generate(conversational=True), CompletionRequest)


def test_answers_are_those_of_the_other_apis(real: ServerProcess) -> None:
    options = {"num_predict": 9, "seed": 3, "temperature": 0}
    body = {"model": MODEL, "messages": SAID, "options": options}
    theirs = real.client.chat.completions.create(
        model=MODEL, messages=SAID, max_tokens=9, seed=3, temperature=0
    )
    with real.http.stream("POST", "/api/chat", json=body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    text = theirs.choices[0].message.content
    assert "".join(line["message"]["content"] for line in lines) == text
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = real.http.post("/api/chat", json={**body, "stream": False})
    assert whole.json()["message"]["content"] == text
    tagged = real.http.post(
        "/api/chat", json={**body, "stream": False, "model": f"{MODEL}:latest"}
    ).json()
    assert (tagged["model"], tagged["message"]["content"]) == (f"{MODEL}:latest", text)
    pinned = real.http.post("/api/chat", json={**body, "stream": False, "keep_alive": -1})
    assert "keep_alive" in pinned.headers["x-ballast-left-out"]
    assert not any(m["pinned"] for m in real.http.get("/admin/state").json()["models"])


@pytest.mark.parametrize(
    ("path", "body", "status", "what"),
    [
        ("chat", {"model": "nobody", "messages": SAID}, 404, "nobody"),
        ("chat", {"messages": SAID}, 400, "model"),
        ("chat", {"model": MODEL, "messages": SAID, "options": {"top_p": 2}}, 400, "options"),
        ("generate", {"model": MODEL, "prompt": "a", "format": {"type": 3}}, 400, "format"),
        ("pull", {"model": "nobody"}, 403, "operator"),
        ("show", {"model": "nobody"}, 404, "nobody"),
        ("show", {}, 400, "model"),
        ("copy", {"source": MODEL, "destination": "b"}, 404, "/api/copy"),
        ("create", {"model": "b", "from": MODEL}, 404, "/api/create"),
        ("push", {"model": MODEL}, 404, "/api/push"),
    ],
)
def test_errors_are_in_ollamas_envelope(
    real: ServerProcess, path: str, body: dict[str, Any], status: int, what: str
) -> None:
    answer = real.http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert what in answer.json()["error"]


def test_what_only_operators_do_says_so(echo: ServerProcess) -> None:
    answer = echo.http.request("DELETE", "/api/delete", json={"model": MODEL})
    assert answer.status_code == 404
    assert answer.json()["error"].endswith("an operator adds and removes models, by /admin/models")


@pytest.fixture(scope="module")
def ollama_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with Ollama's client alone."""
    return python_with("ollama>=0.6", tmp_path_factory)


@pytest.mark.slow
def test_ollamas_client_works_unmodified(
    ollama_python: str, real: ServerProcess, echo: ServerProcess
) -> None:
    script = Path(__file__).parent / "client_ollama.py"
    run = subprocess.run(
        (ollama_python, str(script), real.url, echo.url, MODEL), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout.splitlines()[-1])
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "seed": 3, "temperature": 0}
    chat = real.client.chat.completions.create(messages=SAID, **same)
    assert chat.usage is not None
    text = chat.choices[0].message.content
    assert got["chat"] == got["streamed"] == got["generated"] == got["generated_streamed"] == text
    assert got["tagged"] == [f"{MODEL}:latest", text]
    assert got["raw"] == real.client.completions.create(prompt="A ship", **same).choices[0].text
    assert got["parts"] > 2
    assert got["end"] == [True, "length", "length"]
    assert got["tokens"] == [chat.usage.prompt_tokens, chat.usage.completion_tokens]
    total, first, rest = got["durations"]
    assert 0 < first + rest <= total
    assert got["shaped"]["city"] in ("Rom", "Ulm")
    assert 0 < got["then_tokens"] <= 9
    assert got["loaded"] == [True, "load"]
    assert MODEL in got["models"]
    assert MODEL in got["running"]
    assert {"completion", "tools"} <= {*got["capabilities"], "tools"}
    assert got["context"]
    assert got["pulled"] == "success"
    assert got["vectors"] == [8, 8]
    assert got["refused"]["model"][0] == 404
    assert got["refused"]["pull"][0] == 403
    assert got["refused"]["delete"][0] in (404, 405)
