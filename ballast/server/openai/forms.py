"""Write output pieces as OpenAI's completions and chat completions, whole or chunk by chunk.

`Form` is the protocol that all APIs' forms implement; `routes.generate` calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UnsetType

from ballast.core.clock import Clock
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.sse import DONE, PING, event
from ballast.server.openai.collected import CollectedChoice, CollectedChoices
from ballast.server.openai.records import (
    UNSET,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Delta,
    StopReason,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from ballast.server.openai.request import GenerateRequest
from ballast.server.text.pieces import OutputPiece, ScoredToken
from ballast.server.text.tokenizer import Tokenizer
from ballast.server.tools.delta import Began

_Usage = Usage | UnsetType | None
_LEAST = -9999.0
"""Log-probability returned for impossible tokens, as in vLLM."""


class Form(Protocol):
    """Writes one answer in the form of one API: whole, or as a stream of events."""

    silence: bytes
    """Sent while a stream is silent, so that clients do not take the silence for its end."""

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return the events before any token. `usage`: of the prompt, as far as it is known."""

    def events(self, pieces: Iterable[OutputPiece]) -> bytes:
        """Return the events of pieces that came together; may be empty."""

    def parts(self, pieces: Iterable[OutputPiece]) -> Iterable[bytes]:
        """Return the same events in parts, between which the loop can turn."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last token."""

    def failed(self, fault: Fault) -> bytes:
        """Return the events that end a stream which cannot be completed."""

    def add(self, pieces: Iterable[OutputPiece]) -> None:
        """Add pieces of a whole answer as they arrive."""

    @property
    def held(self) -> int:
        """Bytes that the pieces added so far take, about."""

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> msgspec.Struct:
        """Return the whole answer, after its last pieces."""


@dataclass(frozen=True, slots=True)
class Head:
    """Facts that forms take from the request and its model."""

    request_id: str
    """Id of the HTTP request, which errors of the Messages API repeat."""
    answer_id: str
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    wall: Clock
    created: int
    """Seconds since 1970."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The model's values for what requests leave open."""


def stream_failed(fault: Fault, request_id: str = "") -> bytes:
    """Encode the end of a stream that cannot be completed."""
    return event(fault.openai_body()) + DONE


class _Chunks:
    """Common base of the forms of chat and completions.

    Where usage is requested, chunks before the last have `usage: null`, as OpenAI's do.
    """

    silence = PING
    lists: int
    """Number of arrays that a choice's log-probabilities are written to."""

    def __init__(self, head: Head, request: GenerateRequest) -> None:
        self._id, self._created, self._model = head.answer_id, head.created, head.model
        self._fingerprint = head.fingerprint
        self._tokenizer = head.tokenizer
        self._include_usage = request.include_usage
        self._usage: _Usage = None if request.stream and request.include_usage else UNSET
        self._alternatives = request.requested_logprobs
        """Number of alternatives with each token's log-probability; None: no log-probabilities."""
        self._collected = CollectedChoices(self.lists)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """JSON before and after the text, by choice, of chunks that differ by their text only."""

    def opening(self, choices: int, usage: Usage) -> bytes:
        return b""

    def events(self, pieces: Iterable[OutputPiece]) -> bytes:
        return b"".join(event(self._encoded(piece)) for piece in pieces)

    def parts(self, pieces: Iterable[OutputPiece]) -> Iterable[bytes]:
        return (self.events(pieces),)

    def closing(self, usage: Usage) -> bytes:
        return (event(encode(self.usage(usage))) if self._include_usage else b"") + DONE

    def failed(self, fault: Fault) -> bytes:
        return stream_failed(fault)

    def usage(self, usage: Usage) -> Chunk:
        """Return the chunk without choices that has the usage."""
        raise NotImplementedError

    def chunk(self, piece: OutputPiece) -> Chunk:
        raise NotImplementedError

    def add(self, pieces: Iterable[OutputPiece]) -> None:
        for piece in pieces:
            choice = self._collected[piece.choice]
            choice.add(piece)
            if piece.scored and self._alternatives is not None:
                self._add_scores(choice, piece.scored)

    @property
    def held(self) -> int:
        return self._collected.held

    def _add_scores(self, choice: CollectedChoice, scored: Iterable[ScoredToken]) -> None:
        """Encode the scores of a piece of a whole answer."""
        raise NotImplementedError

    def _encoded(self, piece: OutputPiece) -> bytes:
        """Encode the chunk of a piece as JSON. Most chunks differ by their text alone."""
        plain = piece.finish_reason is None and self._alternatives is None
        if not plain or piece.calls or piece.thought:
            return encode(self.chunk(piece))
        around = self._around.get(piece.choice)
        if around is None:
            # The last empty string is the text: no field after it is one.
            before, _, after = encode(self.chunk(OutputPiece(piece.choice, ""))).rpartition(b'""')
            around = self._around[piece.choice] = before, after
        return around[0] + encode(piece.text) + around[1]

    def _token(self, token: int) -> str:
        return self._tokenizer.token_text(token)[0]


