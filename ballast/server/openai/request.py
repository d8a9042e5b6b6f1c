"""Define and validate chat and completion requests: OpenAI's fields with vLLM's extensions.

`Service` generates from these only: requests of other APIs are translated to `ChatRequest`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool, StrictInt, model_validator

from ballast.core.errors import InvalidRequest
from ballast.server.conversation import Conversation, Messages
from ballast.server.http.fields import (
    FINITE,
    MOST_PROMPTS,
    MOST_TOP,
    Body,
    CacheSalt,
    Count,
    LogitBias,
    Penalty,
    Prompts,
    Stop,
    Text,
    TokenId,
    one_by_one,
)

MOST_CHOICES = 128
_SEED = 2**63
_PRIORITY = 2**31
_Most = Annotated[StrictInt, Field(ge=0)]
"""Number of tokens without an upper bound here: the model's context bounds it, with an error of its
own."""


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class SampledRequest(Body):
    """How tokens are chosen, and what else all requests that generate have in common. None stands
    for the default."""

    min_tokens: Count | None = None
    temperature: Annotated[float, FINITE, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, FINITE, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, FINITE, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, FINITE, Field(ge=0.01, le=100)] | None = None
    """Bounded, so that no logit overflows."""
    logit_bias: LogitBias | None = None
    seed: Annotated[StrictInt, Field(ge=-_SEED, lt=_SEED)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    priority: Annotated[StrictInt, Field(ge=-_PRIORITY, lt=_PRIORITY)] | None = None
    """Priority as in vLLM: a smaller number comes earlier."""
    cache_salt: CacheSalt | None = None
    user: Text | None = None


class _Generate(SampledRequest):
    """Fields that chat and text completions have in common."""

    max_tokens: _Most | None = None
    stop: Stop = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def shortens_output(self) -> bool:
        """Whether a `max_tokens` beyond the context is lowered to the tokens left, instead of
        refused."""
        return False

    @property
    def prompt_count(self) -> int:
        """Number of prompts, each with `choices` of its own."""
        return 1

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def requested_logprobs(self) -> int | None:
        """Number of alternatives with the log-probability of each token; None: no
        log-probabilities."""
        raise NotImplementedError

    def check(self) -> None:
        """Check rules that concern several fields. Raises InvalidRequest, naming the field."""
        most = self.most_tokens
        if most is not None and most < 1:
            raise InvalidRequest("max_tokens: must be at least 1", "max_tokens")
        if most is not None and (self.min_tokens or 0) > most:
            raise InvalidRequest(f"min_tokens: {self.min_tokens} is above {most}", "min_tokens")


class ChatRequest(_Generate, Conversation):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: _Most | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().shown_tools

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")


class CompletionRequest(_Generate):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if len(self.prompts) * self.choices > MOST_PROMPTS:
            raise ValueError(f"at most {MOST_PROMPTS} choices in all (prompts times n)")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each a text or a list of token ids."""
        return one_by_one(self.prompt)

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        if not (self.echo and self.max_tokens == 0):  # the prompt alone, with its scores
            super().check()


GenerateRequest = ChatRequest | CompletionRequest
