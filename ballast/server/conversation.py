"""Define the request fields of a conversation (messages and tools), and convert them for chat
templates.

The request schemas of all APIs that take conversations are built on it. Only text content is
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from ballast.server.http.fields import Body, Text
from ballast.server.tools.request import MOST_FUNCTIONS, runs_elsewhere, tools_left_out

MOST_MESSAGES = 4096
MOST_PARTS = 8192
"""Most parts of text in all messages of a conversation together."""


TEXT_KINDS = ("text", "input_text", "output_text")
THOUGHT_KINDS = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts with the reasoning of an earlier answer."""


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(BaseModel):
    """A refusal in an earlier answer, of a model elsewhere."""

    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(BaseModel):
    """Reasoning of an earlier answer. Templates get it as `reasoning_content`, and use it if they
    have a place for it."""

    type: Literal["thinking", "redacted_thinking", "reasoning"]
    thinking: Text | None = None


Part = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]
_KINDS = (*TEXT_KINDS, *THOUGHT_KINDS, "refusal")


def joined(texts: Iterable[str]) -> str:
    """Join the texts of several parts by line breaks; empty ones add none."""
    return "\n".join(text for text in texts if text)


def text_of(parts: Iterable[TextPart | RefusalPart | ThoughtPart]) -> str:
    """Return the text of content in parts."""
    return joined(
        part.text if isinstance(part, TextPart) else part.refusal
        for part in parts
        if not isinstance(part, ThoughtPart)
    )


def thoughts_of(parts: Iterable[object]) -> dict[str, str]:
    """Return the reasoning of content in parts, as a field of its message; without any, none."""
    thought = joined(p.thinking for p in parts if isinstance(p, ThoughtPart) and p.thinking)
    return {"reasoning_content": thought} if thought else {}


class Message(BaseModel):
    """One turn of a conversation; what the chat template may know beyond it is passed on."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[Text, Field(min_length=1)]
    content: Text | Annotated[list[Part], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template: content as one string, and neither nulls nor an
        empty list of calls, as small models' templates expect."""
        content = self.content
        more: dict[str, Any] = {}
        if isinstance(content, list):
            more, content = thoughts_of(content), text_of(content)
        more |= {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        if not more.get("tool_calls", True):
            del more["tool_calls"]
        return {**more, "role": self.role, "content": content or ""}


def _bounded(messages: object) -> object:
    """Bound the number of messages and parts before validating any, which takes microseconds for
    each. Raises ValueError, also for the first content that is not text: pydantic's message for a
    union of types is hard to read."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"at most {MOST_MESSAGES}, not {len(messages)}")
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MOST_PARTS:
        raise ValueError(f"at most {MOST_PARTS} parts in all, not {parts}")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and (why := _no_text(message.get("content"))) is not None:
            raise ValueError(f"messages[{i}].content{why}")
    return messages


def _no_text(content: object) -> str | None:
    """Describe where and why a message's content is not text; None where it may be text."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return ' must be a text, or a list of parts like {"type": "text", "text": "..."}'
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            return f'[{i}] must be a part like {{"type": "text", "text": "..."}}'
        if kind not in _KINDS:
            what = f"is of type {kind[:40]!r}"
            return f"[{i}] {what}: models are served for text alone, in parts of type 'text'"
    return None


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_bounded),
]


class Conversation(Body):
    """A chat template's inputs."""

    messages: Messages | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MOST_FUNCTIONS, fail_fast=True)] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[Text, Field(max_length=32)] | None = None
    """Asks the template to have the model reason, unless it is `none`."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where the model's answer begins; default true."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message instead."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens around a text; false for conversations, whose
    templates write special tokens themselves."""

    _left_out: list[str] = PrivateAttr(default_factory=list)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables that the chat template gets beside messages and tools."""
        effort, named = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return named
        return {"enable_thinking": effort != "none", "reasoning_effort": effort, **named}

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Tools that the chat template gets: functions alone."""
        return [tool for tool in self.tools or () if not runs_elsewhere(tool)]

    @property
    def left_out(self) -> list[str]:
        """Names of what the request is answered without: tools that cannot run here, and content of
        kinds that no chat template has a place for."""
        return tools_left_out(self.tools or ()) + self._left_out

    def leave_out(self, names: Iterable[str]) -> None:
        """Note content that was left out where another API's request was translated."""
        self._left_out += names
