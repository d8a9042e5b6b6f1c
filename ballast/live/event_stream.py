"""Stream layers of a model on a GPU: weights and KV, ordered with its jobs' kernels by CUDA events.

Drives a `LayerStream` that submits copies ahead; `host_stream` is its counterpart on CPU. Streams
wait for each other's events on the device; no host thread waits during a pass.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ballast.core.errors import DeviceError
from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.blocks import KvCache
from ballast.kv.pinned_blocks import PinnedBlocks
from ballast.kv.staged import BlockMoves
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.fences import EventPool, StreamStalls
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.residency.arrival import ArrivalPlan
from ballast.residency.buffer import Buffer, LayerCopy
from ballast.residency.stream import LayerStream
from ballast.weights.weight_stream import Loads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A copy in flight, between two events that record when they were reached."""

    copy: LayerCopy
    n_bytes: int
    began: int
    ended: int


class EventCopies:
    """Implements `CopyEngine`: copies of one buffer, with one CUDA stream for each direction."""

    def __init__(
        self,
        driver: Driver,
        timed: EventPool,
        directions: Iterable[Direction],
        copies_of: Callable[[LayerCopy], Iterable[Copy]],
    ) -> None:
        """`copies_of` returns the bytes of a copy. The context must be current."""
        self._driver, self._timed, self._copies_of = driver, timed, copies_of
        self.streams = {way: driver.new_stream() for way in directions}
        self._flights: dict[Direction, deque[_Flight]] = {way: deque() for way in self.streams}
        """Copies in flight, in the order of their stream."""

    def submit(self, copy: LayerCopy, after: Sequence[int] = ()) -> int:
        """As `CopyEngine.submit`; tokens are events, and the copy's is valid until `landed` has
        returned the copy."""
        driver, stream = self._driver, self.streams[copy.direction]
        for event in after:
            driver.wait_for(stream, event)
        began, ended = self._timed.acquire(), self._timed.acquire()
        driver.record(began, stream)
        to_device = copy.direction is Direction.TO_DEVICE
        call = driver.copy_to_device if to_device else driver.copy_to_host
        n_bytes = 0
        for part in self._copies_of(copy):
            call(part.dst, part.src, part.n_bytes, stream)
            n_bytes += part.n_bytes
        driver.record(ended, stream)
        self._flights[copy.direction].append(_Flight(copy, n_bytes, began, ended))
        return ended

    def landed(self) -> Iterator[tuple[LayerCopy, int, float]]:
        """Return (copy, bytes, seconds) of copies that have ended, and reuse their events."""
        driver = self._driver
        for flights in self._flights.values():
            while flights and driver.is_done(flights[0].ended):
                flight = flights.popleft()
                seconds = driver.elapsed(flight.began, flight.ended)
                self._timed.release(flight.began)
                self._timed.release(flight.ended)
                yield flight.copy, flight.n_bytes, seconds

    def rest(self) -> None:
        """Return when no copy is in flight."""
        for stream in self.streams.values():
            self._driver.finish(stream)

    def close(self) -> None:
        self.rest()
        for stream in self.streams.values():
            self._driver.destroy_stream(stream)


