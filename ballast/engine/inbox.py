"""Live time and the live inbox: events posted by any thread, taken by the loop's."""

from __future__ import annotations

import queue
import time
from dataclasses import replace

from ballast.core.clock import Clock
from ballast.core.event import Arrival, Event


class MonotonicClock:
    """Seconds of the system's monotonic clock since this object was made."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin


class QueueInbox:
    """A thread-safe queue of events. Requests are stamped with their time of receipt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def post(self, event: Event) -> None:
        """From any thread; never blocks."""
        if isinstance(event, Arrival):
            event = Arrival(replace(event.submission, arrival=self._clock.now()))
        self._queue.put(event)

    def take(self, until: float | None) -> list[Event]:
        """All events that are there; waits for the first, at most until `until`."""
        timeout = None if until is None else max(0.0, until - self._clock.now())
        try:
            events = [self._queue.get(timeout=timeout)]
        except queue.Empty:
            return []
        while True:
            try:
                events.append(self._queue.get_nowait())
            except queue.Empty:
                return events
