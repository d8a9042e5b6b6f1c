"""Stream layers in virtual time: loads and stores are flows on the link, and jobs wait for layers.

Drives a `LayerStream` as live devices do. Used by `sim.device` and `sim.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ballast.core.clock import Clock
from ballast.core.event import FirstJobReadyEvent, RotationSettledEvent
from ballast.core.link import Direction
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.staged import BlockMoves
from ballast.memory.copies import Copy
from ballast.residency.arrival import Arrival, ArrivalPlan
from ballast.residency.buffer import Buffer, LayerCopy
from ballast.residency.stream import LayerStream
from ballast.sim.event_heap import EventHeap
from ballast.sim.layer_passes import Pass
from ballast.sim.link import SimLink
from ballast.weights.weight_stream import Loads


class SimCopies:
    """Implements `CopyEngine`: copies of one buffer as flows, which end at their time."""

    def __init__(
        self,
        link: SimLink,
        stream: str,
        bytes_of: Callable[[LayerCopy], int],
        now: Callable[[], float],
        ended: Callable[[LayerCopy, float, float], None],
    ) -> None:
        """`ended` is called with the copy, the time and the seconds that it took."""
        self._streams = {way: link.stream(stream, way) for way in Direction}
        self._bytes_of, self._now, self._ended = bytes_of, now, ended

    def submit(self, copy: LayerCopy, after: Sequence[None] = ()) -> None:
        ended = partial(self._ended, copy)
        self._streams[copy.direction].carry(self._now(), self._bytes_of(copy), ended)


class SimStream:
    """Implements `ModelStream`, and `sim.layer_passes.LayerSource` for the model's jobs."""

    def __init__(
        self,
        spec: ModelSpec,
        heap: EventHeap,
        clock: Clock,
        link: SimLink,
        loads: Loads,
        begun: Callable[[SimStream], None],
        early: bool = False,
    ) -> None:
        """`loads`: counted on; `begun` is called when jobs may have to wait from then on; `early`:
        whether they begin while the model's weights arrive."""
        self.loads = loads
        self._name, self._heap, self._clock, self._link = spec.name, heap, clock, link
        self._begun, self._early = begun, early
        self._stream = LayerStream()
        self._weights = self._stream.add(f"weights of {spec.name}", written=False)
        self._kv = self._stream.add(f"KV of {spec.name}", written=True)
        self._engines: dict[Buffer, SimCopies] = {}
        self._layer_bytes: Sequence[int] = ()
        self._cache: KvCache | None = None
        """The cache whose staged blocks stream."""
        self._moves = BlockMoves()
        self._now = 0.0
        """Time of the change that is being made."""
        self._job: Pass | None = None
        """The job that began last."""
        self._rotates = False
        """Whether the job waits for a layer of weights that a copy of the stream brings."""
        self._settling = False
        self._loaded = self._stored = 0
        """Bytes of KV that the job loads and stores of each layer."""

    def add_weights(self, copies: Sequence[Copy]) -> None:
        self._layer_bytes = [copy.n_bytes for copy in copies]
        bytes_of = lambda copy: self._layer_bytes[copy.layer]  # noqa: E731
        self._add(self._weights, f"rotation:{self._name}", bytes_of)

    def add_staging(self, kv: KvCache) -> None:
        self._cache = kv
        self._add(self._kv, f"kv:{self._name}", self._kv_bytes)

    # -- between jobs -----------------------------------------------------------------------------

    @property
    def held(self) -> Sequence[int]:
        return self._weights.held_now

    def settle(self) -> None:
        self._settling = True
        self._tell_settled(self._clock.now())

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        self._begun(self)
        self._settling = False
        copies = self._stream.change(self._weights, rotation, held, missing)
        self._submit(self._clock.now(), copies)

    def forget(self) -> None:
        self._settling = False
        self._stream.forget(self._weights)

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if not self._early:
            return False
        self._begun(self)
        arrival = self._stream.expect(self._weights, coming)
        watch = _ArrivalWatch(partial(self._arrived, transfer_id, arrival), coming)
        self._link.start(transfer_id, copies, watch=watch)
        return True

    def carry_blocks(self, moves: BlockMoves) -> None:
        assert self._cache is not None, "it has staged blocks"
        self._moves, staged = moves, self._cache.staged
        wanted = staged.rotation if moves or len(staged) else WHOLE
        if wanted != self._kv.rotation:
            self._begun(self)
            self._stream.change(self._kv, wanted)

    # -- for jobs ---------------------------------------------------------------------------------

    @property
    def stops(self) -> Sequence[int]:
        return self._stream.stops

    @property
    def waits(self) -> bool:
        return self._stream.waits

    @property
    def open(self) -> bool:
        return self._stream.open

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        self._job = job
        if self._cache is not None:  # it reads all staged blocks, in slots or where they come
            size, staged = self._cache.layout.layer_bytes, self._cache.staged
            stores = len(self._moves.stores)
            self._loaded, self._stored = (len(staged) - stores) * size, stores * size
        self._submit(now, self._stream.begin_pass())

    def lacks(self, layer: int) -> bool:
        return self._stream.lacks(layer)

    def used(self, now: float, layer: int) -> None:
        self._submit(now, self._stream.used(layer))

    def stalls(self, layer: int) -> None:
        self._rotates = self._weights.awaits_copy(layer)

    def waited(self, seconds: float) -> None:
        if self._rotates:
            self.loads.stall_seconds += seconds

    # -- inside -----------------------------------------------------------------------------------

    def _add(self, buffer: Buffer, stream: str, bytes_of: Callable[[LayerCopy], int]) -> None:
        now = lambda: self._now  # noqa: E731
        self._engines[buffer] = SimCopies(self._link, stream, bytes_of, now, self._landed)

    def _kv_bytes(self, copy: LayerCopy) -> int:
        return self._loaded if copy.direction is Direction.TO_DEVICE else self._stored

    def _submit(self, now: float, copies: Iterable[LayerCopy]) -> None:
        self._now = now
        for copy in copies:
            self._engines[copy.buffer].submit(copy)

    def _landed(self, copy: LayerCopy, now: float, seconds: float) -> None:
        self._submit(now, self._stream.landed(copy))
        if copy.buffer is self._weights:
            self.loads.add(self._layer_bytes[copy.layer], seconds)
        if self._job is not None:
            self._job.landed(now, copy.layer)
            if copy.buffer.written and not self._stream.open:
                self._job.closed(now)
        self._tell_settled(now)

    def _arrived(self, id: int, arrival: Arrival, now: float, n_bytes: int, last: bool) -> None:
        """Note that the first `n_bytes` of a load of all weights have landed."""
        coming = list(arrival.missing)
        if last:
            self._stream.arrival_ended(self._weights, arrival, None)
        elif self._stream.arrived(self._weights, arrival, n_bytes):
            self._heap.schedule(now, FirstJobReadyEvent(id))
        for layer in coming:
            if self._job is not None:
                self._job.landed(now, layer)

    def _tell_settled(self, now: float) -> None:
        if self._settling and self._stream.settled:
            self._settling = False
            self._heap.schedule(now, RotationSettledEvent(self._name))


