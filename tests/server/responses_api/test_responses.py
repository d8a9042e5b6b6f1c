"""The Responses API on the wire, before a server that repeats prompts: the cases of Open Responses'
compliance suite among them, with the order of events, ids and sequence numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openresponses_types import types as openresponses
from pydantic import BaseModel, TypeAdapter

from tests.cluster.fake_device import BREAK, REFUSE
from tests.server.messages_api.test_messages import CHAT_CALL, submission
from tests.server.process import ServerProcess
from tests.server.test_tool_calls import CALL, SCHEMA, TOOLS

MODEL = "wren-mini"
ASKED: dict[str, Any] = {"model": MODEL, "input": "a b c d", "max_output_tokens": 5}
FUNCTIONS = [
    {"type": "function", "name": "forecast", "parameters": SCHEMA},
    {"type": "function", "name": "now"},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SPECIFIED: dict[str, type[BaseModel]] = {
    kind.value: found
    for name, found in vars(openresponses).items()
    if name.endswith("StreamingEvent")
    for kind in found.model_fields["type"].annotation
}
"""Events by type, as the specification of Open Responses has them."""
BEGUN = ["response.created", "response.in_progress"]
TEXT = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
FUNCTION = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def post(to: ServerProcess, **fields: Any) -> Any:
    return to.http.post("/v1/responses", json=ASKED | fields)


def answer(to: ServerProcess, **fields: Any) -> Any:
    """As OpenAI's types read it, and as Open Responses specifies it."""
    found = post(to, **fields)
    assert found.status_code == 200, found.text
    return checked(found.json())


def checked(response: Any) -> Any:
    openresponses.ResponseResource.model_validate(response)
    Response.model_validate(response, strict=True)
    items = [item["id"] for item in response["output"]]
    assert len(set(items)) == len(items)
    return response


def events(to: ServerProcess, **fields: Any) -> list[Any]:
    """Of a stream: named by their types, numbered, and each as OpenAI's types have it and as Open
    Responses specifies it."""
    body = ASKED | fields | {"stream": True}
    with to.http.stream("POST", "/v1/responses", json=body) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        text = streamed.read().decode()
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
        SPECIFIED[found[-1]["type"]].model_validate(found[-1])
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    for each in (found[0], found[1], found[-1]):
        checked(each["response"])
    return found


def kinds(found: list[Any]) -> list[str]:
    """Types of events; neighbours that are alike count once."""
    types = [e["type"] for e in found]
    return [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]


def without_ids(response: Any) -> Any:
    gone = ("id", "created_at", "completed_at", "call_id")
    output = [{k: v for k, v in i.items() if k not in gone} for i in response["output"]]
    return {k: v for k, v in response.items() if k not in gone} | {"output": output}


def echoed(to: ServerProcess, said: str, more: int = 0) -> dict[str, Any]:
    """Fields of a request whose answer is what the user said, and `more` tokens."""
    messages = [{"role": "user", "content": said}]
    result = to.http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    return {"input": said, "max_output_tokens": result["count"] + more, "tools": FUNCTIONS}


# -- answers ------------------------------------------------------------------------------------


def test_a_basic_response(echo: ServerProcess) -> None:
    said = [{"type": "message", "role": "user", "content": "a b c d"}]
    found = answer(echo, input=said, metadata={"k": "v"}, user="u", instructions=None)
    assert found["id"].startswith("resp_")
    assert (found["status"], found["error"]) == ("incomplete", None)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = found["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "a b c d", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "status": "incomplete",
        "role": "assistant",
        "content": [part],
    }
    usage = found["usage"]
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert (found["metadata"], found["user"]) == ({"k": "v"}, "u")
    assert (found["store"], found["truncation"]) == (False, "disabled")
    assert without_ids(answer(echo, metadata={"k": "v"}, user="u")) == without_ids(found)


def test_what_stops_by_itself_is_completed(echo: ServerProcess) -> None:
    ids = echo.http.post("/tokenize", json={"model": MODEL, "prompt": " c"}).json()["tokens"]
    fields = {"stop_token_ids": ids, "max_output_tokens": 50}
    whole = answer(echo, **fields)
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["completed_at"] >= whole["created_at"]
    assert [i["status"] for i in whole["output"]] == ["completed"]
    found = events(echo, **fields)
    assert found[-1]["type"] == "response.completed"
    assert without_ids(found[-1]["response"]) == without_ids(whole)


def test_a_stream_of_text_has_its_events_in_order(echo: ServerProcess) -> None:
    found = events(echo)
    assert kinds(found) == [*BEGUN, *TEXT, "response.incomplete"]
    assert [e["response"]["status"] for e in found[:2]] == ["in_progress"] * 2
    assert found[0]["response"]["output"] == []
    added, part = found[2], found[3]
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    deltas = [e["delta"] for e in found if e["type"] == TEXT[2]]
    assert len(deltas) > 1
    text_done, part_done, item_done, last = found[-4:]
    assert "".join(deltas) == text_done["text"] == part_done["part"]["text"] == "a b c d"
    assert item_done["item"] == last["response"]["output"][0]
    ids = {e["item_id"] for e in found if "item_id" in e}
    assert ids == {added["item"]["id"]} == {item_done["item"]["id"]}
    assert len({e["response"]["id"] for e in found if "response" in e}) == 1
    assert without_ids(last["response"]) == without_ids(answer(echo))


