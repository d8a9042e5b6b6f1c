"""Define the response records of the OpenAI API, encoded by msgspec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from ballast.server.model_loads import LoadStatus

UNSET = msgspec.UNSET
StopReason = str | int | msgspec.UnsetType
"""As in vLLM: the stop string or token that ended the output, of those that the client named."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] | msgspec.UnsetType = UNSET
    """Where their KV was: `device`, `host`, `disk`; unset where all of it was on the device."""


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(
        cls,
        prompt: int,
        completion: int,
        cached: int,
        reasoning: int = 0,
        fetched: Mapping[str, int] = MappingProxyType({}),
    ) -> Usage:
        """`fetched`: of the cached tokens, those from tiers below the device."""
        tiers = {"device": cached - sum(fetched.values()), **fetched} if fetched else UNSET
        details = PromptDetails(cached, tiers), CompletionDetails(reasoning)
        return cls(prompt, completion, prompt + completion, *details)


# -- completions --------------------------------------------------------------------------------


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    """Log-probabilities by the token's text; null where no alternatives are requested."""
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    stop_reason: StopReason = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a stream: they look alike."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = UNSET


# -- chat ---------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None
    """JSON text; in chunks, a fragment of it."""


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class ChatMessage(msgspec.Struct):
    content: str | None
    """Null where the answer consists of tool calls only."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = UNSET
    reasoning_content: str | msgspec.UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = UNSET


Chunk = TextCompletion | ChatChunk


# -- texts --------------------------------------------------------------------------------------


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class EmbeddingItem(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class RerankedText(msgspec.Struct):
    text: str


class RerankedDocument(msgspec.Struct, omit_defaults=True):
    index: int
    """Place in the request."""
    relevance_score: float
    document: RerankedText | None = None


class Reranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankedDocument]
    """The most relevant first."""


class PairScore(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


# -- models -------------------------------------------------------------------------------------


class ModelStatus(msgspec.Struct, omit_defaults=True):
    value: Literal["loaded", "loading", "evicted", "failed"]
    reason: str | None = None
    """Reason why the model failed."""
    load: LoadStatus | None = None
    """How far the server has loaded it, for which its requests wait; null where it has."""


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Start of this server, in seconds since 1970."""
    owned_by: str = "ballast"
    root: str
    """Own name of the model, or of an adapter's base."""
    parent: str | None
    """Base of an adapter; null for other models."""
    max_model_len: int | None
    """Context length in tokens; null for a model that could not be loaded."""
    status: ModelStatus


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class RunningModel(msgspec.Struct, kw_only=True):
    """A model whose weights are on a device, or on their way: an entry of llama-swap's list."""

    model: str
    state: Literal["ready", "starting", "stopping"]
    ttl: float
    """Seconds without a request after which it is evicted; 0: never."""
    waiting: int
    """Requests that wait to be admitted."""
    running: int
    """Requests admitted."""
    memory: int
    """Bytes that its weights and its KV cache take on all devices."""


class RunningList(msgspec.Struct, kw_only=True):
    running: list[RunningModel]


class Version(msgspec.Struct, kw_only=True):
    version: str
