"""Convert a request's fields to sampling parameters, stop conditions and output length for the
engine."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import fields
from typing import TypeVar

from ballast.core.errors import ContextLengthExceeded, InvalidRequest
from ballast.core.model import ModelSpec
from ballast.core.request import Sampling
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.server.generate.choice import StopConditions
from ballast.server.openai.request import ChatRequest, CompletionRequest, GenerateRequest
from ballast.server.text.tokenizer import Tokenizer

T = TypeVar("T")

COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as in OpenAI's API."""
CHAT_TOKENS = 32_768
"""Default `max_tokens` of conversations, where neither fleet file nor checkpoint has one: what a
model that reasons may need, and less than the contexts that one which repeats itself would fill."""
_API = SamplingDefaults(temperature=1.0)
"""What OpenAI's API has where nothing else does."""
_SAMPLED = tuple(f.name for f in fields(SamplingDefaults) if f.name != "max_tokens")
COLDEST = 1e-5
"""Temperatures below it count as 0, as in vLLM: dividing logits by them would overflow."""


def stops_of(request: GenerateRequest, spec: ModelSpec, tokenizer: Tokenizer) -> StopConditions:
    """Derive a request's stop conditions; a stop string that is a special token becomes a stop
    token. A conversation ends with the tokenizer's end token, too. Raises InvalidRequest."""
    strings: list[str] = []
    tokens = list(request.stop_token_ids or ())
    check_tokens(tokens, spec, "stop_token_ids")
    for stop in request.stop or ():
        token = tokenizer.special_token(stop)
        if token is None:
            strings.append(stop)
        else:
            tokens.append(token)
    return StopConditions(
        strings=tuple(strings),
        tokens=tuple(tokens),
        eos=() if request.ignore_eos else _end_tokens(request, spec, tokenizer),
        min_tokens=request.min_tokens or 0,
    )


def _end_tokens(request: GenerateRequest, spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(request, ChatRequest):
        return tokenizer.chat_ends(spec)
    return spec.eos_token_ids


def sampling_of(request: GenerateRequest, spec: ModelSpec, stops: StopConditions) -> Sampling:
    """Derive the sampling parameters of the first choice; what it leaves open is the model's
    default, and a missing seed is drawn here. Raises InvalidRequest."""
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    check_tokens(bias, spec, "logit_bias")
    chosen = SamplingDefaults(**{name: getattr(request, name) for name in _SAMPLED})
    chosen = chosen.over(spec.sampling).over(_API)
    temperature = chosen.temperature or 0.0
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=_or(chosen.top_p, 1.0),
        top_k=max(0, chosen.top_k or 0),
        min_p=chosen.min_p or 0.0,
        presence_penalty=chosen.presence_penalty or 0.0,
        frequency_penalty=chosen.frequency_penalty or 0.0,
        repetition_penalty=_or(chosen.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((token, value) for token, value in bias.items() if value)),
        banned=stops.banned,
        min_tokens=stops.min_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        logprobs=request.requested_logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def check_tokens(tokens: Collection[int], spec: ModelSpec, field: str) -> None:
    """Raise InvalidRequest if a token id is outside of the vocabulary."""
    if tokens and max(tokens) >= spec.vocab:
        raise InvalidRequest(f"{field}: token id {max(tokens)} is not below {spec.vocab}", field)
    if tokens and min(tokens) < 0:
        raise InvalidRequest(f"{field}: token id {min(tokens)} is negative", field)


def check_fits(spec: ModelSpec, prompt_tokens: int, output_tokens: int, field: str) -> None:
    """Raise ContextLengthExceeded if prompt and output exceed the context; prompts are never
    truncated."""
    needed = prompt_tokens + output_tokens
    if needed > spec.max_model_len:
        raise ContextLengthExceeded(
            f"the context of {spec.name!r} is {spec.max_model_len} tokens; this request needs "
            f"{needed}: {prompt_tokens} of the prompt and {output_tokens} to generate",
            field,
        )


def most_tokens(request: GenerateRequest, spec: ModelSpec, prompt_tokens: int, fitting: int) -> int:
    """Bound on the output, in tokens; `fitting`: what one answer may have at most, for a request
    that does not insist on more. Raises ContextLengthExceeded.

    `max_tokens=0` runs one step, since an engine has no step without output; its token is
    discarded.
    """
    asked = request.most_tokens
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    left = spec.max_model_len - prompt_tokens
    if asked is not None and request.shortens_output:
        asked = max(1, min(asked, left, fitting))
    check_fits(spec, prompt_tokens, asked or 1, field)
    if asked is not None:
        return asked or 1
    bound = min(fitting, spec.sampling.max_tokens or CHAT_TOKENS)
    return min(left, bound, COMPLETION_TOKENS if isinstance(request, CompletionRequest) else bound)