def test_calls_are_items_between_messages(echo: ServerProcess) -> None:
    fields = echoed(echo, f"I look.{CALL} So it rains.")
    whole = answer(echo, **fields)
    first, call, last = whole["output"]
    assert (first["content"][0]["text"], first["status"]) == ("I look.", "completed")
    assert (call["type"], call["name"], call["status"]) == (
        "function_call",
        "forecast",
        "completed",
    )
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert json.loads(call["arguments"]) == {"city": "Rom", "days": 2}
    assert (last["content"][0]["text"], last["status"]) == (" So it rains.", "completed")
    found = events(echo, **fields)
    assert kinds(found) == [*BEGUN, *TEXT, *FUNCTION, *TEXT, "response.completed"]
    indices = [e["output_index"] for e in found if "output_index" in e]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2}
    arguments = [e["delta"] for e in found if e["type"] == FUNCTION[1]]
    [done] = [e for e in found if e["type"] == FUNCTION[2]]
    assert "".join(arguments) == done["arguments"] == call["arguments"]
    items = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]
    assert without_ids(found[-1]["response"]) == without_ids(whole)


def test_log_probabilities_are_included_where_asked(echo: ServerProcess) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = answer(echo, **fields)["output"]
    scores = item["content"][0]["logprobs"]
    assert len(scores) == 5
    assert [len(s["top_logprobs"]) for s in scores] == [2] * 5
    assert "".join(s["token"] for s in scores[1:]) == "a b c d"
    deltas = [e for e in events(echo, **fields) if e["type"] == TEXT[2]]
    assert [s for e in deltas for s in e["logprobs"]] == scores


def test_a_stream_that_breaks_ends_with_a_failed_response(echo: ServerProcess) -> None:
    *_, last = events(echo, seed=BREAK)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the job broke"}
    assert [i["status"] for i in last["response"]["output"]] == ["incomplete"]


# -- requests -----------------------------------------------------------------------------------

CALLED = {
    "type": "function_call",
    "call_id": "c",
    "name": "forecast",
    "arguments": '{"city": "Rom"}',
}
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {**CALLED, "id": "fc_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {
        "type": "function_call_output",
        "call_id": "d",
        "output": [{"type": "input_text", "text": "sun"}],
    },
    {"role": "user", "content": "So?"},
]
CHAT_HISTORY = [
    {"role": "system", "content": "Sing."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
    {"role": "tool", "tool_call_id": "d", "content": "sun"},
    {"role": "user", "content": "So?"},
]


@pytest.mark.parametrize(
    ("ours", "chat"),
    [
        (
            {
                "instructions": "Sing.",
                "input": HISTORY,
                "max_output_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.9,
                "tools": FUNCTIONS,
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "store": False,
                "truncation": "auto",
            },
            {
                "messages": CHAT_HISTORY,
                "max_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.9,
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            {
                "input": "a",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "s",
                        "schema": SCHEMA,
                        "strict": True,
                    }
                },
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                },
            },
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_object"}, "verbosity": "low"}},
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_object"},
            },
        ),
        (
            {
                "input": "a",
                "tools": FUNCTIONS,
                "tool_choice": {"type": "function", "name": "now"},
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "now"}},
            },
        ),
        (
            {
                "input": "a",
                "tools": FUNCTIONS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "now"}],
                },
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": TOOLS[1:],
                "tool_choice": "required",
            },
        ),
        (
            {"input": [{"role": "user", "content": "a"}, CALLED, {**CALLED, "call_id": "d"}]},
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "d"}]},
                ]
            },
        ),
    ],
)
def test_the_worker_gets_what_a_chat_request_gives_it(
    echo: ServerProcess, ours: dict[str, Any], chat: dict[str, Any]
) -> None:
    found = submission(echo, "/v1/responses", ours)
    assert found == submission(echo, "/v1/chat/completions", chat)
    assert found["prompt"]


IMAGE = {"type": "input_image", "image_url": "http://x/y.png"}


@pytest.mark.parametrize(
    ("fields", "status", "param", "why"),
    [
        ({"model": "nobody"}, 404, "model", "nobody"),
        ({"input": None}, 400, "input", "list"),
        ({"input": []}, 400, "input", "at least 1"),
        ({"input": [{}] * 5000}, 400, "input", "at most 4096"),
        ({"input": [{"role": "user", "content": [{}] * 9000}]}, 400, "input", "at most 8192"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, 400, "input", "'input_image' cannot"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input", "'item_reference'"),
        ({"input": "a " * 300}, 400, "input", "the context"),
        ({"max_output_tokens": 300}, 400, "input", "the context"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "greater"),
        ({"max_output_tokens": 2, "min_tokens": 3}, 400, "min_tokens", "above"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", "no response is kept"),
        ({"conversation": "c"}, 400, "conversation", "no response is kept"),
        ({"store": True}, 400, "store", "no response is kept"),
        ({"background": True}, 400, "background", "no response is kept"),
        ({"prompt": {"id": "p"}}, 400, "prompt", "no prompts are kept"),
        ({"tools": [{"type": 3}]}, 400, "tools.0.type", "is a text"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": 1}]},
            400,
            "tools.0.parameters",
            "JSON schema",
        ),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "g"}},
            400,
            "tool_choice.name",
            "no tool has the name",
        ),
        ({"tool_choice": {"type": "mcp"}}, 400, "tool_choice.type", "only functions"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type", "json_schema"),
        (
            {"tools": [{"type": "function", "name": "f", "description": "\ud800"}]},
            400,
            "tools",
            "cannot be repeated",
        ),
        ({"seed": REFUSE}, 429, None, "too many"),
    ],
)
def test_errors_name_the_fields_of_the_api(
    echo: ServerProcess, fields: dict[str, Any], status: int, param: str | None, why: str
) -> None:
    body = json.dumps(ASKED | fields)
    headers = {"content-type": "application/json"}
    refused = echo.http.post("/v1/responses", content=body, headers=headers)
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert why in error["message"]
