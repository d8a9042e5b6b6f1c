"""Swap KV of rotating layers between device and host over a CPU device's link, during passes.

Made for live CPU devices whose preset swaps KV; `event_swapper` is its counterpart on GPUs.
The loop calls it between jobs, `KvSwapExecutor` and the model's forward pass during them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.spilled import Piece, Spilled
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink


class LinkSwapper:
    """Implements `KvSwapper`, and `ballast.models.barriers.Barriers` for forward passes.

    A pass loads the KV of its blocks one layer at a time. New KV of a layer is stored to the host
    before the layer's slot is loaded again. `finish` waits for all copies: none is in flight
    between jobs.
    """

    def __init__(self, kv: KvCache, link: HostLink, clock: Clock, dirty: bool) -> None:
        """`dirty`: see `Spilled`."""
        self._spilled = Spilled(kv, dirty)
        self.host = self._spilled.host
        self._link, self._clock = link, clock
        self._stream = f"kv:{kv.spec.name}"
        self._rotation = WHOLE
        self._carry: tuple[list[Copy], Direction] = ([], Direction.TO_HOST)
        self._change = threading.Condition()
        self._transfers = 0
        self._flying = 0
        self._ready: set[int] = set()
        """Layers of this pass whose KV has been loaded."""
        self._coming: list[int] = []
        """Layers of this pass still to be loaded, in order of the rotation, the next one last."""
        self._loads: list[Piece] = []
        """Pieces that this pass loads for each layer."""
        self._stores: list[Piece] = []
        """Pieces that this pass stores for each layer."""
        self._error: str | None = None
        self._stalled = 0.0

    # -- the loop's thread, between jobs ----------------------------------------------------------

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        pieces = self._spilled.planes(slabs)
        copies = [c for layer in layers for c in self._spilled.copies(layer, pieces, direction)]
        self._carry = copies, direction

    def turn(self, rotation: Rotation) -> None:
        self._rotation = rotation
        if rotation == WHOLE:
            self._spilled.clear()

    # -- a lane's thread --------------------------------------------------------------------------

    def move(self) -> None:
        """Run a job that computes nothing: make the copies that `carry` has set."""
        copies, direction = self._carry
        self._carry = [], direction
        self._start(copies, direction, lambda: None)
        self.finish()

    def begin_pass(self, work: Sequence[SequenceWork]) -> tuple[int, ...]:
        """Start loading the first rotating layers, one for each slot; return all that rotate."""
        rotation = self._rotation
        if rotation == WHOLE:
            return ()
        self.finish()
        self._loads, self._stores = self._spilled.loads(work), self._spilled.stores(work)
        with self._change:
            self._ready.clear()
            self._coming = list(reversed(rotation.layers))
        for _ in range(rotation.slots):
            self._load_next()
        return rotation.layers

    def wait(self, layer: int) -> None:
        """Block until a layer's KV has been loaded. Raises DeviceError if a copy has failed."""
        with self._change:
            self._wait_for(lambda: layer in self._ready)

    def used(self, layer: int) -> None:
        """Store a layer that the pass is done with, then load the next layer into its slot."""
        copies = list(self._spilled.copies(layer, self._stores, Direction.TO_HOST))
        self._start(copies, Direction.TO_HOST, self._load_next)

    def finish(self) -> None:
        """Block until no copy is in flight. Raises DeviceError if a copy has failed."""
        with self._change:
            self._wait_for(lambda: not self._flying)
            if self._error is not None:
                error, self._error = self._error, None
                raise DeviceError("link", f"KV could not be moved: {error}")

    def stalled(self) -> float:
        """Return the seconds that jobs have waited for copies since the last call."""
        seconds, self._stalled = self._stalled, 0.0
        return seconds

    # -- inside -----------------------------------------------------------------------------------

    def _wait_for(self, there: Callable[[], bool]) -> None:
        """Wait for `there()`, with the lock held. Raises DeviceError if a copy has failed and no
        copy is in flight."""
        if there():
            return
        began = self._clock.now()
        self._change.wait_for(lambda: there() or (self._error is not None and not self._flying))
        self._stalled += self._clock.now() - began
        if not there():
            raise DeviceError("link", f"KV could not be moved: {self._error}")

    def _load_next(self) -> None:
        """Start loading the next layer. Runs on a lane's thread or on a thread of the link."""
        with self._change:
            if not self._coming:
                return
            layer = self._coming.pop()
        copies = list(self._spilled.copies(layer, self._loads, Direction.TO_DEVICE))

        def landed() -> None:
            with self._change:
                self._ready.add(layer)
                self._change.notify_all()

        self._start(copies, Direction.TO_DEVICE, landed)

    def _start(
        self, copies: Sequence[Copy], direction: Direction, then: Callable[[], None]
    ) -> None:
        """Start copies; after success call `then`, which may start more."""
        if not copies:
            then()
            return

        def done(event: TransferDoneEvent) -> None:
            if event.error is None:
                then()
            with self._change:
                self._error = self._error or event.error
                self._flying -= 1
                self._change.notify_all()

        with self._change:
            self._transfers += 1
            self._flying += 1
        try:
            self._link.start(self._transfers, copies, self._stream, direction, done)
        except DeviceError as closed:
            with self._change:
                self._error = str(closed)
                self._flying -= 1
                self._change.notify_all()
