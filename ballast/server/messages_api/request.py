"""Validate requests of the Messages API, and translate them to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictInt

from ballast.core.errors import InvalidRequest
from ballast.server.conversation import MOST_MESSAGES, MOST_PARTS, Message
from ballast.server.http.faults import Fault
from ballast.server.http.fields import Stop, Text
from ballast.server.openai.request import ChatRequest
from ballast.server.openai.translation import (
    Translated,
    function_tool,
    json_schema,
    readable,
    refuse,
    tool_call,
    turn,
)
from ballast.server.tools.request import MOST_FUNCTIONS

OUTDATED = ("2023-01-01",)
"""Refused values of the header `anthropic-version`: the streams of these versions differ. Later
versions differ in the fields of requests only, and here requests may use those of any of them."""


def check_version(headers: Mapping[str, str]) -> None:
    """Raise Fault (400) for a client whose API version has another form of stream."""
    wanted = headers.get("anthropic-version")
    if wanted in OUTDATED:
        why = f"anthropic-version: {wanted} is not supported, only 2023-06-01 and later"
        raise Fault(400, why, "invalid_request", "anthropic-version")


# -- content ------------------------------------------------------------------------------------


class TextBlock(BaseModel):
    type: Literal["text"]
    text: Text


class ToolUseBlock(BaseModel):
    """An earlier call."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


def _as_texts(content: object) -> object:
    """Convert content to a list of blocks, all of them text; None is no content."""
    return _as_blocks([] if content is None else content, ("text",))


def _as_blocks(content: object, kinds: tuple[str, ...]) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return [readable(block, kinds, "content") for block in content]
    return content


_List = list[TextBlock]
Texts = Annotated[
    Annotated[_List, Field(fail_fast=True)],
    BeforeValidator(_as_texts, json_schema_input_type=Text | _List | None),
]
"""A text, or a list of blocks of text."""


class ToolResultBlock(BaseModel):
    """Result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default_factory=list)
    is_error: bool | None = None


class ThinkingBlock(BaseModel):
    """Reasoning of an earlier turn: chat templates have no place for it, it is left out."""

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_Blocks = list[Block]


class Turn(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[_Blocks, Field(fail_fast=True)],
        BeforeValidator(
            lambda content: _as_blocks(content, _BLOCKS), json_schema_input_type=Text | _Blocks
        ),
    ]

    def messages(self) -> Iterator[Message]:
        """Convert the turn to messages of a chat request; each tool result becomes a message of its
        own. Raises InvalidRequest."""
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        results = 0
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUseBlock):
                calls.append(tool_call(block.id, block.name, _as_json(block.input)))
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield turn(self.role, "".join(texts))
                    texts = []
                results += 1
                more = {"is_error": True} if block.is_error else {}
                yield turn("tool", _joined(block.content), tool_call_id=block.tool_use_id, **more)
        if calls:
            yield turn(self.role, "".join(texts), tool_calls=calls)
        elif texts or not results:
            yield turn(self.role, "".join(texts))


def _joined(content: list[TextBlock]) -> str:
    return "".join(block.text for block in content)


def _as_json(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments)
    except RecursionError:
        raise InvalidRequest("messages: nested too deeply", "messages") from None


def _bounded(messages: object) -> object:
    """Bound the number of messages and blocks before validating any, which takes microseconds for
    each."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"at most {MOST_MESSAGES}, not {len(messages)}")
    blocks = sum(_count(m.get("content")) for m in messages if isinstance(m, dict))
    if blocks > MOST_PARTS:
        raise ValueError(f"at most {MOST_PARTS} blocks in all, not {blocks}")
    return messages


def _count(content: object) -> int:
    """Count blocks, including those within blocks."""
    if not isinstance(content, list):
        return 1
    within = (b["content"] for b in content if isinstance(b, dict) and "content" in b)
    return len(content) + sum(len(c) for c in within if isinstance(c, list))


def _few(content: object) -> object:
    if isinstance(content, list) and len(content) > MOST_PARTS:
        raise ValueError(f"at most {MOST_PARTS} blocks, not {len(content)}")
    return content


# -- requests -----------------------------------------------------------------------------------


class CountRequest(Translated):
    """`POST /v1/messages/count_tokens`."""

    NAMES = (
        (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
        (r"tools\.(\d+)\.function", r"tools.\1"),
        (r"tool_choice\.function\.name", "tool_choice.name"),
        (r"response_format\.json_schema", "output_config.format"),
        (r"response_format", "output_config.format"),
        (r"stop$", "stop_sequences"),
    )

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True), BeforeValidator(_bounded)]
    system: Annotated[Texts, BeforeValidator(_few)] = Field(default_factory=list)
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MOST_FUNCTIONS, fail_fast=True)] | None
    ) = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        return self._chat()

    def _chat(self, **fields: Any) -> ChatRequest:
        system = _joined(self.system)
        messages = [turn("system", system)] if system else []
        messages += [message for each in self.messages for message in each.messages()]
        last = messages[-1]
        # A last message of the assistant is the beginning of the answer, and continued.
        continued = last.role == "assistant" and not (last.model_extra or {}).get("tool_calls")
        choice, parallel = self._choice()
        return self.translated(
            _Chat,
            messages=messages,
            continue_final_message=continued,
            tools=None if self.tools is None else list(self._functions(self.tools)),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=self._format(),
            **fields,
        )

    def _functions(self, tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for i, tool in enumerate(tools):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                why = f"tools that the client runs (`custom`) are known here, {kind!r:.80} is not"
                raise refuse(f"tools.{i}.type", why)
            yield function_tool(tool, "input_schema")

    def _choice(self) -> tuple[str | dict[str, Any] | None, bool | None]:
        """Convert to `tool_choice` and `parallel_tool_calls` of a chat request."""
        if self.tool_choice is None:
            return None, None
        kind = self.tool_choice.get("type")
        parallel = False if self.tool_choice.get("disable_parallel_tool_use") else None
        if kind == "tool":
            return {
                "type": "function",
                "function": {"name": self.tool_choice.get("name")},
            }, parallel
        spelled = {"auto": "auto", "any": "required", "none": "none"}
        if not isinstance(kind, str) or kind not in spelled:
            raise refuse("tool_choice.type", "is auto, any, tool or none")
        return spelled[kind], parallel

    def _format(self) -> dict[str, Any] | None:
        """Convert to `response_format` of a chat request."""
        wanted = (self.output_config or {}).get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise refuse("output_config.format", "is an object of the type json_schema")
        return json_schema(wanted.get("schema"), "output", strict=True)


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_sequences: Stop = None

    def chat(self) -> ChatRequest:
        return self._chat(max_tokens=self.max_tokens, stop=self.stop_sequences)


class _Chat(ChatRequest):
    """A chat request whose client had to name a `max_tokens`, whatever the model's context."""

    @property
    def shortens_output(self) -> bool:
        return True
