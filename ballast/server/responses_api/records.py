"""Define the response and stream-event records of the Responses API, encoded by msgspec."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ballast.server.openai.records import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """JSON text."""


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class CachedTokens(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class TextFormat(msgspec.Struct):
    format: msgspec.Raw


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: None = None


class ResponseRecord(msgspec.Struct, kw_only=True):
    """A whole answer; in a stream, as far as it has come. Repeats what the request asked for where
    that had an effect; null where it had none."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: TextFormat
    tools: msgspec.Raw
    tool_choice: msgspec.Raw
    parallel_tool_calls: bool
    metadata: dict[str, str]
    user: str | None
    truncation: Literal["disabled"] = "disabled"
    store: Literal[False] = False
    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    max_tool_calls: None = None
    safety_identifier: None = None
    prompt_cache_key: None = None


# -- events of a stream -------------------------------------------------------------------------


class ResponseEvent(msgspec.Struct):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete` and `.failed`."""

    type: str
    sequence_number: int
    response: ResponseRecord


class ErrorEvent(msgspec.Struct):
    """`error`: there is no response."""

    type: str
    sequence_number: int
    code: str
    message: str
    param: str | None


class ItemEvent(msgspec.Struct):
    """`response.output_item.added` and `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct):
    """`response.content_part.added` and `.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0


class TextDelta(msgspec.Struct):
    """`response.output_text.delta`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    logprobs: list[TokenLogprob]
    content_index: int = 0


class TextDone(msgspec.Struct):
    """`response.output_text.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    logprobs: list[TokenLogprob]
    content_index: int = 0


class ReasoningDelta(msgspec.Struct):
    """`response.reasoning_text.delta`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(msgspec.Struct):
    """`response.reasoning_text.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(msgspec.Struct):
    """`response.function_call_arguments.delta`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct):
    """`response.function_call_arguments.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str
