"""Tools and formats through the official client: enforced on real models, read from an echo."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.process import ServerProcess

MODEL = "wren-mini"
"""Has a dialect; the other has none."""
CITIES = ["Rom", "Köln", "Ōsaka"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
USER: Any = [{"role": "user", "content": "Will it rain?"}]
CALL = '<tool_call>{"name": "forecast", "arguments": {"city": "Rom", "days": 2}}</tool_call>'


def follows(text: str) -> bool:
    value = json.loads(text)
    extra = set(value) - {"city", "days", "sure"}
    return value["city"] in CITIES and 1 <= value["days"] <= 14 and not extra


def ask(client: OpenAI, **more: Any) -> Any:
    arguments = {"model": MODEL, "messages": USER, "max_tokens": 400, "seed": 7}
    return client.chat.completions.create(**(arguments | more))


def gathered(stream: Any) -> dict[int, tuple[str, list[list[str]], str | None]]:
    """By choice: content, [name, arguments] of its calls, finish reason."""
    found: dict[int, tuple[str, list[list[str]], str | None]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            content, calls, reason = found.get(choice.index, ("", [], None))
            assert reason is None
            result = choice.delta.tool_calls or ()
            assert len({call.index for call in result}) == len(result), "one call twice in a chunk"
            for call in result:
                if call.id is not None:
                    assert call.type == "function"
                    assert call.index == len(calls)
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
            content += choice.delta.content or ""
            found[choice.index] = (content, calls, choice.finish_reason)
    return found


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "forecast"}}]
)
def test_a_random_model_is_made_to_call(real: ServerProcess, choice: Any) -> None:
    """Whole and as a stream, which are the same under a seed."""
    asked: dict[str, Any] = {
        "tools": TOOLS, "tool_choice": choice, "n": 2, "parallel_tool_calls": False
    }  # fmt: skip
    whole = ask(real.client, **asked)
    streamed = gathered(ask(real.client, stream=True, **asked))
    for made in whole.choices:
        assert made.finish_reason == "tool_calls"
        assert made.message.content is None
        [call] = made.message.tool_calls
        assert call.id.startswith("call_")
        assert call.function.name in ("forecast", "now")
        assert isinstance(choice, str) or call.function.name == "forecast"
        if call.function.name == "forecast":
            assert follows(call.function.arguments)
        expected = [[call.function.name, call.function.arguments]]
        assert streamed[made.index] == ("", expected, "tool_calls")


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_is_followed(real: ServerProcess, strict: bool) -> None:
    form = {"name": "forecast", "schema": SCHEMA, "strict": strict}
    answer = ask(real.client, response_format={"type": "json_schema", "json_schema": form}, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert follows(choice.message.content)


def test_structured_completions(real: ServerProcess) -> None:
    answer = real.client.completions.create(
        model=MODEL,
        prompt="Rain?",
        max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["y", "n"]}},
    )
    assert answer.choices[0].text in ("y", "n")


def test_a_stop_string_within_a_call_is_no_end_of_a_call(echo: ServerProcess) -> None:
    """Clients read the arguments of an answer that ends with `tool_calls`."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": CALL}], "tools": TOOLS}
    asked["max_tokens"] = 100
    [choice] = ask(echo.client, **asked, stop="Rom").choices
    [call] = choice.message.tool_calls
    assert call.function.arguments == '{"city": "'
    assert choice.finish_reason == "stop"
    [choice] = ask(echo.client, **asked, stop="</tool_call>").choices
    assert choice.finish_reason == "tool_calls"


def test_calls_are_read_back(echo: ServerProcess) -> None:
    """An echo says what it was told: content, a call, and a call that is none."""
    said = f"I look.{CALL}\n<tool_call>rain</tool_call>"
    result: Any = [{"role": "user", "content": said}]
    # As many tokens as the prompt has: each once.
    tokens = echo.http.post("/tokenize", json={"model": MODEL, "messages": result}).json()["count"]
    asked: dict[str, Any] = {"messages": result, "tools": TOOLS, "max_tokens": tokens}
    asked["extra_body"] = {"ignore_eos": True}  # which the prompt has, after the user's turn
    [whole] = ask(echo.client, **asked).choices
    [call] = whole.message.tool_calls
    assert call.function.name == "forecast"
    assert json.loads(call.function.arguments) == {"city": "Rom", "days": 2}
    assert whole.message.content == "I look.\n<tool_call>rain</tool_call>"
    assert whole.finish_reason == "length"
    expected = (whole.message.content, [["forecast", call.function.arguments]], "length")
    assert gathered(ask(echo.client, stream=True, **asked)) == {0: expected}

    for other in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        [unread] = ask(echo.client, **(asked | other)).choices
        assert unread.message.tool_calls is None
        assert unread.message.content == said


def test_a_conversation_with_calls(echo: ServerProcess) -> None:
    """What a client sends back after a call: null content, arguments as text, a result."""
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "assistant", "content": "It is noon.", "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    assert ask(echo.client, messages=messages, tools=TOOLS, max_tokens=4).choices


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_bad_fields_are_named(echo: ServerProcess, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": USER, **fields}
    answer = echo.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
