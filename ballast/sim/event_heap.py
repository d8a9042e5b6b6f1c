"""Deliver events of one simulated device in a total order; implements the loop's inbox.

Taking an event moves the device's clock to it. Events at equal times have a fixed order, so that a
run is reproducible.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from math import inf

from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    CommandEvent,
    DrainEvent,
    Event,
    FirstJobReadyEvent,
    GrammarReadyEvent,
    JobDoneEvent,
    JobFailedEvent,
    JobResult,
    PauseEvent,
    ResumeEvent,
    RotationSettledEvent,
    StopEvent,
    TimerEvent,
    TransferDoneEvent,
)
from ballast.core.job import Job
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.lease import (
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetEvent,
)
from ballast.core.migration import (
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvReadEvent,
    KvTailEvent,
)
from ballast.core.request import Submission
from ballast.sim.change_queue import ChangeQueue

RANK: dict[type[Event], int] = {
    kind: rank
    for rank, kind in enumerate(
        (
            JobDoneEvent,
            JobFailedEvent,
            TransferDoneEvent,
            RotationSettledEvent,
            CommandEvent,
            CancelEvent,
            ArrivalEvent,
            TimerEvent,
            DrainEvent,
            StopEvent,
        )
    )
}
RANK |= dict.fromkeys((FirstJobReadyEvent, KvFoundEvent, KvFetchedEvent), RANK[TransferDoneEvent])
RANK |= dict.fromkeys((PauseEvent, ResumeEvent, GrammarReadyEvent), RANK[ArrivalEvent])
RANK |= dict.fromkeys(
    (PeerMetEvent, PeerGoneEvent, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent),
    RANK[CommandEvent],
)
RANK |= dict.fromkeys(
    (ExportKvEvent, DepartEvent, ImportKvEvent, KvReadEvent, KvTailEvent, DropKvEvent),
    RANK[CommandEvent],
)
"""Order at equal times: ends come before beginnings; messages of other devices keep their order."""


class EventHeap:
    """The inbox of one device in virtual time: taking an event moves the device's clock to it.

    Events are ordered by (time, kind, sequence number of scheduling).
    """

    def __init__(self, clock: VirtualClock, agenda: ChangeQueue | None = None) -> None:
        """`agenda`: change queue of the device's world; None: a queue of its own."""
        self.agenda = ChangeQueue() if agenda is None else agenda
        self._clock = clock
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = 0
        self._then: dict[int, Callable[[], None]] = {}
        self._forgotten: set[int] = set()
        """Sequence numbers of events that will not happen; never that of the next one."""

    def schedule(self, at: float, event: Event, then: Callable[[], None] | None = None) -> int:
        """Schedule `event` at `at` (not before now); `then` is called when it is taken.

        Returns a number by which to `forget` the event until then.
        """
        self._sequence += 1
        at = max(at, self._clock.now())
        self.agenda.expect(at, self)
        heapq.heappush(self._heap, (at, RANK[type(event)], self._sequence, event))
        if then is not None:
            self._then[self._sequence] = then
        return self._sequence

    def arrivals(self) -> list[Submission]:
        """Return the requests that have not arrived yet."""
        left = (entry for entry in sorted(self._heap) if entry[2] not in self._forgotten)
        return [e.submission for *_, e in left if isinstance(e, ArrivalEvent)]

    def forget(self, number: int) -> None:
        """Cancel the event scheduled under `number`, which has not been taken."""
        self._then.pop(number, None)
        self._forgotten.add(number)
        if 2 * len(self._forgotten) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] not in self._forgotten]
            heapq.heapify(self._heap)
            self._forgotten.clear()
        self._skip()

    @property
    def next(self) -> float | None:
        """Time of the next known event; changes in the queue may bring earlier ones."""
        return self._heap[0][0] if self._heap else None

    @property
    def _first(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def withdraw(self, job: Job) -> tuple[float, JobDoneEvent] | None:
        """Cancel and return the end of `job`, with its time, if that is the next event."""
        if not self._heap:
            return None
        at, _, _, event = self._heap[0]
        if not isinstance(event, JobDoneEvent) or event.job is not job:
            return None
        heapq.heappop(self._heap)
        self._skip()
        return at, event

    @property
    def next_end(self) -> tuple[float, JobDoneEvent] | None:
        """Return the end of a job, with its time, if that is the only event of the next moment."""
        if not self._heap:
            return None
        at, _, _, event = self._heap[0]
        if not isinstance(event, JobDoneEvent) or any(entry[0] <= at for entry in self._heap[1:3]):
            return None
        return at, event

    def take_end(self, job: Job) -> None:
        """Take the end of `job`, which is the next event and has no change before it."""
        number = self._heap[0][2]
        found = self.withdraw(job)
        assert found is not None, "its end is what happens next"
        self._clock.advance_to(found[0])
        if number in self._then:
            self._then.pop(number)()

    def give_work(self, job: Job, results: tuple[JobResult, ...]) -> None:
        """Attach `job` and its `results` to the scheduled end of the job of that number."""
        for i, (at, rank, number, event) in enumerate(self._heap):
            if isinstance(event, JobDoneEvent) and event.job.id == job.id:
                self._heap[i] = at, rank, number, replace(event, job=job, results=results)

    def ready(self, until: float | None) -> bool:
        """Whether a turn now would take an event, or `until` has been reached."""
        return True

    def begin(self, job: Job) -> None:
        """Begin a job whose end will be scheduled when it is certain."""

    def take(self, until: float | None) -> list[Event]:
        """Take all events of the next moment with any, at most until `until`.

        Makes the queue's changes up to there.
        """
        agenda, last = self.agenda, inf if until is None else until
        while agenda.next < inf and agenda.next <= (bound := min(last, self._first)):
            agenda.run(bound)
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
            _, _, number, event = heapq.heappop(self._heap)
            events.append(event)
            self._skip()
            if number in self._then:
                self._then.pop(number)()
        return events

    def _skip(self) -> None:
        """Drop cancelled events from the head of the heap."""
        while self._forgotten and self._heap and self._heap[0][2] in self._forgotten:
            self._forgotten.remove(heapq.heappop(self._heap)[2])
