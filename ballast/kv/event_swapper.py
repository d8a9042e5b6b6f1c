"""The swapper of a GPU: streams wait for each other's events, and the host for none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.spilled import Piece, Spilled
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.fences import EventPool, StreamStalls
from ballast.memory.cuda.pinning import PinnedMemory


class EventSwapper:
    """Implements `KvSwapper`, and `ballast.models.barriers.Barriers` for the passes.

    A layer is stored after the event that follows its use, the next of its slot loaded after that,
    and run after it has landed. Each way has a stream. `finish` has the lane's stream wait for the
    last of it, and a job ends when that has ended: nothing is on its way between jobs.
    """

    def __init__(
        self,
        kv: KvCache,
        driver: Driver,
        context: int,
        pins: PinnedMemory,
        stream: Callable[[], int],
        dirty: bool,
    ) -> None:
        """`context`: of the device, retained as long as this is used; `stream`: that the calling
        lane's work goes to; `dirty`: as `Spilled` says."""
        self._spilled = Spilled(kv, dirty)
        self.host = self._spilled.host
        self._driver, self._context, self._pins, self._lane = driver, context, pins, stream
        driver.set_current(context)
        self._streams = {way: driver.new_stream() for way in Direction}
        self._events, self._timed = EventPool(driver), EventPool(driver, timed=True)
        self._stalls = StreamStalls(self._timed)
        self._recorded: list[int] = []
        """Events of this job."""
        self._rotation = WHOLE
        self._carry: tuple[Sequence[int], Sequence[Piece], Direction] = ((), (), Direction.TO_HOST)
        """Layers, and what of each."""
        self._planes: set[tuple[int, int]] = set()
        """(layer, slab) whose memory on the host is page-locked, if it could be."""
        self._landed: dict[int, int] = {}
        """By layer of this pass, the event after its load."""
        self._coming: list[int] = []
        """Layers to be loaded, by place in the rotation, the next one last."""
        self._loads: list[Piece] = []
        """Of each layer of this pass."""
        self._stores: list[Piece] = []

    # -- the loop's thread, between jobs ----------------------------------------------------------

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        self._carry = layers, self._spilled.planes(slabs), direction

    def turn(self, rotation: Rotation) -> None:
        self._rotation = rotation
        if rotation == WHOLE:
            self._unpin()
            self._spilled.clear()

    def close(self) -> None:
        """No job runs."""
        self._driver.set_current(self._context)
        self._unpin()
        for stream in self._streams.values():
            self._driver.finish(stream)
            self._driver.destroy_stream(stream)
        self._events.close()
        self._timed.close()

    # -- a lane's thread --------------------------------------------------------------------------

    def move(self) -> None:
        """The job that computes nothing: what `carry` has named."""
        layers, pieces, direction = self._carry
        self._carry = (), (), direction
        try:
            for layer in layers:
                self._copy(layer, pieces, direction)
        finally:
            self.finish()

    def begin_pass(self, work: Sequence[SequenceWork]) -> tuple[int, ...]:
        """Layers that rotate; the first of them are loaded."""
        rotation = self._rotation
        self._put_back()
        if rotation == WHOLE:
            return ()
        self._loads, self._stores = self._spilled.loads(work), self._spilled.stores(work)
        self._landed.clear()
        self._coming = list(reversed(rotation.layers))
        for _ in range(rotation.slots):
            self._load_next()
        return rotation.layers

    def wait(self, layer: int) -> None:
        """Kernels launched from here on run when the KV of a layer is there. Returns at once."""
        self._stalls.wait_for(self._lane(), self._landed[layer])

    def used(self, layer: int) -> None:
        """A pass is done with the layer: it is stored, and then the next of its slot is loaded."""
        out, back = self._streams[Direction.TO_HOST], self._streams[Direction.TO_DEVICE]
        self._driver.wait_for(out, self._after(self._lane()))
        self._copy(layer, self._stores, Direction.TO_HOST)
        self._driver.wait_for(back, self._after(out))
        self._load_next()

    def finish(self) -> None:
        """The lane's stream goes on when nothing is on its way."""
        for stream in self._streams.values():
            self._stalls.wait_for(self._lane(), self._after(stream))

    def stalled(self) -> float:
        """Seconds that lanes' streams stood still since this was last asked. What was launched by
        then has ended."""
        return self._stalls.seconds()

    # -- inside -----------------------------------------------------------------------------------

    def _load_next(self) -> None:
        if self._coming:
            layer = self._coming.pop()
            self._copy(layer, self._loads, Direction.TO_DEVICE)
            self._landed[layer] = self._after(self._streams[Direction.TO_DEVICE])

    def _after(self, stream: int) -> int:
        """An event that follows what the stream has now."""
        event = self._events.acquire()
        self._recorded.append(event)
        self._driver.record(event, stream)
        return event

    def _put_back(self) -> None:
        """Events of the last job, which has ended; where it was cut short, perhaps not of all."""
        recorded, self._recorded = self._recorded, []
        for event in recorded:
            if self._driver.is_done(event):
                self._events.release(event)
            else:
                self._recorded.append(event)

    def _copy(self, layer: int, pieces: Sequence[Piece], direction: Direction) -> None:
        stream, driver = self._streams[direction], self._driver
        call = driver.copy_to_device if direction is Direction.TO_DEVICE else driver.copy_to_host
        for copy in self._spilled.copies(layer, self._cut(layer, pieces), direction):
            call(copy.dst, copy.src, copy.n_bytes, stream)

    def _cut(self, layer: int, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Each page-locked, or none of it: the driver refuses to copy what is so in part."""
        size = self._spilled.layout.plane_bytes
        for at, n_bytes in pieces:
            end = at + n_bytes
            while at < end:
                self._pin(layer, at // size)
                upto = min(end, (at // size + 1) * size)
                yield at, upto - at
                at = upto

    def _pin(self, layer: int, plane: int) -> None:
        if (layer, plane) in self._planes:
            return
        self._planes.add((layer, plane))
        address = self._spilled.plane_address(layer, plane)
        self._pins.pin(address, self._spilled.layout.plane_bytes, read_only=False)

    def _unpin(self) -> None:
        for layer, plane in self._planes:
            self._pins.unpin(self._spilled.plane_address(layer, plane))
        self._planes.clear()