class EventStream:
    """Implements `ModelStream`, and `ballast.models.barriers.Barriers` for the jobs.

    The durations of copies, and of stalls of lanes' streams, are read from the events around them
    once these are reached. `finish` makes the lane's stream wait for all KV, and a job ends with
    the lane's stream.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        stream: Callable[[], int],
        settled: Callable[[], None],
        pins: PinnedMemory,
    ) -> None:
        """`context`: of the device, retained as long as this is used; `stream`: returns the stream
        of the calling lane's work; `settled`: called by any thread; `pins`: of the host's
        KV."""
        self.loads = Loads()
        self._driver, self._context, self._lane, self._settled = driver, context, stream, settled
        self._pins = pins
        self._stream = LayerStream(ahead=True)
        self._weights = self._stream.add("weights", written=False)
        self._kv = self._stream.add("KV", written=True)
        self._engines: dict[Buffer, EventCopies] = {}
        self._events, self._timed = EventPool(driver), EventPool(driver, timed=True)
        self._stalls = {b: StreamStalls(self._timed) for b in self._stream.buffers}
        self._ends: dict[int, int] = {}
        """By id of a copy in flight, the event after it."""
        self._past: list[int] = []
        """Events of lanes' and copies' streams that are not known to be reached."""
        self._blocks: PinnedBlocks | None = None
        self._lock = threading.Lock()
        """Passes and the loop's turns never run at the same time, but reports may."""

    def add_weights(self, copies: Sequence[Copy]) -> None:
        self._driver.set_current(self._context)
        self._engines[self._weights] = EventCopies(
            self._driver, self._timed, (Direction.TO_DEVICE,), lambda copy: (copies[copy.layer],)
        )

    def add_staging(self, kv: KvCache) -> None:
        self._driver.set_current(self._context)
        self._blocks = PinnedBlocks(kv, self._pins)
        self._engines[self._kv] = EventCopies(
            self._driver, self._timed, Direction, self._blocks.copies_of
        )

    # -- the loop's thread, between jobs ----------------------------------------------------------

    @property
    def rotation(self) -> Rotation:
        return self._weights.rotation

    @property
    def held(self) -> tuple[int, ...]:
        with self._lock:
            return self._weights.held_now

    def settle(self) -> None:
        threading.Thread(target=self._settle, name="settle", daemon=True).start()

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        with self._lock:
            self._driver.set_current(self._context)
            self._look()
            self._submit(self._stream.change(self._weights, rotation, held, missing))

    def forget(self) -> None:
        self.remap(WHOLE, (), ())

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Return False: a GPU's weights are loaded over streams of its link, whose events are not
        available here."""
        return False

    def carry_blocks(self, moves: BlockMoves) -> None:
        assert self._blocks is not None, "it has staged blocks"
        wanted = self._blocks.carry(moves)
        if wanted == self._kv.rotation:
            return
        with self._lock:
            self._look()
            self._stream.change(self._kv, wanted)
        if wanted == WHOLE:
            self._blocks.clear()

    def rest(self) -> None:
        """Return when no copy is in flight. No job may run; the context is current."""
        for engine in self._engines.values():
            engine.rest()
        with self._lock:
            self._look()

    def close(self) -> None:
        """Wait for the copies, and free events and streams. No job may run."""
        self._driver.set_current(self._context)
        for engine in self._engines.values():
            engine.close()
        if self._blocks is not None:
            self._blocks.unpin()
        self._events.close()
        self._timed.close()

    # -- a lane's thread --------------------------------------------------------------------------

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return None if self._blocks is None else self._blocks.places(work)

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> Sequence[int]:
        """As `Barriers.begin_pass`; if the last pass broke off, all work that it launched has
        ended."""
        with self._lock:
            self._look()
            if self._kv.slot_of and self._blocks is not None:
                self._blocks.begin_pass(work)
            self._submit(self._stream.begin_pass())
            return self._stream.stops

    def wait(self, layer: int) -> None:
        """Make kernels launched from here on wait for the layer, on the device; returns at once.

        Raises DeviceError if its load could not be launched."""
        with self._lock:
            for copy in self._stream.awaited(layer):
                self._stalls[copy.buffer].wait_for(self._lane(), self._ends[copy.id])
            if (why := self._stream.fault(layer)) is not None:
                raise DeviceError("link", f"a layer could not be loaded: {why}")

    def used(self, layer: int) -> None:
        """Copy what follows a layer once the work launched so far has ended."""
        with self._lock:
            copies = self._stream.used(layer)
            if copies:
                self._submit(copies, self._after(self._lane()))

    def move(self) -> None:
        try:
            for layer in self.begin_pass():
                self.wait(layer)
                self.used(layer)
        finally:
            self.finish()

    def finish(self) -> None:
        """Make the lane's stream wait until no KV is in flight, that of a launch cut short
        included."""
        engine = self._engines.get(self._kv)
        if engine is None or not (self._stream.open or self._stream.failure):
            return
        with self._lock:
            for stream in engine.streams.values():
                self._stalls[self._kv].wait_for(self._lane(), self._after(stream))

    def stalled(self) -> float:
        """Return the seconds that lanes' streams have waited for layers since the last call. The
        work launched by then must have ended."""
        with self._lock:
            weights, kv = (stalls.seconds() for stalls in self._stalls.values())
            self.loads.stall_seconds += weights
            self._look()
            return weights + kv

    # -- inside, with the lock held ---------------------------------------------------------------

    def _settle(self) -> None:
        try:
            self._driver.set_current(self._context)
            self.rest()
        except DeviceError as error:
            log.error("copies of layers cannot be waited for: %s", error)
            with self._lock:
                for copy in self._stream.in_flight:
                    self._stream.failed(copy, str(error))
        finally:
            self._settled()

    def _submit(self, copies: Sequence[LayerCopy], use: int | None = None) -> None:
        """Launch copies; `use`: event after the use of the layer that they follow. Raises
        DeviceError if one cannot be launched; the next pass tries it and the later ones again."""
        for i, copy in enumerate(copies):
            after = [self._ends[id] for id in copy.after if id in self._ends]
            if use is not None:
                after.append(use)
            try:
                self._ends[copy.id] = self._engines[copy.buffer].submit(copy, after)
            except DeviceError as error:
                for lost in copies[i:]:
                    self._stream.failed(lost, str(error))
                raise

    def _after(self, stream: int) -> int:
        """Record and return an event after all work that the stream has now."""
        event = self._events.acquire()
        self._past.append(event)
        self._driver.record(event, stream)
        return event

    def _look(self) -> None:
        """Count copies that have landed, which need no wait any more, and reuse events."""
        for engine in self._engines.values():
            for copy, n_bytes, seconds in engine.landed():
                self._ends.pop(copy.id, None)
                self._stream.landed(copy)
                if copy.buffer is self._weights:
                    self.loads.add(n_bytes, seconds)
        past, self._past = self._past, []
        for event in past:
            if self._driver.is_done(event):
                self._events.release(event)
            else:
                self._past.append(event)
