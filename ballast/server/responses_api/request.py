"""Validate requests of the Responses API, and translate them to chat requests.

The server keeps no responses: requests that refer to an earlier one are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StrictBool, StrictInt, Tag

from ballast.core.sampling_defaults import SamplingDefaults
from ballast.server.conversation import (
    MOST_MESSAGES,
    MOST_PARTS,
    THOUGHT_KINDS,
    Message,
    Part,
    joined,
    text_of,
)
from ballast.server.http.fields import MOST_TOP, Text, at_most
from ballast.server.http.json_response import encode
from ballast.server.openai.request import ChatRequest
from ballast.server.openai.translation import (
    TranslatedRequest,
    function_tool,
    json_schema,
    readable,
    refuse,
    tool_call,
    turn,
)
from ballast.server.responses_api.records import Reasoning, TextFormat
from ballast.server.tools.request import MOST_FUNCTIONS, runs_elsewhere

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
MOST_METADATA = 16


# -- items --------------------------------------------------------------------------------------


def _as_parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if isinstance(content, list):
        return [readable(part, _PARTS, "content") for part in content]
    return content


_PARTS = ("input_text", "output_text", "text", "refusal", *THOUGHT_KINDS)
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

    def call(self) -> dict[str, Any]:
        return tool_call(self.call_id, self.name, self.arguments)


class CustomCallItem(BaseModel):
    """An earlier call of a tool that takes a text: shown as a function with that as argument."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text

    def call(self) -> dict[str, Any]:
        return tool_call(self.call_id, self.name, encode({"input": self.input}).decode())


class ShellCallItem(BaseModel):
    """An earlier command of a shell at the client: shown as a function with its action."""

    type: Literal["local_shell_call"]
    id: Text | None = None
    call_id: Text | None = None
    action: dict[str, Any]

    def call(self) -> dict[str, Any]:
        call_id = self.call_id or self.id or "local_shell"
        return tool_call(call_id, "local_shell", bytes(_encoded(self.action, "input")).decode())


class OutputItem(BaseModel):
    """Result of an earlier tool call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    id: Text | None = None
    call_id: Text | None = None
    output: Content

    def message(self) -> Message:
        call_id = self.call_id or self.id or "local_shell"
        return turn("tool", text_of(self.output), tool_call_id=call_id)


class OtherItem(BaseModel):
    """An item that chat templates have no place for, such as a search that ran elsewhere: it is
    left out."""

    type: Text


_CALLS = {"function_call", "custom_tool_call", "local_shell_call"}
_OUTPUTS = {f"{kind}_output" for kind in _CALLS}


def _kind(item: object) -> object:
    """Return the tag of an item by its type; an item without one is a message."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None or kind == "message":
        return "message"
    if not isinstance(kind, str):
        return None
    return "output" if kind in _OUTPUTS else kind if kind in _CALLS else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]
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
    if any(isinstance(item, dict) and item.get("type") == "item_reference" for item in value):
        raise ValueError("an 'item_reference' refers to an item that is not kept: send the item")
    return value


def _messages(items: list[Item]) -> Iterator[Message]:
    """Convert items to messages of a chat request. The texts and calls between two messages of
    others are one answer."""
    answer: list[MessageItem | CallItem | CustomCallItem | ShellCallItem] = []
    for item in items:
        if isinstance(item, OtherItem):
            continue
        if not isinstance(item, MessageItem | OutputItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        ):
            answer.append(item)
            continue
        if answer:
            yield _assistant(answer)
        answer = []
        if isinstance(item, OutputItem):
            yield item.message()
        else:
            yield turn(item.role, text_of(item.content))
    if answer:
        yield _assistant(answer)


def _assistant(
    items: list[MessageItem | CallItem | CustomCallItem | ShellCallItem],
) -> Message:
    texts = (text_of(item.content) for item in items if isinstance(item, MessageItem))
    calls = [item.call() for item in items if not isinstance(item, MessageItem)]
    return turn("assistant", joined(texts), **({"tool_calls": calls} if calls else {}))


# -- requests -----------------------------------------------------------------------------------


class TextSettings(BaseModel):
    format: dict[str, Any] | None = None


class ReasoningSettings(BaseModel):
    effort: Annotated[Text, Field(max_length=32)] | None = None


class ResponsesRequest(TranslatedRequest):
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
    reasoning: ReasoningSettings | None = None
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
    def _effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

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
        chat = self.translated(
            ChatRequest,
            messages=messages,
            max_tokens=self.max_output_tokens,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            reasoning_effort=self._effort,
        )
        others = (item.type for item in self.input if isinstance(item, OtherItem))
        chat.leave_out(f"item {kind}" for kind in others if kind != "reasoning")
        return chat

    def sampled(self, defaults: SamplingDefaults) -> dict[str, float]:
        """Fields of a `ResponseRecord` that repeat how tokens are sampled, with the model's
        `defaults` filled in."""
        own = SamplingDefaults(
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        ).over(defaults)
        return {
            "temperature": 1.0 if own.temperature is None else own.temperature,
            "top_p": 1.0 if own.top_p is None else own.top_p,
            "presence_penalty": own.presence_penalty or 0.0,
            "frequency_penalty": own.frequency_penalty or 0.0,
        }

    def repeated(self) -> dict[str, Any]:
        """Fields of a `ResponseRecord` that repeat the request, beside `sampled`. Raises
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
            if not runs_elsewhere(tool)
        ]
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "top_logprobs": self.top_logprobs or 0,
            "text": TextFormat(_encoded(self.format, "text")),
            "tools": _encoded(tools, "tools"),
            "tool_choice": _encoded(self.tool_choice or "auto", "tool_choice"),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "metadata": self.metadata or {},
            "user": self.user,
            "reasoning": Reasoning(self._effort),
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
        kept = [t for t in tools or () if t.get("function", t).get("name") in names]
        return mode, kept

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
        if runs_elsewhere(tool):
            yield {"type": tool["type"], "name": tool.get("name")}  # left out, and named
        elif tool.get("type") != "function":
            raise refuse(f"tools.{i}.type", "is a text, such as function")
        else:
            yield function_tool(tool, "parameters")
