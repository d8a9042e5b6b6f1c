"""Read output character by character, holding back text that may still become a tool call.

`parser`, `json_calls` and `python_calls` read through its `CallReader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from ballast.server.tools.delta import Sink

END = ""
"""Stands for the end of the output; `peek` returns it from then on."""

_T = TypeVar("_T")
Reading = Generator[None, str, _T]
"""Coroutine that waits for characters, and returns its result."""

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class NoCall(Exception):
    """The text is no tool call after all: the text held back is content."""


class CallReader:
    """Reads characters, holds back those that may belong to a call, and collects the result
    (`sink`)."""

    def __init__(self, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self.sink = Sink()
        self.calls = 0
        """Number of calls that have begun."""
        self.offered_only = False
        """Whether only functions of the request count as calls; else any name does, and the client
        can report to the model that the function does not exist."""
        self._names = names
        self._new_id = new_id
        self._ahead: str | None = None
        self._held: list[str] = []

    def peek(self) -> Reading[str]:
        """Return the next character without taking it."""
        if self._ahead is None:
            self._ahead = yield
        return self._ahead

    def take(self) -> Reading[str]:
        """Take the next character, and hold it back. Raises NoCall at the end."""
        character = yield from self.peek()
        if character == END:
            raise NoCall
        self._ahead = None
        self._held.append(character)
        return character

    def blank(self) -> Reading[None]:
        """Take white space."""
        while (yield from self.peek()).isspace():
            yield from self.take()

    def expect(self, text: str) -> Reading[None]:
        """Take exactly this text. Raises NoCall for any other."""
        for wanted in text:
            if (yield from self.peek()) != wanted:
                raise NoCall
            yield from self.take()

    def accept(self) -> None:
        """Discard the text held back: it was syntax."""
        self._held.clear()

    def give_up(self) -> bool:
        """Pass on the text held back as content; returns whether there was any."""
        text = "".join(self._held)
        self._held.clear()
        self.sink.say(text)
        return bool(text)

    def callable(self, name: str) -> bool:
        """Whether a call of the function `name` counts as one."""
        if self.offered_only:
            return name in self._names
        return _NAME.fullmatch(name) is not None

    def begin(self, name: str) -> None:
        """Begin a call of the function `name`. Raises NoCall if the name does not count."""
        if not self.callable(name):
            raise NoCall
        self.accept()
        self.sink.begin(self.calls, self._new_id(), name)
        self.calls += 1

    def grow(self, fragment: str) -> None:
        """Add a fragment to the arguments of the current call."""
        self.accept()
        self.sink.grow(self.calls - 1, fragment)
