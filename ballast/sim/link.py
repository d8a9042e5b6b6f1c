"""Simulate the link between a device and its host; implements `memory.transfer.Link`.

Transfers and layer loads become flows of `sim.fluid`. Transfers of one direction and stream are
served in order; streams share the wires that they cross with all other flows of the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS, STOPPED
from ballast.sim.change_queue import ScheduledChange
from ballast.sim.event_heap import EventHeap
from ballast.sim.fluid import Ceiling, Ended, Flow, Fluid, Side, Wire
from ballast.sim.page_costs import LoopTime
from ballast.sim.wide_stream import QueuedBytes, WideStream

_LOADS = ACTIVATIONS, Direction.TO_DEVICE
Path = Mapping[Direction, Sequence[Side]]
"""The sides that bytes of each direction cross, the device's own first."""


class LandingWatch(Protocol):
    """Follows one transfer while it lands."""

    @property
    def marks(self) -> Sequence[int]:
        """Byte counts, ascending, at which `landed` is to be called, besides the last."""

    def landed(self, now: float, n_bytes: int) -> None:
        """Notify that this number of bytes has landed, in the order of the copies; at the last, the
        end is due."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a device is in the graph of links."""

    fluid: Fluid
    path: Path
    loads: Sequence[Sequence[Side]] = ()
    """Paths by which weights come at once, its own first; empty: by `path` alone."""

    @classmethod
    def alone(cls, fluid: Fluid, rates: LinkRates) -> Route:
        """Build the route of a device whose link nothing else uses."""
        wire = Wire(rates)
        return cls(fluid, {direction: [wire.side(direction)] for direction in Direction})


class SimLink:
    """Simulated link of a device. Implements `memory.transfer.Link`, and carries the device's other
    traffic."""

    paced = True

    def __init__(
        self,
        heap: EventHeap,
        clock: Clock,
        rates: LinkRates,
        mapping: LinkRates | None = None,
        route: Route | None = None,
        calls: LoopTime | None = None,
    ) -> None:
        """`rates`: of copies over the device's own link; `mapping`: the highest rate of a transfer
        whose pages have to be mapped; `route`: None for a link that nothing else uses; `calls`: the
        loop's pending calls, which end before a transfer begins."""
        self._calls = LoopTime(clock) if calls is None else calls
        self._heap, self._clock, self._rates = heap, clock, rates
        self._route = Route.alone(Fluid(heap.agenda), rates) if route is None else route
        slow = rates if mapping is None else mapping
        self._ceilings = {
            direction: Ceiling(slow.of(direction, mixed=False), slow.of(direction, mixed=True))
            for direction in Direction
        }
        self._streams: dict[tuple[str, Direction], Stream] = {}
        paths = [Stream(self, self._route.fluid, path) for path in self._route.loads]
        self._loads = WideStream(paths) if paths else None
        self._mapping: dict[tuple[str, int], ScheduledChange] = {}
        """By stream and number, the begin of each transfer that waits for the loop's calls."""
        self.moving = 0
        """Transfers and loads that are on their way, or wait for those before them."""

    @property
    def bytes_per_second(self) -> float:
        return self._rates.to_device

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
        watch: LandingWatch | None = None,
    ) -> None:
        """Start a transfer as `Link.start`; `watch` is notified at its byte counts."""
        n_bytes = sum(c.n_bytes for c in copies)
        marks = [] if watch is None else [m for m in watch.marks if 0 < m < n_bytes]
        copy_seconds = 0.0

        def ended(mark: int, at: float, seconds: float) -> None:
            nonlocal copy_seconds
            copy_seconds += seconds
            if mark == n_bytes:
                self._heap.schedule(at, TransferDoneEvent(transfer_id, n_bytes, copy_seconds))
            if watch is not None:
                watch.landed(at, mark)

        ceiling, now = self._ceilings[direction], self._clock.now()
        several = self._loads if (stream, direction) == _LOADS else None
        carrier = several or self.stream(stream, direction)

        def begin(at: float) -> None:
            before = 0
            for mark in [*marks, n_bytes]:
                carrier.carry(at, mark - before, partial(ended, mark), ceiling, transfer_id)
                before = mark

        if self._calls.until <= now:
            begin(now)
            return

        def mapped(at: float) -> None:
            self.moving -= 1
            del self._mapping[stream, transfer_id]
            begin(at)

        self.moving += 1
        change = self._heap.agenda.schedule(self._calls.until, mapped)
        self._mapping[stream, transfer_id] = change

    def stop(self, transfer_id: int) -> None:
        now = self._clock.now()
        mapping = self._mapping.pop((ACTIVATIONS, transfer_id), None)
        if mapping is not None:
            self._heap.agenda.drop(mapping)
            self.moving -= 1
        elif not (self._loads or self.stream(*_LOADS)).stop(now, transfer_id):
            return
        self._heap.schedule(now, TransferDoneEvent(transfer_id, 0, 0.0, STOPPED))

    def stream(self, name: str, direction: Direction) -> Stream:
        """Return the stream of that name, for bytes that no loop waits for."""
        stream = self._streams.get((name, direction))
        if stream is None:
            path = self._route.path[direction]
            stream = self._streams[name, direction] = Stream(self, self._route.fluid, path)
        return stream

    def close(self) -> None:
        """Nothing to end."""


class Stream:
    """Bytes of one device and direction that move one after another."""

    def __init__(self, link: SimLink, fluid: Fluid, path: Sequence[Side]) -> None:
        self._link, self._fluid, self._path = link, fluid, path
        self._queue: deque[QueuedBytes] = deque()
        """Queued parts in order; the first flows."""
        self._flow: Flow | None = None

    def carry(
        self,
        now: float,
        n_bytes: int,
        ended: Ended,
        ceiling: Ceiling | None = None,
        transfer: int | None = None,
        reserved: float = 0.0,
    ) -> None:
        """Move bytes after those that are on their way; call `ended` at their end. `transfer`: its
        number, by which `stop` finds them; `reserved`: bytes per second that they have at least."""
        self._link.moving += 1
        self._queue.append(QueuedBytes(n_bytes, ended, ceiling, transfer, reserved))
        if len(self._queue) == 1:
            self._start_first(now)

    def stop(self, now: float, transfer: int) -> bool:
        """Drop what is to come of a transfer; returns whether there was any."""
        kept = deque(part for part in self._queue if part.transfer != transfer)
        if len(kept) == len(self._queue):
            return False
        flows = self._queue[0].transfer == transfer
        self._link.moving -= len(self._queue) - len(kept)
        self._queue = kept
        if flows:
            assert self._flow is not None, "the first part flows"
            self._fluid.stop(now, self._flow)
            self._start_first(now)
        return True

    def _start_first(self, now: float) -> None:
        if self._queue:
            part = self._queue[0]
            given = part.ceiling, part.reserved
            self._flow = self._fluid.start(now, self._path, part.left, self._ended, *given)

    def _ended(self, at: float, seconds: float) -> None:
        part = self._queue.popleft()
        self._link.moving -= 1
        self._start_first(at)
        part.ended(at, seconds)
