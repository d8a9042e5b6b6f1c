"""Write output pieces in the form of the Messages API, as one message or as stream events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.sse import event
from ballast.server.messages_api.records import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    Event,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from ballast.server.messages_api.request import MessagesRequest
from ballast.server.openai.forms import Head
from ballast.server.openai.records import Usage
from ballast.server.text.output_blocks import (
    BlockClosedEvent,
    BlockOpenedEvent,
    Grown,
    OutputBlock,
    OutputBlocks,
    Step,
)
from ballast.server.text.pieces import OutputPiece

INVALID = "INVALID_JSON"
"""Key under which arguments are wrapped that are no JSON object, as in Anthropic's documentation: a
model wrote them without being held to a schema, or was cut off, and the API requires an object."""


class MessageForm:
    """Form of `/v1/messages`: writes one answer."""

    def __init__(self, head: Head, request: MessagesRequest) -> None:
        self._head = head
        self._max_tokens = request.max_tokens
        self._blocks = OutputBlocks()
        self._last: OutputPiece | None = None
        """The piece that ended the output."""
        self.silence = _event(Ping())

    def opening(self, choices: int, usage: Usage) -> bytes:
        return _event(MessageStart(message=self._message([], usage)))

    def events(self, pieces: Iterable[OutputPiece]) -> bytes:
        return b"".join(
            _event(made) for step in self._push(pieces) if (made := _of_step(step)) is not None
        )

    def parts(self, pieces: Iterable[OutputPiece]) -> Iterable[bytes]:
        return (self.events(pieces),)

    def closing(self, usage: Usage) -> bytes:
        delta = MessageDelta(delta=self._stopped(usage), usage=_usage(usage))
        return _event(delta) + _event(MessageStop())

    def failed(self, fault: Fault) -> bytes:
        return message_failed(fault, self._head.request_id)

    def add(self, pieces: Iterable[OutputPiece]) -> None:
        for _ in self._push(pieces):
            pass

    @property
    def held(self) -> int:
        return self._blocks.held

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> Message:
        self.add(pieces)
        return self._message([_content(block) for block in self._blocks.blocks], usage)

    def _push(self, pieces: Iterable[OutputPiece]) -> Iterator[Step]:
        for piece in pieces:
            if piece.finish_reason is not None:
                self._last = piece
            yield from self._blocks.push(piece)

    def _message(self, content: list[ContentBlock], usage: Usage) -> Message:
        stopped = self._stopped(usage)
        return Message(
            id=self._head.answer_id,
            model=self._head.model,
            content=content,
            stop_reason=stopped.stop_reason,
            stop_sequence=stopped.stop_sequence,
            usage=_usage(usage),
        )

    def _stopped(self, usage: Usage) -> StopDelta:
        """The reason why the output ended, if it has."""
        last = self._last
        if last is None:
            return StopDelta(None, None)
        reason: StopReason = "end_turn"
        sequence = last.stop_reason
        if last.finish_reason == "tool_calls":
            reason, sequence = "tool_use", None
        elif last.finish_reason == "length":
            whole = usage.completion_tokens >= self._max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        elif sequence is not None:
            reason = "stop_sequence"
        if isinstance(sequence, int):
            sequence = self._head.tokenizer.token_text(sequence)[0]
        return StopDelta(reason, sequence)


def _of_step(step: Step) -> Event | None:
    block = step.block
    if isinstance(step, BlockOpenedEvent):
        return BlockStart(index=block.index, content_block=_content(block))
    if isinstance(step, BlockClosedEvent):
        return BlockStop(index=block.index)
    assert isinstance(step, Grown)
    if not step.fragment:
        return None
    if block.thought:
        return BlockDelta(index=block.index, delta=ThinkingDelta(thinking=step.fragment))
    if block.call is None:
        return BlockDelta(index=block.index, delta=TextDelta(text=step.fragment))
    return BlockDelta(index=block.index, delta=InputDelta(partial_json=step.fragment))


def _content(block: OutputBlock) -> ContentBlock:
    """Convert a block, as far as it has grown."""
    if block.thought:
        return ThinkingBlock(thinking=block.text)
    if block.call is None:
        return TextBlock(text=block.text)
    return ToolUseBlock(id=block.call.id, name=block.call.name, input=_input(block.text))


def _input(arguments: str) -> dict[str, object]:
    try:
        found = msgspec.json.decode(arguments) if arguments else {}
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID: arguments}


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _event(record: Event) -> bytes:
    return event(encode(record), str(type(record).__struct_config__.tag))


def message_failed(fault: Fault, request_id: str) -> bytes:
    """Encode the end of a stream that cannot be completed."""
    return event(fault.messages_body(request_id), "error")
