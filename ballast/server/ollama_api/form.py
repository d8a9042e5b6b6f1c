"""Write output pieces in the form of Ollama's API, as one answer or as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from ballast.core.clock import Clock
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.ollama_api.records import (
    ChatAnswer,
    GenerateAnswer,
    OllamaCall,
    OllamaFunction,
    OllamaMessage,
)
from ballast.server.openai.forms import Head
from ballast.server.openai.records import Usage
from ballast.server.text.output_blocks import (
    BlockClosedEvent,
    Grown,
    OutputBlock,
    OutputBlocks,
    Step,
)
from ballast.server.text.pieces import OutputPiece

_NANOSECONDS = 1_000_000_000
Answer = ChatAnswer | GenerateAnswer


def stamp(seconds: float) -> str:
    """Format a time, in seconds since 1970, as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def line(record: msgspec.Struct) -> bytes:
    """Encode one line of a stream."""
    return encode(record) + b"\n"


def line_failed(fault: Fault, request_id: str = "") -> bytes:
    """Encode the last line of a stream that cannot be completed."""
    return fault.ollama_body() + b"\n"


class AnswerWriter:
    """Makes the answers of one route. `began`: when the request arrived, by `clock`."""

    def __init__(self, model: str, clock: Clock, wall: Clock, began: float, *, chats: bool) -> None:
        self._model, self._wall = model, wall
        self._chats = chats
        self.clock, self.began = clock, began

    def answer(
        self, text: str = "", calls: Iterable[OllamaCall] = (), thought: str = "", **more: Any
    ) -> Answer:
        """Make an answer, or one part of it."""
        at = stamp(self._wall.now())
        more = {"done": False, **more}
        if self._chats:
            message = OllamaMessage("assistant", text, list(calls), thought)
            return ChatAnswer(model=self._model, created_at=at, message=message, **more)
        more |= {"response": text, "thinking": thought}
        return GenerateAnswer(model=self._model, created_at=at, **more)

    def loaded(self, *, unload: bool) -> Answer:
        """Make the answer of a request that generates nothing. `unload`: it was to free memory,
        which the fleet's memory policy does when others need it."""
        taken = round((self.clock.now() - self.began) * _NANOSECONDS)
        reason = "unload" if unload else "load"
        return self.answer(done=True, done_reason=reason, total_duration=taken, load_duration=taken)


class OllamaForm:
    """Form of `/api/chat` and `/api/generate`: writes one answer."""

    def __init__(self, head: Head, writer: AnswerWriter) -> None:
        self._writer = writer
        self.silence = line(writer.answer())
        self._blocks = OutputBlocks()
        self._submitted = writer.clock.now()
        self._first: float | None = None
        """When the first token came."""
        self._reason = "stop"

    def opening(self, choices: int, usage: Usage) -> bytes:
        return b""

    def events(self, pieces: Iterable[OutputPiece]) -> bytes:
        return b"".join(line(a) for s in self._push(pieces) if (a := self._of_step(s)) is not None)

    def parts(self, pieces: Iterable[OutputPiece]) -> Iterable[bytes]:
        return (self.events(pieces),)

    def closing(self, usage: Usage) -> bytes:
        return line(self._last("", (), "", usage))

    def failed(self, fault: Fault) -> bytes:
        return line_failed(fault)

    def add(self, pieces: Iterable[OutputPiece]) -> None:
        for _ in self._push(pieces):
            pass

    @property
    def held(self) -> int:
        return self._blocks.held

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> Answer:
        self.add(pieces)
        blocks = self._blocks.blocks
        text = "".join(b.text for b in blocks if b.says)
        thought = "".join(b.text for b in blocks if b.thought)
        return self._last(text, [_call(b) for b in blocks if b.call is not None], thought, usage)

    def _push(self, pieces: Iterable[OutputPiece]) -> Iterator[Step]:
        for piece in pieces:
            if self._first is None:
                self._first = self._writer.clock.now()
            if piece.finish_reason is not None:
                self._reason = "length" if piece.finish_reason == "length" else "stop"
            yield from self._blocks.push(piece)

    def _of_step(self, step: Step) -> Answer | None:
        """Make the answer's part of a step: text as it grows, calls when they are complete."""
        if isinstance(step, Grown) and step.block.call is None and step.fragment:
            thought = step.block.thought
            return self._writer.answer(*(("", (), step.fragment) if thought else (step.fragment,)))
        if isinstance(step, BlockClosedEvent) and step.block.call is not None:
            return self._writer.answer(calls=[_call(step.block)])
        return None

    def _last(self, text: str, calls: Iterable[OllamaCall], thought: str, usage: Usage) -> Answer:
        now, began = self._writer.clock.now(), self._writer.began
        first = now if self._first is None else self._first
        spans = {
            "total_duration": now - began,
            "load_duration": self._submitted - began,
            "prompt_eval_duration": first - self._submitted,
            "eval_duration": now - first,
        }
        durations = {name: round(seconds * _NANOSECONDS) for name, seconds in spans.items()}
        counts = {
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }
        return self._writer.answer(
            text, calls, thought, done=True, done_reason=self._reason, **counts, **durations
        )


def _call(block: OutputBlock) -> OllamaCall:
    """Convert a complete call. Arguments that are no JSON object are the text under `arguments`."""
    assert block.call is not None
    try:
        found = msgspec.json.decode(block.text) if block.text else {}
    except (ValueError, RecursionError):
        found = None
    arguments = found if isinstance(found, dict) else {"arguments": block.text}
    return OllamaCall(OllamaFunction(block.call.name, arguments))