class ChatForm(_Chunks):
    """Form of `/v1/chat/completions`."""

    lists = 1

    def opening(self, choices: int, usage: Usage) -> bytes:
        delta = Delta(role="assistant", content="")
        chunks = (self._chunk([ChunkChoice(i, delta)]) for i in range(choices))
        return b"".join(event(encode(chunk)) for chunk in chunks)

    def chunk(self, piece: OutputPiece) -> Chunk:
        more = piece.finish_reason is not None or piece.calls or piece.thought
        delta = Delta(
            content=piece.text if piece.text or not more else None,
            tool_calls=_call_deltas(piece) or None,
            reasoning_content=piece.thought or None,
        )
        logprobs = self._logprobs([piece])
        choice = ChunkChoice(
            piece.choice, delta, piece.finish_reason, logprobs, _stop_reason(piece)
        )
        return self._chunk([choice])

    def usage(self, usage: Usage) -> Chunk:
        return self._chunk([], usage)

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> ChatCompletion:
        self.add(pieces)
        made = []
        for i, own in self._collected.first(choices):
            scores = None if self._alternatives is None else ChatLogprobs(own.scores[0].raw)
            made.append(ChatChoice(i, _message(own), own.finish_reason, scores, own.stop_reason))
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=made,
            usage=usage,
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=self._usage if usage is None else usage,
        )

    def _logprobs(self, pieces: Iterable[OutputPiece]) -> ChatLogprobs | None:
        if self._alternatives is None:
            return None
        scored = [s for piece in pieces for s in piece.scored]
        return ChatLogprobs(token_logprobs(scored, self._alternatives, self._tokenizer))

    def _add_scores(self, choice: CollectedChoice, scored: Iterable[ScoredToken]) -> None:
        alternatives = self._alternatives or 0
        choice.scores[0].extend(token_logprobs(scored, alternatives, self._tokenizer))


class TextForm(_Chunks):
    """Form of `/v1/completions`."""

    lists = 4

    def chunk(self, piece: OutputPiece) -> Chunk:
        logprobs = self._logprobs([piece])
        choice = TextChoice(
            piece.choice, piece.text, piece.finish_reason, logprobs, _stop_reason(piece)
        )
        return self._completion([choice], self._usage)

    def usage(self, usage: Usage) -> Chunk:
        return self._completion([], usage)

    def whole(self, pieces: Iterable[OutputPiece], choices: int, usage: Usage) -> TextCompletion:
        self.add(pieces)
        made = []
        for i, own in self._collected.first(choices):
            scores = None
            if self._alternatives is not None:
                tokens, logprobs, top, offsets = (scored.raw for scored in own.scores)
                scores = TextLogprobs(
                    tokens, logprobs, top if self._alternatives else None, offsets
                )
            made.append(TextChoice(i, own.text, own.finish_reason, scores, own.stop_reason))
        return self._completion(made, usage)

    def _completion(self, choices: list[TextChoice], usage: _Usage) -> TextCompletion:
        return TextCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, pieces: Iterable[OutputPiece]) -> TextLogprobs | None:
        if self._alternatives is None:
            return None
        tokens, logprobs, top, offsets = self._columns(s for p in pieces for s in p.scored)
        return TextLogprobs(tokens, logprobs, top if self._alternatives else None, offsets)

    def _add_scores(self, choice: CollectedChoice, scored: Iterable[ScoredToken]) -> None:
        columns: tuple[list[Any], ...] = self._columns(scored)
        for encoded, values in zip(choice.scores, columns, strict=True):
            encoded.extend(values)

    def _columns(
        self, scored: Iterable[ScoredToken]
    ) -> tuple[list[str], list[float | None], list[dict[str, float] | None], list[int]]:
        """Convert scored tokens to the arrays of `TextLogprobs`."""
        scored = list(scored)
        return (
            [self._token(s.token) for s in scored],
            [None if s.logprob is None else _finite(s.logprob) for s in scored],
            [self._top(s) for s in scored] if self._alternatives else [],
            [s.at for s in scored],
        )

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        """Return the alternatives and the token itself; of tokens with equal texts, the
        likeliest."""
        if scored.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in scored.top[: self._alternatives]:
            top.setdefault(self._token(token), _finite(logprob))
        top.setdefault(self._token(scored.token), _finite(scored.logprob))
        return top


def token_logprobs(
    scored: Iterable[ScoredToken], alternatives: int, tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """Convert scored tokens to records with `alternatives` each, as chat completions and responses
    have them."""
    found = []
    for s in scored:
        text, raw = tokenizer.token_text(s.token)
        top = []
        for token, logprob in s.top[:alternatives]:
            other, other_raw = tokenizer.token_text(token)
            top.append(TopLogprob(other, _finite(logprob), list(other_raw)))
        found.append(TokenLogprob(text, _finite(s.logprob), list(raw), top))
    return found


def _call_deltas(piece: OutputPiece) -> list[ToolCallDelta]:
    """Convert a piece's tool-call deltas, one for each call: clients expect no call twice in a
    chunk."""
    deltas: dict[int, ToolCallDelta] = {}
    for c in piece.calls:
        if isinstance(c, Began):
            deltas[c.index] = ToolCallDelta(c.index, c.id, "function", CalledFunction(c.name, ""))
        elif c.index not in deltas:
            deltas[c.index] = ToolCallDelta(c.index, function=CalledFunction(arguments=c.fragment))
        elif (function := deltas[c.index].function) is not None:
            function.arguments = (function.arguments or "") + c.fragment
    return list(deltas.values())


def _message(choice: CollectedChoice) -> ChatMessage:
    calls, thought = choice.calls, choice.thought or UNSET
    if not calls:
        return ChatMessage(choice.text, reasoning_content=thought)
    return ChatMessage(choice.text or None, tool_calls=calls, reasoning_content=thought)


def _finite(logprob: float | None) -> float:
    """Bound a log-probability: JSON has no infinities, and no NaN."""
    return logprob if logprob is not None and logprob > _LEAST else _LEAST


def _stop_reason(piece: OutputPiece) -> StopReason:
    return UNSET if piece.stop_reason is None else piece.stop_reason
