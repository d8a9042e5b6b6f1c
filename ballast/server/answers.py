"""Pieces as OpenAI's answers: whole, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import UnsetType

from ballast.server.choice import Piece
from ballast.server.responses import (
    UNSET,
    Answer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Delta,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from ballast.server.tokenizer import Tokenizer

_Usage = Usage | UnsetType | None


class Form(Protocol):
    """One of the two shapes of answers."""

    def opening(self, choices: int) -> list[Chunk]:
        """Chunks that come before any token."""

    def chunk(self, piece: Piece) -> Chunk: ...

    def closing(self, usage: Usage) -> Chunk:
        """The chunk without choices that tells the usage."""

    def whole(self, pieces: Iterable[Piece], choices: int, usage: Usage) -> Answer: ...


class _Head:
    """What is the same in all chunks of an answer. `created`: seconds since 1970.

    With `tells_usage`, chunks say that usage is still to come (null), as OpenAI's do.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        *,
        tells_usage: bool,
        logprobs: bool,
    ) -> None:
        self._id, self._created, self._model = answer_id, created, model
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._usage: _Usage = None if tells_usage else UNSET
        self._wants_logprobs = logprobs
        self._offsets: dict[int, int] = {}
        """Characters of each choice so far."""


class ChatForm(_Head):
    """`/v1/chat/completions`."""

    def opening(self, choices: int) -> list[Chunk]:
        delta = Delta(role="assistant", content="")
        return [self._chunk([ChunkChoice(i, delta)]) for i in range(choices)]

    def chunk(self, piece: Piece) -> Chunk:
        delta = Delta() if piece.token is None and not piece.text else Delta(content=piece.text)
        logprobs = self._logprobs([piece])
        return self._chunk([ChunkChoice(piece.choice, delta, piece.finish_reason, logprobs)])

    def closing(self, usage: Usage) -> Chunk:
        return self._chunk([], usage)

    def whole(self, pieces: Iterable[Piece], choices: int, usage: Usage) -> Answer:
        made = [
            ChatChoice(i, ChatMessage(_text(own)), _reason(own), self._logprobs(own))
            for i, own in enumerate(_by_choice(pieces, choices))
        ]
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

    def _logprobs(self, pieces: Iterable[Piece]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        content = []
        for piece in pieces:
            if piece.token is not None and piece.logprob is not None:
                text, raw = self._tokenizer.token_text(piece.token)
                content.append(TokenLogprob(text, piece.logprob, list(raw)))
        return ChatLogprobs(content)


class TextForm(_Head):
    """`/v1/completions`."""

    def opening(self, choices: int) -> list[Chunk]:
        return []

    def chunk(self, piece: Piece) -> Chunk:
        logprobs = self._logprobs([piece])
        choice = TextChoice(piece.choice, piece.text, piece.finish_reason, logprobs)
        return self._completion([choice], self._usage)

    def closing(self, usage: Usage) -> Chunk:
        return self._completion([], usage)

    def whole(self, pieces: Iterable[Piece], choices: int, usage: Usage) -> Answer:
        made = [
            TextChoice(i, _text(own), _reason(own), self._logprobs(own))
            for i, own in enumerate(_by_choice(pieces, choices))
        ]
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

    def _logprobs(self, pieces: Iterable[Piece]) -> TextLogprobs | None:
        if not self._wants_logprobs:
            return None
        told = TextLogprobs([], [], [])
        for piece in pieces:
            at = self._offsets.get(piece.choice, 0)
            self._offsets[piece.choice] = at + len(piece.text)
            if piece.token is not None:
                told.tokens.append(self._tokenizer.token_text(piece.token)[0])
                told.token_logprobs.append(piece.logprob)
                told.text_offset.append(at)
        return told


def _by_choice(pieces: Iterable[Piece], choices: int) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in range(choices)]
    for piece in pieces:
        found[piece.choice].append(piece)
    return found


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(p.text for p in pieces)


def _reason(pieces: Iterable[Piece]) -> str | None:
    return next((p.finish_reason for p in pieces if p.finish_reason is not None), None)
