"""Requests of the OpenAI API, as far as Ballast serves it, checked field by field.

Unknown fields are kept apart (`model_extra`), so that they can be named in a warning: a client
written for another server works, and its author can find out what had no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    model_validator,
)

MOST_CHOICES = 128
MOST_PROMPTS = 256
_SEED = 2**63

_Finite = Field(allow_inf_nan=False)


def _listed(value: object) -> object:
    """A single stop string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text


_Text = Annotated[str, AfterValidator(_unicode)]

_Stop = Annotated[
    list[Annotated[_Text, Field(min_length=1)]] | None,
    Field(max_length=16),
    BeforeValidator(_listed),
]


_TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generate(BaseModel):
    """What chat and completions have in common. None stands for the default."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: _Text
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, _Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, _Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[StrictInt, Field(ge=-_SEED, lt=_SEED)] | None = None
    stop: _Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(BaseModel):
    type: Literal["text"]
    text: _Text


class Message(BaseModel):
    """One turn of a conversation; what the chat template may know beyond it is passed on."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[_Text, Field(min_length=1)]
    content: _Text | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """With the content as one string: small models' templates know nothing else."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatRequest(_Generate):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None
    """Only the chosen token's log-probability is known."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


Tokens = Annotated[list[_TokenId], Field(min_length=1)]


class CompletionRequest(_Generate):
    """`POST /v1/completions`."""

    prompt: (
        _Text
        | Tokens
        | Annotated[list[_Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None
    """Only the chosen token's log-probability is known."""

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if len(self.prompts) * self.choices > MOST_PROMPTS:
            raise ValueError(f"at most {MOST_PROMPTS} choices in all (prompts times n)")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one, as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


GenerateRequest = ChatRequest | CompletionRequest


def ignored(request: GenerateRequest) -> list[str]:
    """Fields the client sent that have no effect here."""
    return sorted(request.model_extra or {})
