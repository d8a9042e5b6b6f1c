"""Define the request fields of a conversation (messages and tools), and convert them for chat
templates.

The request schemas of all APIs that take conversations are built on it. Only text content is
accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ballast.server.http.fields import Body, Text
from ballast.server.tools.request import MOST_FUNCTIONS

MOST_MESSAGES = 4096
MOST_PARTS = 8192
"""Parts of text, of all messages of a conversation together."""


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One turn of a conversation; what the chat template may know beyond it is passed on."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[Text, Field(min_length=1)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """With the content as one string, and without nulls: small models' templates know
        nothing else."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        more = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        return {**more, "role": self.role, "content": content or ""}


def _bounded(messages: object) -> object:
    """Count messages and parts before any is validated: each takes microseconds. Name the first
    content that is no text: pydantic's words for a union of types are not for people."""
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
    """Where a message's content is no text, and what it is; None: it may be one."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return ' must be a text, or a list of parts like {"type": "text", "text": "..."}'
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            return f'[{i}] must be a part like {{"type": "text", "text": "..."}}'
        if kind != "text":
            what = f"is of type {kind[:40]!r}"
            return f"[{i}] {what}: models are served for text alone, in parts of type 'text'"
    return None


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_bounded),
]


class Conversation(Body):
    """What a chat template is given."""

    messages: Messages | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MOST_FUNCTIONS, fail_fast=True)] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True unless said otherwise: the model is to answer."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message instead."""
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a text, too; False for conversations, whose templates write
    special tokens themselves."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """What the chat template is given of them."""
        return self.tools or []
