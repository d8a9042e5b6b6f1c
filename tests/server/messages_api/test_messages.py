"""The Messages API on the wire, before a server that repeats prompts, and its forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ballast.server.http.json_response import encode
from ballast.server.messages_api.form import MessageForm
from ballast.server.messages_api.request import MessagesRequest
from ballast.server.openai.forms import Head
from ballast.server.openai.records import Usage
from ballast.server.text.pieces import OutputPiece
from ballast.server.tools.delta import Arguments, Began
from tests.cluster.fake_device import BREAK, REFUSE, TELL
from tests.server.process import ServerProcess
from tests.server.test_tool_calls import CALL, SCHEMA, TOOLS

MODEL = "wren-mini"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "a b c d"}],
}
FUNCTIONS = [{"name": "forecast", "input_schema": SCHEMA}, {"name": "now", "type": "custom"}]


def post(to: ServerProcess, path: str = "", /, **fields: Any) -> Any:
    return to.http.post(f"/v1/messages{path}", json=ASKED | fields)


def events(to: ServerProcess, **fields: Any) -> list[Any]:
    """Of a stream; each is named by its type."""
    body = ASKED | fields | {"stream": True}
    with to.http.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    found = []
    for each in text.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def echoed(to: ServerProcess, said: str) -> dict[str, Any]:
    """Fields of a request whose answer is what the user said, and nothing after it."""
    messages = [{"role": "user", "content": said}]
    result = to.http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    return {"messages": messages, "max_tokens": result["count"], "tools": FUNCTIONS}


def test_text_is_answered(echo: ServerProcess) -> None:
    answer = post(echo)
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "a b c d", "citations": None}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == 5
    assert usage["input_tokens"] == post(echo, "/count_tokens").json()["input_tokens"]
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_stream_of_text_has_its_events_in_order(echo: ServerProcess) -> None:
    start, *found, delta, stop = events(echo)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == delta["usage"]["input_tokens"]
    assert [e["type"] for e in found] == [
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
    ]
    assert {e["index"] for e in found} == {0}
    assert "".join(e["delta"]["text"] for e in found[1:-1]) == "a b c d"
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 5
    assert stop == {"type": "message_stop"}


def test_calls_are_blocks_between_text(echo: ServerProcess) -> None:
    fields = echoed(echo, f"I look.{CALL} So it rains.")
    content = post(echo, **fields).json()["content"]
    assert [b["type"] for b in content] == ["text", "tool_use", "text"]
    assert (content[0]["text"], content[2]["text"]) == ("I look.", " So it rains.")
    assert (content[1]["name"], content[1]["input"]) == ("forecast", {"city": "Rom", "days": 2})
    found = [e for e in events(echo, **fields) if "index" in e]
    blocks = [e["content_block"] for e in found if e["type"] == "content_block_start"]
    assert [b["type"] for b in blocks] == ["text", "tool_use", "text"]
    assert blocks[1]["input"] == {}
    assert [e["index"] for e in found] == sorted(e["index"] for e in found)
    grown = [e["delta"] for e in found if e["type"] == "content_block_delta" and e["index"] == 1]
    assert {d["type"] for d in grown} == {"input_json_delta"}
    assert json.loads("".join(d["partial_json"] for d in grown)) == content[1]["input"]
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1, 2]


@pytest.mark.parametrize("stop", [" c", "<|user|>"])
def test_stop_sequences(echo: ServerProcess, stop: str) -> None:
    """The second is one of the model's special tokens."""
    fields = {"stop_sequences": ["x", stop], "max_tokens": 99}
    whole = post(echo, **fields).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == ("a b" if stop == " c" else "")
    delta = events(echo, **fields)[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_max_tokens_beyond_the_context_is_what_the_context_leaves(echo: ServerProcess) -> None:
    whole = post(echo, max_tokens=100_000, ignore_eos=True).json()
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert sum(whole["usage"].values()) == 256
    refused = post(echo, messages=[{"role": "user", "content": "a " * 300}])
    assert refused.status_code == 400


def submission(echo: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What reaches the worker."""
    answer = echo.http.post(path, json={"model": MODEL, "seed": TELL, **body})
    assert answer.status_code == 500, answer.text
    found: dict[str, Any] = json.loads(answer.json()["error"]["message"])
    return {k: v for k, v in found.items() if k not in ("id", "arrival")}


USE = {"type": "tool_use", "id": "c", "name": "forecast", "input": {"city": "Rom"}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
CHAT_CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "forecast", "arguments": '{"city": "Rom"}'},
}


@pytest.mark.parametrize(
    ("ours", "chat"),
    [
        (
            {
                "system": [
                    {"type": "text", "text": "Be", "cache_control": {}},
                    *[{"type": "text", "text": " brief."}],
                ],
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "thinking"}, USE]},
                    {
                        "role": "user",
                        "content": [
                            {**RESULT, "content": [{"type": "text", "text": "rain"}]},
                            {**RESULT, "content": "sun", "is_error": True},
                            {"type": "text", "text": "So?"},
                        ],
                    },
                ],
                "max_tokens": 7,
                "stop_sequences": ["x", "<|user|>"],
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.9,
                "tools": FUNCTIONS,
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
            {
                "messages": [
                    {"role": "system", "content": "Be\n brief."},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c", "content": "rain"},
                    {"role": "tool", "tool_call_id": "c", "content": "sun"},
                    {"role": "user", "content": "So?"},
                ],
                "max_tokens": 7,
                "stop": ["x", "<|user|>"],
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.9,
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "It is"},
                ],
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
                "max_tokens": 3,
            },
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "It is"},
                ],
                "continue_final_message": True,
                "add_generation_prompt": False,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                },
                "max_tokens": 3,
            },
        ),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "now"}, **ASKED},
            {
                **ASKED,
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "now"}},
            },
        ),
    ],
)
def test_the_worker_gets_what_a_chat_request_gives_it(
    echo: ServerProcess, ours: dict[str, Any], chat: dict[str, Any]
) -> None:
    found = submission(echo, "/v1/messages", ours)
    assert found == submission(echo, "/v1/chat/completions", chat)
    assert found["prompt"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "why"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "nobody"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{}] * 5000}, 400, "invalid_request_error", "at most 4096"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]},
            400,
            "invalid_request_error",
            "at most 8192",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{}] * 9000}]}]},
            400,
            "invalid_request_error",
            "at most 8192",
        ),
        ({"system": [{}] * 9000}, 400, "invalid_request_error", "at most 8192"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            400,
            "invalid_request_error",
            "'image' cannot be read here, only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
            400,
            "invalid_request_error",
            "'image' cannot be read here, only text",
        ),
        (
            {"tools": [{"type": 3, "name": "web_search"}]},
            400,
            "invalid_request_error",
            "tools.0.type: is a text",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
            400,
            "invalid_request_error",
            "tools.0.input_schema: ",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "g"}},
            400,
            "invalid_request_error",
            "tool_choice.name: no tool has the name 'g'",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        ({"seed": REFUSE}, 429, "rate_limit_error", "too many"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    ],
)
def test_errors_have_the_envelope_of_the_api(
    echo: ServerProcess, fields: dict[str, Any], status: int, kind: str, why: str
) -> None:
    answer = post(echo, **fields)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert why in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]
    if status != 429 and not {"max_tokens", "stop_sequences", "output_config"} & set(fields):
        assert post(echo, "/count_tokens", **fields).status_code in (status, 200)


def test_other_versions_and_methods_are_refused(echo: ServerProcess) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        old = echo.http.post(path, json=ASKED, headers={"anthropic-version": "2023-01-01"})
        assert old.status_code == 400
        assert "2023-06-01" in old.json()["error"]["message"]
        for version in ("2023-06-01", "2026-10-21"):
            now = echo.http.post(path, json=ASKED, headers={"anthropic-version": version})
            assert now.status_code == 200
    wrong = echo.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    lost = echo.http.post("/v1/messages/batches", json=ASKED)
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert "code" in echo.http.post("/v1/messages_", json=ASKED).json()["error"]


def test_a_stream_that_breaks_ends_with_an_error(echo: ServerProcess) -> None:
    *_, last = events(echo, seed=BREAK)
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "the job broke"}


# -- forms --------------------------------------------------------------------------------------


def form(max_tokens: int = 9) -> MessageForm:
    request = MessagesRequest.model_validate(ASKED | {"max_tokens": max_tokens})
    head: Any = Head("req-1", "msg_1", MODEL, "f", None, None, 0)  # type: ignore[arg-type]
    return MessageForm(head, request)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (OutputPiece(0, "", finish_reason="stop"), "end_turn"),
        (OutputPiece(0, "", finish_reason="stop", stop_reason="x"), "stop_sequence"),
        (OutputPiece(0, "", finish_reason="tool_calls"), "tool_use"),
        (OutputPiece(0, "", finish_reason="length"), "model_context_window_exceeded"),
    ],
)
def test_why_an_output_ended(last: OutputPiece, reason: str) -> None:
    whole = form().whole([OutputPiece(0, "a"), last], 1, Usage.of(10, 8, 4))
    assert whole.stop_reason == reason
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (6, 4)


@pytest.mark.parametrize("written", ['{"city": "Ro', "[1]", "nonsense"])
def test_arguments_that_are_no_object_are_not_lost(written: str) -> None:
    call = (Began(0, "c", "now"), Arguments(0, written))
    whole = form().whole(
        [OutputPiece(0, "", deltas=call, finish_reason="length")], 1, Usage.of(1, 9, 0)
    )
    [block] = json.loads(encode(whole))["content"]
    assert block["input"] == {"INVALID_JSON": written}


def test_silence_is_a_ping() -> None:
    assert form().silence == b'event: ping\ndata: {"type":"ping"}\n\n'
