"""Swap KV of rotating layers between GPU and host, ordered by CUDA events during passes.

Made for live GPUs whose preset swaps KV; `link_swapper` is its counterpart on CPU. Streams wait
for each other's events; no host thread blocks.
"""

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
    """Implements `KvSwapper`, and `ballast.models.barriers.Barriers` for forward passes.

    A layer is stored after the event that follows its use; then the next layer is loaded into its
    slot, and runs after its load. Each direction has one stream. `finish` makes the lane's stream
    wait for all copies, and a job ends with the lane's stream: no copy is in flight between jobs.
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
        """`context`: the device's CUDA context, which must outlive this object; `stream` returns
        the stream of the calling lane; `dirty`: see `Spilled`."""
        self._spilled = Spilled(kv, dirty)
        self.host = self._spilled.host
        self._driver, self._context, self._pins, self._lane = driver, context, pins, stream
        driver.set_current(context)
        self._streams = {way: driver.new_stream() for way in Direction}
        self._events, self._timed = EventPool(driver), EventPool(driver, timed=True)
        self._stalls = StreamStalls(self._timed)
        self._recorded: list[int] = []
        """Events recorded in this job."""
        self._rotation = WHOLE
        self._carry: tuple[Sequence[int], Sequence[Piece], Direction] = ((), (), Direction.TO_HOST)
        """Copies of the next `move`: layers, pieces of each layer, direction."""
        self._planes: set[tuple[int, int]] = set()
        """(layer, slab) of host copies that `pins` was asked to page-lock."""
        self._landed: dict[int, int] = {}
        """Event after the load of each layer of this pass."""
        self._coming: list[int] = []
        """Layers of this pass still to be loaded, in order of the rotation, the next one last."""
        self._loads: list[Piece] = []
        """Pieces that this pass loads for each layer."""
        self._stores: list[Piece] = []
        """Pieces that this pass stores for each layer."""

    # -- the loop's thread, between jobs ----------------------------------------------------------

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        self._carry = layers, self._spilled.planes(slabs), direction

    def turn(self, rotation: Rotation) -> None:
        self._rotation = rotation
        if rotation == WHOLE:
            self._unpin()
            self._spilled.clear()

    def close(self) -> None:
        """Unpin host memory and destroy streams and events. No job may be running."""
        self._driver.set_current(self._context)
        self._unpin()
        for stream in self._streams.values():
            self._driver.finish(stream)
            self._driver.destroy_stream(stream)
        self._events.close()
        self._timed.close()

    # -- a lane's thread --------------------------------------------------------------------------

    def move(self) -> None:
        """Run a job that computes nothing: make the copies that `carry` has set."""
        layers, pieces, direction = self._carry
        self._carry = (), (), direction
        try:
            for layer in layers:
                self._copy(layer, pieces, direction)
        finally:
            self.finish()

    def begin_pass(self, work: Sequence[SequenceWork]) -> tuple[int, ...]:
        """Start loading the first rotating layers, one for each slot; return all that rotate."""
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
        """Make the lane's stream wait for a layer's KV: kernels launched later run after its load.

        Returns at once."""
        self._stalls.wait_for(self._lane(), self._landed[layer])

    def used(self, layer: int) -> None:
        """Store a layer that the pass is done with, then load the next layer into its slot."""
        out, back = self._streams[Direction.TO_HOST], self._streams[Direction.TO_DEVICE]
        self._driver.wait_for(out, self._after(self._lane()))
        self._copy(layer, self._stores, Direction.TO_HOST)
        self._driver.wait_for(back, self._after(out))
        self._load_next()

    def finish(self) -> None:
        """Make the lane's stream wait until no copy is in flight."""
        for stream in self._streams.values():
            self._stalls.wait_for(self._lane(), self._after(stream))

    def stalled(self) -> float:
        """Return the seconds that lanes' streams stood still since the last call.

        All work launched before must have ended."""
        return self._stalls.seconds()

    # -- inside -----------------------------------------------------------------------------------

    def _load_next(self) -> None:
        if self._coming:
            layer = self._coming.pop()
            self._copy(layer, self._loads, Direction.TO_DEVICE)
            self._landed[layer] = self._after(self._streams[Direction.TO_DEVICE])

    def _after(self, stream: int) -> int:
        """Record and return an event after all work that the stream has now."""
        event = self._events.acquire()
        self._recorded.append(event)
        self._driver.record(event, stream)
        return event

    def _put_back(self) -> None:
        """Release the last job's events. Those not done yet, after a job was cut short, stay."""
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
        """Split pieces at plane boundaries: the driver refuses to copy partly page-locked memory.

        Page-locks each plane on first use."""
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
