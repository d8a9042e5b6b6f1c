"""Validate requests of the Messages API, and translate them to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StrictInt, Tag

from ballast.core.errors import InvalidRequest
from ballast.server.conversation import (
    MOST_MESSAGES,
    MOST_PARTS,
    THOUGHT_KINDS,
    Message,
    ThoughtPart,
    joined,
    thoughts_of,
)
from ballast.server.http.faults import Fault
from ballast.server.http.fields import Stop, Text
from ballast.server.messages_api.client_tools import known_function
from ballast.server.openai.request import ChatRequest
from ballast.server.openai.translation import (
    TranslatedRequest,
    function_tool,
    json_schema,
    refuse,
    tool_call,
    turn,
)
from ballast.server.tools.request import MOST_FUNCTIONS

_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of the system prompt by which Claude Code marks its requests for Anthropic.
It differs from request to request, and would keep prefixes from being found again: it is left
out."""
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


class OtherBlock(BaseModel):
    """A block of a kind that is not known here: its text, where it has one, and else left out."""

    type: Text
    text: Any = None
    content: Any = None

    @property
    def readable(self) -> str:
        """The text of the block, or of those within it; empty where there is none."""
        parts = [self.text, *(self.content if isinstance(self.content, list) else [self.content])]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        return joined(text for text in texts if isinstance(text, str))


_UNREADABLE = ("image", "document", "container_upload", "audio", "video", "file")
"""Types of blocks whose content no model here can be given: a request with one is refused."""


def _as_blocks(content: object) -> object:
    """Convert content to a list of blocks; None is no content. Raises ValueError for a block that
    is not text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and (kind := block.get("type")) in _UNREADABLE:
            why = f"content of type {kind!r} cannot be read here, only text"
            raise ValueError(f"{why}: models are served for text alone")
    return content


def _kind_of(known: tuple[str, ...]) -> Discriminator:
    def kind(block: object) -> object:
        found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        if found in THOUGHT_KINDS and "thinking" in known:
            return "thinking"
        return found if found in known else "other"

    return Discriminator(kind)


_Shown = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], _kind_of(("text",))
]
_List = list[_Shown]
Texts = Annotated[
    Annotated[_List, Field(fail_fast=True)],
    BeforeValidator(_as_blocks, json_schema_input_type=Text | _List | None),
]
"""A text, or a list of blocks of text."""


class ToolResultBlock(BaseModel):
    """Result of an earlier tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default_factory=list)
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThoughtPart, Tag("thinking")]
    | Annotated[OtherBlock, Tag("other")],
    _kind_of(("text", "tool_use", "tool_result", "thinking")),
]
_Blocks = list[Block]


class Turn(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[_Blocks, Field(fail_fast=True)],
        BeforeValidator(_as_blocks, json_schema_input_type=Text | _Blocks),
    ]

    def messages(self, left_out: list[str]) -> Iterator[Message]:
        """Convert the turn to messages of a chat request; each tool result becomes a message of its
        own. Adds the names of blocks without a text to `left_out`. Raises InvalidRequest."""
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        thoughts = thoughts_of(self.content) if self.role == "assistant" else {}
        results = 0
        for block in self.content:
            if isinstance(block, TextBlock | OtherBlock):
                texts += _texts([block], left_out)
            elif isinstance(block, ToolUseBlock):
                calls.append(tool_call(block.id, block.name, _as_json(block.input)))
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield turn(self.role, joined(texts))
                    texts = []
                results += 1
                more = {"is_error": True} if block.is_error else {}
                content = joined(_texts(block.content, left_out))
                yield turn("tool", content, tool_call_id=block.tool_use_id, **more)
        if calls:
            yield turn(self.role, joined(texts), tool_calls=calls, **thoughts)
        elif texts or not results:
            yield turn(self.role, joined(texts), **thoughts)


def _texts(blocks: Iterable[TextBlock | OtherBlock], left_out: list[str]) -> Iterator[str]:
    """Yield the texts of blocks, as far as there are any; the others are named in `left_out`."""
    for block in blocks:
        text = block.text if isinstance(block, TextBlock) else block.readable
        if text:
            yield text
        elif isinstance(block, OtherBlock):
            left_out.append(f"block {block.type}")


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


class CountRequest(TranslatedRequest):
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
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        return self._chat()

    def _chat(self, **fields: Any) -> ChatRequest:
        left_out: list[str] = []
        texts = _texts(self.system, left_out)
        system = joined(text for text in texts if not text.startswith(_BILLING))
        messages = [turn("system", system)] if system else []
        messages += [message for each in self.messages for message in each.messages(left_out)]
        last = messages[-1]
        # A last message of the assistant is the beginning of the answer, and continued.
        continued = last.role == "assistant" and not (last.model_extra or {}).get("tool_calls")
        choice, parallel = self._choice()
        chat = self.translated(
            _Chat,
            messages=messages,
            continue_final_message=continued,
            tools=None if self.tools is None else list(self._functions(self.tools)),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=self._format(),
            **fields,
        )
        if self.thinking is not None:
            wanted = {"enable_thinking": self.thinking.get("type") != "disabled"}
            chat.chat_template_kwargs = wanted | (chat.chat_template_kwargs or {})
        chat.leave_out(left_out)
        return chat

    def _functions(self, tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for i, tool in enumerate(tools):
            function = known_function(tool)
            if function is not None:
                yield function_tool(function, "input_schema")
            elif isinstance(tool["type"], str):
                yield {"type": tool["type"], "name": tool.get("name")}  # left out, and named
            else:
                raise refuse(f"tools.{i}.type", "is a text, such as custom")

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
