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
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """None: look at `_broken`."""
        self._broken: BaseException | None = None

    def post(self, event: Event) -> None:
        """From any thread; never blocks."""
        if isinstance(event, Arrival):
            event = Arrival(replace(event.submission, arrival=self._clock.now()))
        self._queue.put(event)

    def break_off(self, error: BaseException) -> None:
        """Have `take` raise `error` from now on, whatever else was posted. From any thread."""
        self._broken = error
        self._queue.put(None)

    def take(self, until: float | None) -> list[Event]:
        """All events that are there; waits for the first, at most until `until`."""
        timeout = None if until is None else max(0.0, until - self._clock.now())
        posted: list[Event | None] = []
        try:
            posted.append(self._queue.get(timeout=timeout))
            while True:
                posted.append(self._queue.get_nowait())
        except queue.Empty:
            if self._broken is not None:
                raise self._broken from None
        return [event for event in posted if event is not None]
