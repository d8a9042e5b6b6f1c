"""Conversations, as requests write them and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ballast.server.fields import Body, Text


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One turn of a conversation; what the chat template may know beyond it is passed on."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[Text, Field(min_length=1)]
    content: Text | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """With the content as one string, and without nulls: small models' templates know
        nothing else."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        more = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        return {**more, "role": self.role, "content": content or ""}


Messages = Annotated[list[Message], Field(min_length=1)]


class Conversation(Body):
    """What a chat template is given."""

    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
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
