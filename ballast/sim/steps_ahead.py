"""Simulate an engine that schedules steps ahead: a request that finds the device busy waits longer.

Such an engine decides on a step while the one before it still runs. A request that arrives during
step n, when n+1 has been decided, is in step n+2 at the earliest. Used by `sim.device`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

from ballast.core.clock import VirtualClock
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    Event,
    JobDoneEvent,
    PauseEvent,
    ResumeEvent,
)
from ballast.core.job import Job
from ballast.core.request import Submission
from ballast.sim.change_queue import ChangeQueue
from ballast.sim.event_heap import EventHeap


class StepsAheadHeap(EventHeap):
    """An event heap whose arrivals reach the loop `steps` jobs late while jobs run.

    Each is put off until just after the end of a job in flight, when the next has begun without
    it; on several lanes, of the one that ends first. Its `arrival` stays what it was. What follows
    it (a cancellation, the end of all arrivals) stays behind it.
    """

    def __init__(self, clock: VirtualClock, steps: int, agenda: ChangeQueue | None = None) -> None:
        super().__init__(clock, agenda)
        self._steps = steps
        self._ends: dict[int, float] = {}
        """When each job in flight ends, by job id; inf while that is not certain."""
        self._held: list[Event] = []
        """Put off until the end of a job is certain, in order."""
        self._due: list[Event] = []
        """Taken by `ready`."""
        self._late: dict[str, tuple[int, float]] = {}
        """Arrivals that are put off, by request id: for how many jobs so far, and until when."""
        self._undelivered: dict[str, str] = {}
        """Ids, with the model or adapter, of requests whose arrival has been scheduled, and that
        the loop has not got."""

    @property
    def undelivered(self) -> int:
        """Requests that have been sent to the device and not delivered to the loop: they arrive
        at this very moment, or later, or are put off."""
        return len(self._undelivered)

    @property
    def undelivered_models(self) -> set[str]:
        """Models and adapters of these requests."""
        return set(self._undelivered.values())

    def arrivals(self) -> list[Submission]:
        late = (e.submission for e in self._held if isinstance(e, ArrivalEvent))
        return [*super().arrivals(), *late]

    def schedule(self, at: float, event: Event, then: Callable[[], None] | None = None) -> int:
        number = super().schedule(at, event, then)
        if isinstance(event, ArrivalEvent):
            self._undelivered[event.submission.id] = event.submission.model
        if self._steps and isinstance(event, JobDoneEvent):
            self._ends[event.job.id] = at
            held, self._held = self._held, []
            for one in held:
                if isinstance(one, ArrivalEvent):
                    jobs, _ = self._late[one.submission.id]
                    self._late[one.submission.id] = jobs, nextafter(at, inf)
                self._schedule_behind(one, self._behind(one, at))
        return number

    def begin(self, job: Job) -> None:
        if self._steps:
            self._ends.setdefault(job.id, inf)

    def withdraw(self, job: Job) -> tuple[float, JobDoneEvent] | None:
        found = super().withdraw(job)
        if found is not None:
            self._ends.pop(job.id, None)
        return found

    def ready(self, until: float | None) -> bool:
        """Defer arrivals that are due, since other devices may turn before the next event."""
        if not self._steps or self.next is None or (until is not None and until < self.next):
            return True
        self._due = self._left(super().take(until))
        return bool(self._due)

    def take(self, until: float | None) -> list[Event]:
        due, self._due = self._due, []
        while not due:
            events = super().take(until)
            due = self._left(events) if self._steps else events
            if not events:
                break
        for event in due:
            if isinstance(event, ArrivalEvent):
                self._undelivered.pop(event.submission.id, None)
        return due

    def _left(self, events: list[Event]) -> list[Event]:
        """Those of `events`, which happen now, that are not put off."""
        for event in events:
            if isinstance(event, JobDoneEvent):
                del self._ends[event.job.id]
        return [event for event in events if not self._put_off(event)]

    def _put_off(self, event: Event) -> bool:
        """Whether `event` happens later than now; then it is scheduled for that time."""
        if isinstance(event, ArrivalEvent):
            jobs, _ = self._late.pop(event.submission.id, (0, 0.0))
            if jobs == self._steps or not self._ends:
                return False
            end = min(self._ends.values())
            self._late[event.submission.id] = jobs + 1, nextafter(end, inf)
            self._schedule_behind(event, end)
            return True
        behind = self._behind(event, None)
        if behind is None:
            return False
        self._schedule_behind(event, behind)
        return True

    def _behind(self, event: Event, end: float | None) -> float | None:
        """When that happens which `event` follows, if it has been put off: the `end` of a job, for
        an arrival."""
        if isinstance(event, ArrivalEvent):
            return end
        if isinstance(event, CancelEvent | PauseEvent | ResumeEvent):
            late = self._late.get(event.request_id)
            return None if late is None else late[1]
        if isinstance(event, DrainEvent) and self._late:
            return max(at for _, at in self._late.values())
        return None

    def _schedule_behind(self, event: Event, behind: float | None) -> None:
        if behind == inf:
            self._held.append(event)
        else:
            super().schedule(nextafter(behind or 0.0, inf), event)
