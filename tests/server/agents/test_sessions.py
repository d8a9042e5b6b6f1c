"""Sessions as coding agents record them, against the chat templates of nine families: nothing is
refused, and the prompt has all that was said, in its order."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.generate.output_constraint import checks, constraint_of
from ballast.server.http.request_context import RequestContext
from ballast.server.messages_api.request import MessagesRequest
from ballast.server.openai.request import ChatRequest
from ballast.server.prompt_encoder import PromptEncoder
from ballast.server.responses_api.request import ResponsesRequest
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.tokenizer import Tokenizer
from ballast.server.tools.delta import Began
from tests.server.agents.families import FAMILIES

HERE = Path(__file__).parent
NAMES = ("codex", "claude_code", "chat")
SESSIONS = {name: json.loads((HERE / f"{name}.json").read_text()) for name in NAMES}
WORD = re.compile(r"(?<![A-Z])[A-Z]{3,}\d*[ab]?")
"""What the sessions mark: INSTRUCTIONS, QUESTION1, CALL1, RESULT2a and so on."""
ENDS = {"user", "tool", "system", "developer"}
NO_PLACE = {"mistral": {"SAID1"}}
"""Text beside a call, which this template leaves out."""
ONE_BY_ONE = ("llama3",)
"""Families that take one call in a turn: each is followed by its result."""


class Prompts:
    """Renders requests of any API by one family's template, on the server's own way."""

    def __init__(self, runner: asyncio.Runner, renderer: TemplateRenderer, template: str) -> None:
        self.run = runner.run
        theirs = train_tokenizer(["a b"], 300, 1 << 20)
        theirs.chat_template = template
        self.tokenizer = Tokenizer(theirs)
        self.encoder = PromptEncoder(renderer)

    def text(self, asked: ChatRequest) -> str:
        spec: Any = SimpleNamespace(name="m", max_model_len=1 << 20, vocab=1 << 31)
        encoding = self.encoder.encode_conversation(asked, spec, self.tokenizer, RequestContext())
        return self.tokenizer.decode(self.run(encoding))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def renderer(runner: asyncio.Runner) -> Iterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    runner.run(made.close())


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prompts(family: str, runner: asyncio.Runner, renderer: TemplateRenderer) -> Prompts:
    return Prompts(runner, renderer, FAMILIES[family])


def chat_of(name: str, body: dict[str, Any]) -> ChatRequest:
    if name == "codex":
        return ResponsesRequest.model_validate(body).chat()
    if name == "claude_code":
        return MessagesRequest.model_validate(body).chat()
    return ChatRequest.model_validate(body)


def turns_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield the session's requests: each goes on where the agent waited for the model."""
    body = SESSIONS[name]
    field = "input" if name == "codex" else "messages"
    items = body[field]
    for i, item in enumerate(items):
        following = items[i + 1] if i + 1 < len(items) else {"role": "assistant"}
        if answered(item) and not answered(following):
            yield body | {field: items[: i + 1]}


def answered(item: dict[str, Any]) -> bool:
    """Whether the client said it, and not the model."""
    return item.get("role") in ENDS or str(item.get("type")).endswith("_output")


def words_of(name: str, body: dict[str, Any]) -> list[str]:
    """Return the marked words of a request, in their order; reasoning is HIDDEN."""
    turns = body["input" if name == "codex" else "messages"]
    found = WORD.findall(json.dumps([body.get("instructions"), body.get("system"), turns]))
    return [word for word in dict.fromkeys(found) if not word.startswith("HIDDEN")]


@pytest.mark.parametrize("name", SESSIONS)
def test_no_request_of_a_session_is_refused_and_nothing_of_it_lost(
    prompts: Prompts, family: str, name: str
) -> None:
    requests = list(turns_of(name))
    assert len(requests) >= 4
    for body in requests:
        asked = chat_of(name, body)
        expected = [w for w in words_of(name, body) if w not in NO_PLACE.get(family, ())]
        if family in ONE_BY_ONE and "CALL2" in expected:
            expected.remove("CALL2")
            expected.insert(expected.index("RESULT1") + 1, "CALL2")
        text = prompts.text(asked)
        found = dict.fromkeys(word for word in WORD.findall(text) if word in expected)
        assert list(found) == expected
        assert "HIDDEN" not in text


