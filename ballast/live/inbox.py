"""Provide the live clock, and the live inbox: a queue of events from any thread to the loop.

The simulator has counterparts of both in virtual time.
"""

from __future__ import annotations

import queue
import time
from dataclasses import replace

from ballast.core.clock import Clock
from ballast.core.event import ArrivalEvent, Event


class MonotonicClock:
    """Seconds of the system's monotonic clock since this object was made."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin


LONGEST_WAIT = 1e6
"""Most seconds that the loop waits for an event before it runs a turn anyway."""


class QueueInbox:
    """A thread-safe queue of events. Requests are stamped with their time of receipt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._broken: BaseException | None = None

    def post(self, *events: Event) -> None:
        """Add events; from any thread, never blocks. Those of one call are taken in one turn."""
        self._queue.put([self._stamped(event) for event in events])

    def break_off(self, error: BaseException) -> None:
        """Have `take` raise `error` from now on, whatever else was posted. From any thread."""
        self._broken = error
        self._queue.put([])

    def take(self, until: float | None) -> list[Event]:
        """Return all events in the queue; waits for the first, at most until time `until`."""
        timeout = None
        if until is not None:  # the system waits for no longer than some 292 years
            timeout = min(max(0.0, until - self._clock.now()), LONGEST_WAIT)
        events: list[Event] = []
        try:
            events += self._queue.get(timeout=timeout)
            while True:
                events += self._queue.get_nowait()
        except queue.Empty:
            if self._broken is not None:
                raise self._broken from None
        return events

    def _stamped(self, event: Event) -> Event:
        if isinstance(event, ArrivalEvent):
            s = event.submission
            return ArrivalEvent(replace(s, arrival=self._clock.now() - s.age))
        return event