class _ArrivalWatch:
    """Follows the transfer that brings all weights of a model (`sim.link.LandingWatch`)."""

    def __init__(self, arrived: Callable[[float, int, bool], None], coming: ArrivalPlan) -> None:
        self._arrived = arrived
        later = (n for n in coming.layers.values() if n > coming.opens)
        self.marks = [coming.opens, *sorted(later)]

    def landed(self, now: float, n_bytes: int) -> None:
        self._arrived(now, n_bytes, n_bytes >= self.marks[-1])


class SimStreams:
    """What streams the layers of a device's models, by name."""

    def __init__(
        self,
        heap: EventHeap,
        clock: Clock,
        link: SimLink,
        early: bool = False,
    ) -> None:
        """`early`: whether first jobs begin while weights arrive."""
        self._heap, self._clock, self._link, self._early = heap, clock, link, early
        self._streams: dict[str, SimStream] = {}
        """Streams of models that have rotated layers or KV, or begun a job early; a new model that
        is refused has none."""
        self.loads: dict[str, Loads] = {}
        """Costs of rotations by model, including models that have left."""

    def make(self, spec: ModelSpec) -> SimStream:
        loads = self.loads.setdefault(spec.name, Loads())
        begun = partial(self._streams.__setitem__, spec.name)
        world = (self._heap, self._clock, self._link)
        return SimStream(spec, *world, loads, begun, self._early)

    def of(self, model: str) -> SimStream | None:
        """Return the model's stream; None if nothing of it has ever streamed."""
        return self._streams.get(model)