@pytest.mark.parametrize("name", SESSIONS)
def test_functions_of_a_session_are_shown_and_can_be_called(
    prompts: Prompts, runner: asyncio.Runner, name: str
) -> None:
    function = {"codex": "exec_command", "claude_code": "Read", "chat": "run"}[name]
    asked = chat_of(name, SESSIONS[name])
    constraint = runner.run(constraint_of(asked, prompts.tokenizer, checks(), RequestContext()))
    text = prompts.text(asked)
    assert function in text
    assert "multi_agent_v1" not in text
    assert "web_search" not in text
    parser = constraint.parser(lambda: text[-32:])
    assert parser is not None
    assert constraint.dialect is not None
    call = constraint.dialect.written([{"function": {"name": function, "arguments": "{}"}}])
    deltas = [*parser.push(call), *parser.flush()]
    assert [d.name for d in deltas if isinstance(d, Began)] == [function]


CUT = '{"BBB": 1}'
ODD = {
    "a system message alone": [{"role": "system", "content": "AAA"}],
    "a greeting": [
        {"role": "system", "content": "AAA"},
        {"role": "assistant", "content": "BBB"},
        {"role": "user", "content": "CCC"},
    ],
    "a result without its call": [
        {"role": "tool", "tool_call_id": "c", "content": "AAA"},
        {"role": "user", "content": "BBB"},
    ],
    "a call without its result": [
        {"role": "user", "content": "AAA"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"BBB": 1}'},
                }
            ],
        },
        {"role": "user", "content": "CCC"},
        {"role": "assistant", "content": "DDD"},
    ],
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_left_of_a_conversation_that_was_cut(prompts: Prompts, what: str) -> None:
    text = prompts.text(ChatRequest.model_validate({"model": "m", "messages": ODD[what]}))
    expected = WORD.findall(json.dumps(ODD[what]))
    assert expected
    assert [word for word in WORD.findall(text) if word in expected] == expected


LEFT_OUT = {
    "codex": [
        "tool custom apply_patch",
        "tool namespace multi_agent_v1",
        "tool local_shell",
        "tool web_search",
        "item web_search_call",
    ],
    "claude_code": [
        "tool computer_20250124 computer",
        "tool web_search_20250305 web_search",
        "tool mcp_toolset",
        "block tool_reference",
        "block server_tool_use",
        "block web_search_tool_result",
    ],
    "chat": ["tool custom apply_patch", "tool web_search"],
}


@pytest.mark.parametrize("name", SESSIONS)
def test_what_is_left_out_is_named(name: str) -> None:
    assert chat_of(name, SESSIONS[name]).left_out == LEFT_OUT[name]


def test_tools_that_a_client_runs_at_home_get_their_schema() -> None:
    """Anthropic's own models know it; others have to be told."""
    tools = {
        t["function"]["name"]: t["function"]
        for t in chat_of("claude_code", SESSIONS["claude_code"]).shown_tools
    }
    assert list(tools) == ["Bash", "Read", "bash", "str_replace_based_edit_tool"]
    assert list(tools["bash"]["parameters"]["properties"]) == ["command", "restart"]
    editor = tools["str_replace_based_edit_tool"]["parameters"]["properties"]
    assert "undo_edit" not in editor["command"]["enum"]
    assert "insert_text" in editor


def test_the_text_after_calls_belongs_to_their_answer() -> None:
    """As Codex sends back what it got: a result follows its call, in whatever order they came."""
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    body = {
        "model": "m",
        "input": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {**call, "call_id": "c1"},
            {"type": "reasoning", "summary": []},
            {**call, "call_id": "c2"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "r"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": []},
        ],
    }
    messages = [m.for_template() for m in ResponsesRequest.model_validate(body).chat().messages]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "a\nb"
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [m["tool_call_id"] for m in messages[2:]] == ["c1", "c2"]


UNKNOWN: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"type": "search_result", "title": "t", "content": [{"type": "text", "text": "x"}]}, "x", []),
    ({"type": "compaction", "content": "x"}, "x", []),
    ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "x"}]}, "x", []),
    ({"type": "mcp_tool_use", "id": "m", "name": "n", "input": {}}, "", ["block mcp_tool_use"]),
    ({"type": "text", "text": ""}, "", []),
    ({"type": "redacted_thinking", "data": "d"}, "", []),
    ({"type": "new", "content": [3, None, {"text": 3}, {"text": "x"}, "y"]}, "x\ny", []),
    ({"type": "new", "content": {"text": "x"}}, "x", []),
]


@pytest.mark.parametrize(("block", "text", "left_out"), UNKNOWN)
def test_blocks_of_unknown_kinds(block: dict[str, Any], text: str, left_out: list[str]) -> None:
    turn = {"role": "assistant", "content": [block]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    body = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [result]}, turn, {"role": "user", "content": "q"}],
    }
    thought = block["type"] == "redacted_thinking"
    asked = MessagesRequest.model_validate(body).chat()
    assert [m.content for m in asked.messages] == [text, text, "q"]
    assert asked.left_out == (["block redacted_thinking"] if thought else left_out * 2)
