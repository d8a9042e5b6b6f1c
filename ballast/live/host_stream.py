"""Stream layers of a model on a CPU device: weights and KV over the host link, beside its jobs.

Drives a `LayerStream`; `event_stream` is its counterpart on GPUs. The loop's thread changes what
streams, between jobs; lanes run passes; the link's thread reports copies that have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.blocks import KvCache
from ballast.kv.host_blocks import HostBlocks
from ballast.kv.staged import BlockMoves
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.residency.arrival import Arrival, ArrivalPlan
from ballast.residency.buffer import Buffer, LayerCopy
from ballast.residency.engine import CopyEngine
from ballast.residency.stream import LayerStream
from ballast.weights.weight_stream import Loads

Ended = Callable[[LayerCopy, TransferDoneEvent], None]


class HostCopies:
    """Implements `CopyEngine`: copies of one buffer over the host link, in a stream of its own."""

    def __init__(
        self,
        link: HostLink,
        stream: str,
        copies_of: Callable[[LayerCopy], Sequence[Copy]],
        ended: Ended,
    ) -> None:
        """`copies_of` returns the bytes of a copy; `ended` is called by any thread."""
        self._link, self._stream, self._copies_of, self._ended = link, stream, copies_of, ended

    def submit(self, copy: LayerCopy, after: Sequence[None] = ()) -> None:
        copies = self._copies_of(copy)
        if not copies:
            self._ended(copy, TransferDoneEvent(copy.id, 0, 0.0))
            return
        self._link.start(
            copy.id,
            copies,
            self._stream,
            copy.direction,
            on_done=lambda done: self._ended(copy, done),
        )


class WeightCopies:
    """Returns the bytes of a layer's load, and notes which targets have been written before."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self.touched: set[int] = set()
        """Layers that may have been loaded since they were last mapped."""

    def __call__(self, copy: LayerCopy) -> Sequence[Copy]:
        layer = copy.layer
        found = replace(self._copies[layer], touched=layer in self.touched)
        self.touched.add(layer)
        return (found,)


