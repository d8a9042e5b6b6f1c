"""Define what parsed output consists of: text content, reasoning, and beginnings and arguments of
tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer, outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Began:
    """The beginning of tool call number `index` (from 0), of the function `name`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of the arguments of call `index`; all its fragments together are JSON text."""

    index: int
    fragment: str


Delta = Content | Thought | Began | Arguments


class Sink:
    """Collects deltas, merging neighbours of one kind."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []

    def say(self, text: str) -> None:
        """Add content."""
        if not text:
            return
        if self._deltas and isinstance(last := self._deltas[-1], Content):
            self._deltas[-1] = Content(last.text + text)
        else:
            self._deltas.append(Content(text))

    def begin(self, index: int, call_id: str, name: str) -> None:
        """Begin a tool call."""
        self._deltas.append(Began(index, call_id, name))

    def grow(self, index: int, fragment: str) -> None:
        """Add a fragment to the arguments of a call."""
        if self._deltas and isinstance(last := self._deltas[-1], Arguments):
            self._deltas[-1] = Arguments(index, last.fragment + fragment)
        else:
            self._deltas.append(Arguments(index, fragment))

    def drain(self) -> list[Delta]:
        """Return the deltas collected since the last `drain`."""
        taken, self._deltas = self._deltas, []
        return taken
