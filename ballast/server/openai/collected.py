"""Collect what a whole answer has of each choice, as text and JSON, while its pieces arrive."""

from __future__ import annotations

import io
from collections.abc import Iterable

from ballast.server.http.json_list import JsonList
from ballast.server.openai.records import UNSET, CalledFunction, StopReason, ToolCall
from ballast.server.text.pieces import OutputPiece
from ballast.server.tools.delta import Arguments, Began

CALL_BYTES = 256
"""Memory of a tool call beside its arguments."""


class CollectedChoice:
    """One choice of a whole answer; its pieces are not kept."""

    def __init__(self, lists: int) -> None:
        """`lists`: number of arrays that its log-probabilities are written to."""
        self.scores = tuple(JsonList() for _ in range(lists))
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = UNSET
        self._text, self._thought = io.StringIO(), io.StringIO()
        self._calls: list[tuple[Began, list[str]]] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes of memory, about."""
        return self._held + sum(map(len, self.scores))

    def add(self, piece: OutputPiece) -> None:
        """Add all of a piece but its scores."""
        self._text.write(piece.text)
        thought = piece.thought
        self._thought.write(thought)
        self._held += len(piece.text) + len(thought)
        for call in piece.calls:
            if isinstance(call, Began):
                self._calls.append((call, []))
                self._held += CALL_BYTES
            elif isinstance(call, Arguments):
                self._calls[call.index][1].append(call.fragment)
                self._held += len(call.fragment)
        if self.finish_reason is None:
            self.finish_reason = piece.finish_reason
        if self.stop_reason is UNSET and piece.stop_reason is not None:
            self.stop_reason = piece.stop_reason

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def thought(self) -> str:
        """Reasoning."""
        return self._thought.getvalue()

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(call.id, CalledFunction(call.name, "".join(fragments)))
            for call, fragments in self._calls
        ]


class CollectedChoices:
    """All choices of a whole answer, by index."""

    def __init__(self, lists: int) -> None:
        self._lists = lists
        self._choices: dict[int, CollectedChoice] = {}

    def __getitem__(self, index: int) -> CollectedChoice:
        found = self._choices.get(index)
        if found is None:
            found = self._choices[index] = CollectedChoice(self._lists)
        return found

    def first(self, n: int) -> Iterable[tuple[int, CollectedChoice]]:
        """Yield the choices 0 .. n-1."""
        return ((i, self[i]) for i in range(n))

    @property
    def held(self) -> int:
        """Bytes of memory, about."""
        return sum(choice.held for choice in self._choices.values())
