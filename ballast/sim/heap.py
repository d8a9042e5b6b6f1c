"""Events to come, in a total order."""

from __future__ import annotations

import heapq

from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    Arrival,
    Cancel,
    Drain,
    Event,
    JobDone,
    JobFailed,
    Operate,
    Stop,
    Timer,
    TransferDone,
)
from ballast.core.job import Job

RANK = {
    kind: rank
    for rank, kind in enumerate(
        (JobDone, JobFailed, TransferDone, Operate, Cancel, Arrival, Timer, Drain, Stop)
    )
}
"""At equal times, what ended comes before what begins."""


class EventHeap:
    """An inbox in virtual time: taking an event moves the clock to it.

    Events are ordered by (time, kind, sequence number of scheduling).
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = 0

    def schedule(self, at: float, event: Event) -> None:
        """`event` will happen at `at` (not before now)."""
        self._sequence += 1
        at = max(at, self._clock.now())
        heapq.heappush(self._heap, (at, RANK[type(event)], self._sequence, event))

    @property
    def next(self) -> float | None:
        """When the next event happens."""
        return self._heap[0][0] if self._heap else None

    def withdraw(self, job: Job) -> tuple[float, JobDone] | None:
        """The end of `job`, and when, if that is what happens next; it will not happen then."""
        if not self._heap:
            return None
        at, _, _, event = self._heap[0]
        if not isinstance(event, JobDone) or event.job is not job:
            return None
        heapq.heappop(self._heap)
        return at, event

    def take(self, until: float | None) -> list[Event]:
        """All events of the next moment at which something happens, at most until `until`."""
        if not self._heap and until is None:
            raise BrokenPromise("the loop waits, and nothing will ever happen")
        if not self._heap or (until is not None and until < self._heap[0][0]):
            assert until is not None
            self._clock.advance_to(until)
            return []
        at = self._heap[0][0]
        self._clock.advance_to(at)
        events = []
        while self._heap and self._heap[0][0] == at:
            events.append(heapq.heappop(self._heap)[3])
        return events
