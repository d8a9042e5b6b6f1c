"""Validate requests of the Responses API, and translate them to chat requests.

The server keeps no responses: requests that refer to an earlier one are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StrictBool, StrictInt, Tag

from ballast.server.conversation import MOST_MESSAGES, MOST_PARTS, Message
from ballast.server.http.fields import MOST_TOP, Text, at_most
from ballast.server.http.json_response import encode
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
from ballast.server.responses_api.records import TextFormat
from ballast.server.tools.request import MOST_FUNCTIONS

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
MOST_METADATA = 16


# -- items --------------------------------------------------------------------------------------


class TextPart(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(BaseModel):
    """A refusal in an earlier answer, of a model elsewhere."""

    type: Literal["refusal"]
    refusal: Text


def _as_parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if isinstance(content, list):
        return [readable(part, _PARTS, "content") for part in content]
    return content


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
_PARTS = ("input_text", "output_text", "text", "refusal")
_Parts = list[Part]
Content = Annotated[
    Annotated[_Parts, Field(fail_fast=True)],
    BeforeValidator(_as_parts, json_schema_input_type=Text | _Parts),
]
"""A text, or a list of parts of text."""


class MessageItem(BaseModel):
    """A message, of a client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(BaseModel):
    """An earlier call."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class OutputItem(BaseModel):
    """Result of an earlier tool call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(BaseModel):
    """Reasoning of an earlier answer: chat templates have no place for it, it is left out."""

    type: Literal["reasoning"]


def _kind(item: object) -> object:
    """Return the type of an item; an item without one is a message."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_Items = list[Item]


def _as_items(value: object) -> object:
    """Convert a text to a user's message, and bound the number of items and parts before validating
    any."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"at most {MOST_MESSAGES} items, not {len(value)}")
    contents = (i.get(key) for i in value if isinstance(i, dict) for key in ("content", "output"))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MOST_PARTS:
        raise ValueError(f"at most {MOST_PARTS} parts in all, not {parts}")
    return [readable(item, _ITEMS, "an item") for item in value]


def _messages(items: list[Item]) -> Iterator[Message]:
    """Convert items to messages of a chat request; calls are added to the answer that they
    follow."""
    said: str | None = None
    calls: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, CallItem):
            calls.append(tool_call(item.call_id, item.name, item.arguments))
            continue
        if said is not None or calls:
            yield _assistant(said, calls)
        said, calls = None, []
        if isinstance(item, OutputItem):
            yield turn("tool", _joined(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            said = _joined(item.content)
        else:
            yield turn("system" if item.role == "developer" else item.role, _joined(item.content))
    if said is not None or calls:
        yield _assistant(said, calls)


def _assistant(said: str | None, calls: list[dict[str, Any]]) -> Message:
    more = {"tool_calls": calls} if calls else {}
    return turn("assistant", said or "", **more)


def _joined(content: list[Part]) -> str:
    return "".join(p.text if isinstance(p, TextPart) else p.refusal for p in content)


# -- requests -----------------------------------------------------------------------------------


class TextSettings(BaseModel):
    format: dict[str, Any] | None = None


class ResponsesRequest(Translated):
    """`POST /v1/responses`."""

    NAMES = (
        (r"messages", "input"),
        (r"max_tokens", "max_output_tokens"),
        (r"tools\.(\d+)\.function", r"tools.\1"),
        (r"tool_choice\.function\.name", "tool_choice.name"),
        (r"response_format\.json_schema", "text.format"),
        (r"response_format", "text.format"),
    )

    input: Annotated[
        Annotated[_Items, Field(min_length=1, fail_fast=True)],
        BeforeValidator(_as_items, json_schema_input_type=Text | _Items),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MOST_FUNCTIONS, fail_fast=True)] | None
    ) = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    include: Annotated[list[Text], at_most(64)] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    metadata: Annotated[dict[Text, Text], at_most(MOST_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def format(self) -> dict[str, Any]:
        """Requested format of the text."""
        wanted = None if self.text is None else self.text.format
        return {"type": "text"} if wanted is None else wanted

    def chat(self) -> ChatRequest:
        self._check_state()
        messages = [turn("system", self.instructions)] if self.instructions else []
        messages += _messages(self.input)
        if not messages:
            raise refuse("input", "there is no message")
        choice, tools = self._choice()
        return self.translated(
            ChatRequest,
            messages=messages,
            max_tokens=self.max_output_tokens,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
        )

    def repeated(self) -> dict[str, Any]:
        """Fields of a `ResponseRecord` that repeat the request, with defaults filled in. Raises
        InvalidRequest."""
        tools = [
            {
                "type": "function",
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("parameters"),
                "strict": bool(tool.get("strict")),
            }
            for tool in self.tools or ()
        ]
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "top_logprobs": self.top_logprobs or 0,
            "text": TextFormat(_encoded(self.format, "text")),
            "tools": _encoded(tools, "tools"),
            "tool_choice": _encoded(self.tool_choice or "auto", "tool_choice"),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "metadata": self.metadata or {},
            "user": self.user,
        }

    def _check_state(self) -> None:
        """Raise InvalidRequest where the answer would need state that this server does not keep."""
        nothing = "no response is kept here"
        if self.store:
            raise refuse("store", f"{nothing}; leave it out, or set it to false")
        if self.background:
            raise refuse("background", f"{nothing}: wait for the answer, or stream it")
        for field in ("previous_response_id", "conversation"):
            if getattr(self, field) is not None:
                raise refuse(field, f"{nothing}; send the whole conversation as input")
        if self.prompt is not None:
            raise refuse("prompt", "no prompts are kept here; send instructions and input")

    def _choice(self) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]] | None]:
        """Convert to `tool_choice` and `tools` of a chat request."""
        tools = None if self.tools is None else list(_functions(self.tools))
        if not isinstance(self.tool_choice, dict):
            return self.tool_choice, tools
        kind = self.tool_choice.get("type")
        if kind == "function":
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}, tools
        if kind != "allowed_tools":
            raise refuse("tool_choice.type", "is function or allowed_tools: only functions are run")
        mode, allowed = self.tool_choice.get("mode"), self.tool_choice.get("tools")
        if mode not in ("auto", "required"):
            raise refuse("tool_choice.mode", "is auto or required")
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise refuse("tool_choice.tools", "is a list of functions by their names")
        names = [tool.get("name") for tool in allowed]
        return mode, [tool for tool in tools or () if tool["function"].get("name") in names]

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.format
        if wanted.get("type") != "json_schema":
            return wanted
        name, strict = wanted.get("name"), wanted.get("strict")
        return json_schema(wanted.get("schema"), str(name), strict=strict is True)


def _encoded(value: object, field: str) -> msgspec.Raw:
    """Encode a value as JSON. Raises InvalidRequest: a client's text may not be valid Unicode."""
    try:
        return msgspec.Raw(encode(value))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise refuse(field, f"it cannot be repeated in the answer: {error}") from error


def _functions(tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            raise refuse(f"tools.{i}.type", f"only functions can be called here, not {kind!r:.80}")
        yield function_tool(tool, "parameters")
