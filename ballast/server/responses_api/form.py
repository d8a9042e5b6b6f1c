"""Write output pieces in the form of the Responses API, as one response or as stream events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from ballast.server.http.faults import Fault
from ballast.server.http.json_list import JsonList
from ballast.server.http.json_response import encode
from ballast.server.http.sliced_response import SLICE_BYTES
from ballast.server.http.sse import DONE, PING, event
from ballast.server.openai.forms import Head, token_logprobs
from ballast.server.openai.records import TokenLogprob, Usage
from ballast.server.openai.request import ChatRequest
from ballast.server.responses_api.records import (
    ArgumentsDelta,
    ArgumentsDone,
    CachedTokens,
    ErrorEvent,
    FunctionCall,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTokens,
    ResponseError,
    ResponseEvent,
    ResponseRecord,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
)
from ballast.server.text.output_blocks import (
    BlockOpenedEvent,
    Grown,
    OutputBlock,
    OutputBlocks,
    Step,
)
from ballast.server.text.pieces import OutputPiece

_Code = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseForm:
    """Form of `/v1/responses`: writes one answer. Each block of the output is an item."""

    silence = PING

    def __init__(self, head: Head, request: ChatRequest, repeated: Mapping[str, Any]) -> None:
        """`repeated`: fields of a `ResponseRecord` that repeat the request."""
        self._head = head
        self._repeated = repeated
        self._alternatives = request.requested_logprobs
        """Number of alternatives with each token's log-probability; None: no log-probabilities."""
        self._blocks = OutputBlocks()
        self._encoded_scores: dict[int, JsonList] = {}
        """Log-probabilities of the text so far, by block: four events repeat them."""
        self._ids: list[str] = []
        """Ids of the items, by block."""
        self._cut = False
        """Whether the output was cut off by `max_output_tokens`, or by the context."""
        self._sent = 0
        """Number of events sent."""

    def opening(self, choices: int, usage: Usage) -> bytes:
        begun = self._record("in_progress")
        return b"".join(
            self._event(f"response.{what}", ResponseEvent, response=begun)
            for what in ("created", "in_progress")
        )

    def events(self, pieces: Iterable[OutputPiece]) -> bytes:
        return b"".join(self.parts(pieces))

    def parts(self, pieces: Iterable[OutputPiece]) -> Iterator[bytes]:
        # Each of the last events of a text repeats all of its log-probabilities.
        part = b""
        for step in self._push(pieces):
            for made in self._of_step(step):
                part = part + made if part else made
                if len(part) >= SLICE_BYTES:
                    yield part
                    part = b""
        if part:
            yield part

    def closing(self, usage: Usage) -> bytes:
        return self._end(self._whole(usage))

    def failed(self, fault: Fault) -> bytes:
        codes: dict[int, _Code] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        error = ResponseError(codes.get(fault.status, "server_error"), fault.text)
        return self._end(self._record("failed", error=error))

    def add(self, pieces: Iterable[OutputPiece]) -> None:
        for step in self._push(pieces):
            if isinstance(step, Grown):
                self._add_scores(step)

    @property
    def held(self) -> int:
        return self._blocks.held + sum(map(len, self._encoded_scores.values()))

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> ResponseRecord:
        self.add(pieces)
        return self._whole(usage)

    def _push(self, pieces: Iterable[OutputPiece]) -> Iterator[Step]:
        for piece in pieces:
            self._cut = piece.finish_reason == "length"
            yield from self._blocks.push(piece)

    def _whole(self, usage: Usage) -> ResponseRecord:
        counts = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=CachedTokens(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningTokens(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        if self._cut:
            details = IncompleteDetails("max_output_tokens")
            return self._record("incomplete", usage=counts, incomplete_details=details)
        now = int(self._head.wall.now())
        return self._record("completed", usage=counts, completed_at=now)

    def _record(self, status: Status, **fields: Any) -> ResponseRecord:
        """Build the response, as far as it has come."""
        blocks = self._blocks
        output = [
            self._item(block, last=block is blocks.blocks[-1], whole=blocks.ended and not self._cut)
            for block in blocks.blocks
        ]
        return ResponseRecord(
            id=self._head.answer_id,
            created_at=self._head.created,
            model=self._head.model,
            status=status,
            output=output,
            **self._repeated,
            **fields,
        )

    # -- items ------------------------------------------------------------------------------------

    def _item(self, block: OutputBlock, *, last: bool, whole: bool) -> OutputItem:
        """Convert a block that grows no more; only the last one of an output can be incomplete."""
        return self._made(block, "completed" if whole or not last else "incomplete")

    def _made(self, block: OutputBlock, status: ItemStatus) -> OutputItem:
        """Convert a block; one that has just been opened (`in_progress`) has nothing yet."""
        item_id, begun = self._id(block), status == "in_progress"
        if block.thought:
            thoughts = [] if begun else [ReasoningText(text=block.text)]
            return ReasoningItem(id=item_id, status=status, content=thoughts)
        if block.call is None:
            content = [] if begun else [self._part(block)]
            return OutputMessage(id=item_id, status=status, content=content)
        return FunctionCall(
            id=item_id,
            status=status,
            call_id=block.call.id,
            name=block.call.name,
            arguments="" if begun else block.text,
        )

    def _id(self, block: OutputBlock) -> str:
        if block.index == len(self._ids):
            kind = "rs" if block.thought else "msg" if block.call is None else "fc"
            self._ids.append(f"{kind}_{secrets.token_hex(12)}")
        return self._ids[block.index]

    def _part(self, block: OutputBlock) -> OutputText:
        scores = self._encoded_scores.get(block.index)
        return OutputText(text=block.text, logprobs=[] if scores is None else scores.raw)

    def _add_scores(self, step: Grown) -> list[TokenLogprob]:
        """Convert the scores of a step, and encode them for the block's end."""
        if self._alternatives is None or not step.scored:
            return []
        scores = token_logprobs(step.scored, self._alternatives, self._head.tokenizer)
        self._encoded_scores.setdefault(step.block.index, JsonList()).extend(scores)
        return scores

    # -- events -----------------------------------------------------------------------------------

    def _of_step(self, step: Step) -> Iterator[bytes]:
        block = step.block
        where = {"item_id": self._id(block), "output_index": block.index}
        if isinstance(step, BlockOpenedEvent):
            item = self._made(block, "in_progress")
            yield self._event("response.output_item.added", ItemEvent, block.index, item)
            if block.call is None:
                part = ReasoningText(text="") if block.thought else OutputText(text="")
                yield self._event("response.content_part.added", PartEvent, part=part, **where)
        elif isinstance(step, Grown) and block.thought:
            name = "response.reasoning_text.delta"
            yield self._event(name, ReasoningDelta, delta=step.fragment, **where)
        elif isinstance(step, Grown) and block.says:
            name, grown = "response.output_text.delta", step.fragment
            scores = self._add_scores(step)
            yield self._event(name, TextDelta, delta=grown, logprobs=scores, **where)
        elif isinstance(step, Grown):
            name = "response.function_call_arguments.delta"
            yield self._event(name, ArgumentsDelta, delta=step.fragment, **where)
        else:
            yield from self._closed(block, where)
            item = self._item(block, last=step.last, whole=not self._cut)
            yield self._event("response.output_item.done", ItemEvent, block.index, item)

    def _closed(self, block: OutputBlock, where: dict[str, Any]) -> Iterator[bytes]:
        if block.thought:
            thought = ReasoningText(text=block.text)
            name = "response.reasoning_text.done"
            yield self._event(name, ReasoningDone, text=block.text, **where)
            yield self._event("response.content_part.done", PartEvent, part=thought, **where)
        elif block.call is None:
            part = self._part(block)
            name, scores = "response.output_text.done", part.logprobs
            yield self._event(name, TextDone, text=part.text, logprobs=scores, **where)
            yield self._event("response.content_part.done", PartEvent, part=part, **where)
        else:
            yield self._event(
                "response.function_call_arguments.done",
                ArgumentsDone,
                name=block.call.name,
                arguments=block.text,
                **where,
            )

    def _end(self, response: ResponseRecord) -> bytes:
        return self._event(f"response.{response.status}", ResponseEvent, response=response) + DONE

    def _event(
        self, kind: str, record: Callable[..., msgspec.Struct], /, *values: Any, **fields: Any
    ) -> bytes:
        made = record(kind, self._sent, *values, **fields)
        self._sent += 1
        return event(encode(made), kind)


def response_failed(fault: Fault, request_id: str = "") -> bytes:
    """Encode the only event of a stream that cannot begin."""
    record = ErrorEvent("error", 0, fault.code, fault.text, fault.param)
    return event(encode(record), "error") + DONE
