"""Estimate from recent completions how long a model's queue takes to drain, for `Retry-After`."""

from __future__ import annotations

from collections import deque

from ballast.core.clock import Clock

WINDOW_SECONDS = 60.0
_MOST = 1000
"""Ends remembered: enough for a rate, and bounded."""


class QueuePace:
    """When requests of one queue ended, lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MOST)

    def ended(self) -> None:
        """A request is complete."""
        self._ends.append(self._clock.now())

    def retry_after(self, waiting: int) -> float:
        """Seconds until the `waiting` requests, at the recent rate, have gone; 1 to 60.

        A queue out of which nothing came lately is not known to be quick.
        """
        now = self._clock.now()
        while self._ends and self._ends[0] < now - WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return WINDOW_SECONDS if waiting else 1.0
        seconds = max(1.0, now - self._ends[0])
        return min(WINDOW_SECONDS, max(1.0, waiting * seconds / len(self._ends)))
