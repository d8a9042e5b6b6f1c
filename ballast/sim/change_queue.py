"""Order the changes inside a simulated world that are not events of a device's loop.

A device's loop takes *events* from its `sim.event_heap.EventHeap`. What happens between events (a
flow ends and others speed up, a job reaches its next layer) is a *change* here. Devices that can
reach each other share one queue, so that their changes are made in one order: by time, then in the
order of scheduling; a change comes before events of the same moment.

Made by `sim.world`, one for devices that share links; links and jobs schedule changes, the event
heap makes those that are due. A leap (`sim.leap`) skips many decode steps of one device.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

Change = Callable[[float], None]
"""Called with the moment at which it happens, in virtual seconds."""


@dataclass(slots=True, eq=False)
class ScheduledChange:
    """A scheduled change; `ChangeQueue.drop` cancels it."""

    at: float
    change: Change | None


class ChangeQueue:
    """Scheduled changes in time order, made only up to the next turn of any device's loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ScheduledChange]] = []
        self._sequence = 0
        self.next = inf
        """Time of the next change; inf if there is none."""
        self._bound = inf
        """`run` makes no change after it."""
        self._leaper: object = None
        self._reached = inf

    def schedule(self, at: float, change: Change) -> ScheduledChange:
        """Make `change` at `at`."""
        self._sequence += 1
        entry = ScheduledChange(at, change)
        heapq.heappush(self._heap, (at, self._sequence, entry))
        if at < self.next:
            self.next = at
        return entry

    def drop(self, entry: ScheduledChange) -> None:
        """Cancel a change that has not been made."""
        entry.change = None
        self._skip()

    def expect(self, at: float, heap: object = None) -> None:
        """Bound `run` at `at`, where an event is due that may bring earlier changes than those
        scheduled. `heap`: the event heap that holds the event; None: no heap holds it yet."""
        if at < self._bound:
            self._bound = at
        if heap is not None and heap is not self._leaper and at < self._reached:
            self._reached = at

    def leap(self, heap: object) -> None:
        """Mark the device with that heap as leaping."""
        self._leaper, self._reached = heap, inf

    @property
    def reached(self) -> float:
        """Time of the first event that changes have brought to devices other than the leaping one
        since its leap began; inf if there is none."""
        return self._reached

    def run(self, bound: float, limit: float = inf) -> None:
        """Make the changes up to `bound`, inclusive, and before `limit`, in order.

        A change that schedules an event (`expect`) lowers the bound to it.
        """
        self._bound = bound
        while self.next <= self._bound and self.next < limit:
            at, _, entry = heapq.heappop(self._heap)
            change, entry.change = entry.change, None
            self._skip()
            assert change is not None, "`_skip` leaves a change that will be made on top"
            change(at)

    def _skip(self) -> None:
        heap = self._heap
        while heap and heap[0][2].change is None:
            heapq.heappop(heap)
        self.next = heap[0][0] if heap else inf
