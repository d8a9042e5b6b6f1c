"""Divide streamed output text into content and tool calls.

The reader is a coroutine that is sent one character at a time: so its result cannot depend on how
the text is cut into tokens. `Choice` feeds it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ballast.server.tools.delta import Delta
from ballast.server.tools.json_calls import json_calls
from ballast.server.tools.python_calls import python_calls
from ballast.server.tools.reader import END, CallReader, NoCall, Reading
from ballast.server.tools.syntax import Syntax


class ToolParser:
    """Parses one output. Call `push` with its text and `flush` at its end."""

    def __init__(self, syntax: Syntax, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self._syntax = syntax
        self._reader = CallReader(names, new_id)
        self.cut = False
        """Whether the output ended within a call."""
        self._run = self._read()
        next(self._run)

    @property
    def calls(self) -> int:
        """Number of calls so far: with any, the output's finish reason is `tool_calls`, unless it
        is `cut`."""
        return self._reader.calls

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of more text. Text that may yet become a call is held back."""
        for character in text:
            self._run.send(character)
        return self._reader.sink.drain()

    def flush(self) -> list[Delta]:
        """Return the deltas of the text held back, at the end of the output."""
        with suppress(StopIteration):
            self._run.send(END)
        return self._reader.sink.drain()

    def _read(self) -> Reading[None]:
        reader, syntax = self._reader, self._syntax
        fresh = True
        while True:
            opened = yield from self._content(fresh)
            if opened is None:
                return
            before = reader.calls
            # Without a marker, only the name distinguishes a call from other text.
            reader.offered_only = syntax.python or not opened
            try:
                if syntax.python:
                    yield from python_calls(reader)
                else:
                    yield from json_calls(reader, syntax.header)
                fresh = True
            except NoCall:
                if reader.calls > before and (yield from reader.peek()) == END:
                    self.cut = True
                    reader.accept()
                fresh = not reader.give_up()

    def _content(self, fresh: bool) -> Reading[str | None]:
        """Pass text on until a call may begin. Returns its marker (empty for a call without one);
        None at the end.

        `fresh`: there was no content since the beginning, or since the last call.
        """
        reader, syntax = self._reader, self._syntax
        while True:
            first = yield from reader.peek()
            if first == END:
                # Blanks around calls are syntax; an output of blanks alone is content.
                if not reader.calls or not fresh:
                    reader.give_up()
                return None
            if fresh and first in syntax.bare:
                return ""
            if fresh and first.isspace():
                yield from reader.take()
                continue
            closes = syntax.closes if fresh and reader.calls else ()
            marker = yield from self._marker(syntax.opens, closes)
            if marker in syntax.opens:
                return marker
            if marker:
                reader.accept()
                continue
            reader.give_up()
            fresh = False

    def _marker(self, opens: tuple[str, ...], closes: tuple[str, ...]) -> Reading[str]:
        """Take and return a marker; without one, take the text that looked like one, or a
        character, and return an empty text."""
        markers = (*opens, *closes)
        taken = ""
        while True:
            character = yield from self._reader.peek()
            longer = taken + character
            if character != END and any(m.startswith(longer) for m in markers):
                yield from self._reader.take()
                taken = longer
                if taken in markers:
                    return taken
                continue
            if character == END and any(m.startswith(taken) for m in closes):
                self._reader.accept()  # an output that was cut off within its last marker
            if not taken:
                yield from self._reader.take()
            return ""
