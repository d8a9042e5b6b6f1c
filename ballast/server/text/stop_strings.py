"""Find stop strings in streamed text.

Text that may be the beginning of a stop string is held back. The match that is complete first
counts, as if text came one character at a time (of two complete at once, the longer): so the result
does not depend on how the text is cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Scans the text of one output. `stops` must not contain empty strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the output."""

    @property
    def held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Add text, and return the part so far that is safe to show and was not returned yet.

        At a match, returns the text before it; later text is discarded.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[:at]
        keep = self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back for a match, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Find the match with the smallest end, then the smallest start; returns (start, stop
        string)."""
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stops):
                return length
        return 0
