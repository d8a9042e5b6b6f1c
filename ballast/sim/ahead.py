"""An engine that schedules its steps ahead: a request that finds the device busy waits longer.

Such an engine decides on a step while the one before it still runs. A request that arrives during
step n, when n+1 is decided already, is in step n+2 at the earliest.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

from ballast.core.clock import VirtualClock
from ballast.core.event import Arrival, Cancel, Drain, Event, JobDone, Pause, Resume
from ballast.core.job import Job
from ballast.sim.heap import EventHeap


class HeapAhead(EventHeap):
    """An event heap whose arrivals reach the loop `steps` jobs late while jobs run.

    Each is put off until just after the end of a job in flight, when the next has begun without
    it; on several lanes, of the one that ends first. Its `arrival` stays what it was. What follows
    it (a cancellation, the end of all arrivals) stays behind it.
    """

    def __init__(self, clock: VirtualClock, steps: int) -> None:
        super().__init__(clock)
        self._steps = steps
        self._ends: dict[int, float] = {}
        """When each job in flight ends, by job id."""
        self._late: dict[str, tuple[int, float]] = {}
        """Arrivals that are put off, by request id: for how many jobs so far, and until when."""

    @property
    def late(self) -> int:
        """Requests that have arrived, of which the loop does not know yet."""
        return len(self._late)

    def schedule(self, at: float, event: Event, then: Callable[[], None] | None = None) -> int:
        if self._steps and isinstance(event, JobDone):
            self._ends[event.job.id] = at
        return super().schedule(at, event, then)

    def withdraw(self, job: Job) -> tuple[float, JobDone] | None:
        found = super().withdraw(job)
        if found is not None:
            self._ends.pop(job.id, None)
        return found

    def take(self, until: float | None) -> list[Event]:
        while True:
            events = super().take(until)
            if not self._steps:
                return events
            for event in events:
                if isinstance(event, JobDone):
                    del self._ends[event.job.id]
            due = [event for event in events if not self._put_off(event)]
            if due or not events:
                return due

    def _put_off(self, event: Event) -> bool:
        """Whether `event` happens later than now; then it is scheduled for that time."""
        behind: float | None = None
        if isinstance(event, Arrival):
            jobs, _ = self._late.pop(event.submission.id, (0, 0.0))
            if jobs < self._steps and self._ends:
                behind = min(self._ends.values())
                self._late[event.submission.id] = jobs + 1, nextafter(behind, inf)
        elif isinstance(event, Cancel | Pause | Resume):
            if event.request_id in self._late:
                behind = self._late[event.request_id][1]
        elif isinstance(event, Drain) and self._late:
            behind = max(at for _, at in self._late.values())
        if behind is not None:
            self.schedule(nextafter(behind, inf), event)
        return behind is not None
