"""Estimate from recent completions how long a model's queue takes to drain, for `Retry-After`."""

from __future__ import annotations

from collections import deque

from ballast.core.clock import Clock

WINDOW_SECONDS = 60.0
_MOST = 1000
"""Most completions remembered: enough for a rate."""


class QueuePace:
    """Times of the recent completions of requests of one queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MOST)

    def ended(self) -> None:
        """Record that a request is complete."""
        self._ends.append(self._clock.now())

    def retry_after(self, waiting: int) -> float:
        """Estimate the seconds until `waiting` requests have left the queue at the recent rate; 1
        to 60.

        Without a recent completion the rate is unknown, and a queue with requests in it gets 60.
        """
        now = self._clock.now()
        while self._ends and self._ends[0] < now - WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return WINDOW_SECONDS if waiting else 1.0
        seconds = max(1.0, now - self._ends[0])
        return min(WINDOW_SECONDS, max(1.0, waiting * seconds / len(self._ends)))
