"""Bound the memory of answers that are collected to be sent whole, with a fair share for each API
key.

The values of one answer are bounded before it begins (`generate.answer_size`); this bounds all that
are under way together, by what they have come to. Streams hold nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ballast.core.settings import ServerSettings
from ballast.server.access.fair_shares import FairShares
from ballast.server.http.bodies import SMALL_BYTES
from ballast.server.http.faults import Fault


class WholeAnswers:
    """Counts the bytes of whole answers, by API key."""

    def __init__(self, settings: Callable[[], ServerSettings]) -> None:
        self._settings = settings
        self._bytes = FairShares()

    @property
    def held(self) -> int:
        """Bytes of all answers, but for the first `SMALL_BYTES` of each."""
        return self._bytes.total

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to be called with the bytes that an answer of the key `name` takes so
        far; it raises Fault where there is no room. All is released at the end."""
        held = 0

        def hold(needed: int) -> None:
            nonlocal held
            more = max(0, needed - SMALL_BYTES) - held
            settings = self._settings()
            most, divided = settings.most_answer_bytes, settings.several_keys
            if more > 0 and not self._bytes.fits(name, more, most, divided=divided):
                why = f"whole answers take {self._bytes.total} of {most} bytes (most_answers)"
                share = ", or this key's share of them" if divided else ""
                raise Fault(429, f"{why}{share}: stream the answer, or retry later", "overloaded")
            self._bytes.hold(name, more)
            held += more

        try:
            yield hold
        finally:
            self._bytes.hold(name, -held)
