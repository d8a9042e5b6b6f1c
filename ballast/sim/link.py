"""A link in virtual time: transfers in flight share it as a fluid, and end at exact moments.

Transfers of one direction and stream are served in order; streams of a direction share its rate
equally; what a direction carries depends on whether the other carries too (`core.link.LinkRates`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from ballast.core.clock import Clock
from ballast.core.event import TransferDone
from ballast.core.link import Direction, LinkRates
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS
from ballast.sim.heap import EventHeap


class SimLink:
    """Implements `memory.transfer.Link`. A transfer that joins or ends costs O(log streams)."""

    def __init__(
        self, heap: EventHeap, clock: Clock, rates: LinkRates, copying: float | None = None
    ) -> None:
        """`copying`: bytes per second to the device of a copy alone, as a live link measures it,
        where `rates` are lower for what else a transfer takes."""
        self._copying = rates.to_device if copying is None else copying
        self._heap = heap
        self._clock = clock
        self._rates = rates
        self._sides = {direction: _Side() for direction in Direction}

    @property
    def bytes_per_second(self) -> float:
        return self._copying

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        now = self._clock.now()
        side, other = self._sides[direction], self._sides[direction.other]
        side.flow(now)
        was_busy = side.busy
        side.join(now, transfer_id, sum(c.n_bytes for c in copies), stream)
        if not was_busy:
            other.flow(now)
            self._set_rates()
            self._schedule(direction.other)
        self._schedule(direction)

    def streams(self, direction: Direction) -> int:
        """That share what a direction carries now."""
        return self._sides[direction].streams

    def close(self) -> None:
        """Nothing to end."""

    def _ended(self, direction: Direction) -> None:
        """The transfer that was to end next in `direction` ends now."""
        now = self._clock.now()
        side, other = self._sides[direction], self._sides[direction.other]
        side.pop(now)
        if not side.busy:
            other.flow(now)
            self._set_rates()
            self._schedule(direction.other)
        self._schedule(direction)

    def _set_rates(self) -> None:
        mixed = all(side.busy for side in self._sides.values())
        for direction, side in self._sides.items():
            side.rate = self._rates.of(direction, mixed)

    def _schedule(self, direction: Direction) -> None:
        """Let the heap know of the next end in `direction`, and of no other."""
        side = self._sides[direction]
        if side.scheduled is not None:
            self._heap.forget(side.scheduled)
            side.scheduled = None
        if side.busy:
            at, done = side.next()
            side.scheduled = self._heap.schedule(at, done, lambda: self._ended(direction))


class _Side:
    """The transfers of one direction.

    `level` is how many bytes each stream has been served since the side was last idle; a transfer
    ends when the level has risen by its bytes since it began. One that began when others did and
    has their size ends when they do, to the last bit.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.scheduled: int | None = None
        """Its next end's number in the event heap."""
        self._level = 0.0
        self._since = 0.0
        """When the level was what it says."""
        self._ends: list[tuple[float, int, str]] = []
        """Of the transfer in service of each stream: level at its end, order of beginning, and
        stream."""
        self._begun = 0
        self._streams: dict[str, deque[tuple[int, int]]] = {}
        """Transfers and their bytes, in order; the first is in service. None is empty."""
        self._started: dict[str, float] = {}
        """When the one in service began, by stream."""

    @property
    def busy(self) -> bool:
        return bool(self._ends)

    @property
    def streams(self) -> int:
        return len(self._ends)

    def flow(self, now: float) -> None:
        """Let what was in flight since the last look go on until `now`."""
        if self._ends:
            risen = (now - self._since) * self.rate / len(self._ends)
            self._level = min(self._level + risen, self._ends[0][0])
        self._since = now

    def join(self, now: float, transfer_id: int, n_bytes: int, stream: str) -> None:
        """A transfer more. The side has flowed until `now`."""
        waiting = self._streams.setdefault(stream, deque())
        waiting.append((transfer_id, n_bytes))
        if len(waiting) == 1:
            self._begin(now, stream)

    def next(self) -> tuple[float, TransferDone]:
        """When the next transfer ends if nothing changes, and its end."""
        level, _, stream = self._ends[0]
        at = self._since + (level - self._level) * len(self._ends) / self.rate
        transfer_id, n_bytes = self._streams[stream][0]
        return at, TransferDone(transfer_id, n_bytes, at - self._started[stream])

    def pop(self, now: float) -> None:
        """The next one ends, now; the next of its stream begins."""
        self.scheduled = None
        self._level, _, stream = heapq.heappop(self._ends)
        self._since = now
        waiting = self._streams[stream]
        waiting.popleft()
        if waiting:
            self._begin(now, stream)
        else:
            del self._streams[stream], self._started[stream]
        if not self._ends:
            self._level = 0.0

    def _begin(self, now: float, stream: str) -> None:
        self._begun += 1
        if not self._ends:
            self._level = 0.0
        n_bytes = self._streams[stream][0][1]
        heapq.heappush(self._ends, (self._level + n_bytes, self._begun, stream))
        self._started[stream] = now
