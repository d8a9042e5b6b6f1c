"""Read output character by character, holding back text that may still become a tool call.

`parser`, `json_calls` and `python_calls` read through its `CallReader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from ballast.server.tools.delta import Sink

END = ""
"""Comes, and comes again, after the last character."""

_T = TypeVar("_T")
Reading = Generator[None, str, _T]
"""A step of reading: waits for characters, and returns what it made of them."""

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class NoCall(Exception):
    """What looked like a call is none. What was held is content."""


class CallReader:
    """Characters, what they may turn out to be, and what they turned out to be (`sink`)."""

    def __init__(self, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self.sink = Sink()
        self.calls = 0
        """How many calls began."""
        self.offered_only = False
        """Only a function that was offered makes a call; else any name does, and the client can
        tell the model that it made it up."""
        self._names = names
        self._new_id = new_id
        self._ahead: str | None = None
        self._held: list[str] = []

    def peek(self) -> Reading[str]:
        """The next character, which stays the next."""
        if self._ahead is None:
            self._ahead = yield
        return self._ahead

    def take(self) -> Reading[str]:
        """The next character, which is held from now on. Raises NoCall at the end."""
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
        """Take exactly this."""
        for wanted in text:
            if (yield from self.peek()) != wanted:
                raise NoCall
            yield from self.take()

    def accept(self) -> None:
        """What is held was syntax."""
        self._held.clear()

    def give_up(self) -> bool:
        """What is held was content after all. Whether there was any."""
        text = "".join(self._held)
        self._held.clear()
        self.sink.say(text)
        return bool(text)

    def callable(self, name: str) -> bool:
        """Whether a call of this name counts as one."""
        if self.offered_only:
            return name in self._names
        return _NAME.fullmatch(name) is not None

    def begin(self, name: str) -> None:
        """A call begins here. Raises NoCall if it cannot be one of `name`."""
        if not self.callable(name):
            raise NoCall
        self.accept()
        self.sink.begin(self.calls, self._new_id(), name)
        self.calls += 1

    def grow(self, fragment: str) -> None:
        """More arguments of the call that began last."""
        self.accept()
        self.sink.grow(self.calls - 1, fragment)