class HostStream:
    """Implements `ModelStream`, and `ballast.models.barriers.Barriers` for the jobs.

    A layer whose copy failed fails the pass that reaches it, and is loaded once more by the next.
    KV that could not be stored fails its pass.
    """

    def __init__(
        self,
        model: str,
        link: HostLink,
        clock: Clock,
        settled: Callable[[], None],
        opened: Callable[[int], None] | None = None,
    ) -> None:
        """`settled`, and `opened` with the transfer, notify the loop; they are called by any
        thread. Without `opened`, jobs wait for whole loads of the model's weights."""
        self.loads = Loads()
        self._model, self._link, self._clock = model, link, clock
        self._settled, self._opened = settled, opened
        self._change = threading.Condition()
        """Held while the stream changes. Re-entrant: an empty copy ends as it is submitted."""
        self._stream = LayerStream()
        self._engines: dict[Buffer, CopyEngine[None]] = {}
        self._weights = self._stream.add(f"weights of {model}", written=False)
        self._kv = self._stream.add(f"KV of {model}", written=True)
        self._weight_copies = WeightCopies(())
        self._blocks: HostBlocks | None = None
        self._settling = False
        self._stalled = 0.0
        """Seconds of stalls since the last call of `stalled`."""
        self._carried = dict.fromkeys(Direction, 0.0)
        """Seconds of copies of KV that have ended since the last call of `carried`."""

    def add_weights(self, copies: Sequence[Copy]) -> None:
        self._weight_copies = WeightCopies(copies)
        self._engines[self._weights] = HostCopies(
            self._link, f"rotation:{self._model}", self._weight_copies, self._ended
        )

    def add_staging(self, kv: KvCache) -> None:
        self._blocks = HostBlocks(kv)
        self._engines[self._kv] = HostCopies(
            self._link, f"kv:{self._model}", self._blocks.copies_of, self._ended
        )

    # -- the loop's thread, between jobs ----------------------------------------------------------

    @property
    def rotation(self) -> Rotation:
        return self._weights.rotation

    @property
    def held(self) -> tuple[int, ...]:
        with self._change:
            return self._weights.held_now

    def settle(self) -> None:
        with self._change:
            self._settling = True
            quiet = self._stream.settled
        if quiet:
            self._settled()

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        with self._change:
            self._settling = False
            self._weight_copies.touched.clear()
            self._submit(self._stream.change(self._weights, rotation, held, missing))

    def forget(self) -> None:
        with self._change:
            self._settling = False
            self._stream.forget(self._weights)

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if self._opened is None:
            return False
        with self._change:
            arrival = self._stream.expect(self._weights, coming)
        try:
            self._link.start(transfer_id, copies, watch=_ArrivalWatch(self, transfer_id, arrival))
        except DeviceError:
            self._arrival_ended(arrival, None)  # the caller frees what waits for it
            raise
        return True

    def carry_blocks(self, moves: BlockMoves) -> None:
        assert self._blocks is not None, "it has staged blocks"
        wanted = self._blocks.carry(moves)
        if wanted != self._kv.rotation:
            with self._change:
                self._stream.change(self._kv, wanted)
            if wanted == WHOLE:
                self._blocks.clear()

    # -- a lane's thread --------------------------------------------------------------------------

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return None if self._blocks is None else self._blocks.places(work)

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> Sequence[int]:
        if not self._stream.waits:
            return ()
        with self._change:
            if self._kv.slot_of and self._blocks is not None:
                self._blocks.begin_pass(work)
            self._submit(self._stream.begin_pass())
            return self._stream.stops

    def wait(self, layer: int) -> None:
        """Wait until the layer is present. Raises DeviceError if it cannot be loaded."""
        stream = self._stream
        if layer not in self._weights.absent and layer not in self._kv.absent:
            return
        began = self._clock.now()
        with self._change:
            is_rotation = self._weights.awaits_copy(layer)
            while stream.lacks(layer):
                if (why := stream.fault(layer)) is not None:
                    raise DeviceError("link", f"a layer could not be loaded: {why}")
                self._change.wait()
            seconds = self._clock.now() - began
            self._stalled += seconds
            if is_rotation:
                self.loads.stall_seconds += seconds

    def used(self, layer: int) -> None:
        with self._change:
            self._submit(self._stream.used(layer))

    def move(self) -> None:
        for layer in self.begin_pass():
            self.wait(layer)
            self.used(layer)
        self.finish()

    def finish(self) -> None:
        """Wait until no KV is in flight. Raises DeviceError if some could not be moved."""
        if self._blocks is None:
            return
        with self._change:
            began = self._clock.now()
            while self._stream.open:
                self._change.wait()
            self._stalled += self._clock.now() - began
            if self._stream.failure is not None:
                raise DeviceError("link", f"KV could not be moved: {self._stream.failure}")

    def stalled(self) -> float:
        seconds, self._stalled = self._stalled, 0.0
        return seconds

    def carried(self) -> tuple[float, float]:
        with self._change:
            seconds = self._carried
            self._carried = dict.fromkeys(Direction, 0.0)
        return seconds[Direction.TO_DEVICE], seconds[Direction.TO_HOST]

    # -- any thread -------------------------------------------------------------------------------

    def _submit(self, copies: Iterable[LayerCopy]) -> None:
        """Submit copies, with the lock held."""
        for copy in copies:
            try:
                self._engines[copy.buffer].submit(copy, ())
            except DeviceError as error:
                self._submit(self._stream.failed(copy, str(error)))

    def _ended(self, copy: LayerCopy, done: TransferDoneEvent) -> None:
        with self._change:
            if done.error is not None:
                self._submit(self._stream.failed(copy, done.error))
            else:
                if copy.buffer is self._weights:
                    self.loads.add(done.n_bytes, done.seconds)
                else:
                    self._carried[copy.direction] += done.seconds
                self._submit(self._stream.landed(copy))
            self._change.notify_all()
            quiet = self._settling and self._stream.settled
        if quiet:
            self._settled()

    def _arrived(self, arrival: Arrival, transfer_id: int, n_bytes: int) -> None:
        with self._change:
            opens = self._stream.arrived(self._weights, arrival, n_bytes)
            self._change.notify_all()
        if opens and self._opened is not None:
            self._opened(transfer_id)

    def _arrival_ended(self, arrival: Arrival, error: str | None) -> None:
        with self._change:
            self._stream.arrival_ended(self._weights, arrival, error)
            self._change.notify_all()


class _ArrivalWatch:
    """Follows the transfer that loads a model's weights (`memory.transfer.TransferWatch`)."""

    def __init__(self, stream: HostStream, transfer_id: int, arrival: Arrival) -> None:
        self._stream, self._id, self._arrival = stream, transfer_id, arrival

    def landed(self, n_bytes: int) -> None:
        self._stream._arrived(self._arrival, self._id, n_bytes)

    def ended(self, error: str | None) -> None:
        self._stream._arrival_ended(self._arrival, error)
