"""Simulate KV swap: loads and stores of KV are flows on the link, for which jobs wait.

Blocks that sequences of a job share are counted once for each sequence. Used by `sim.device` and
`sim.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout
from ballast.kv.swapper import KvSwapper
from ballast.sim.fluid import Ended
from ballast.sim.layer_passes import Pass
from ballast.sim.link import SimLink


class SimSwapper:
    """Implements `KvSwapper`, and `sim.layer_passes.LayerSource` for the model's jobs.

    As live: a job loads its first layers' KV, one for each slot, when it begins, and the next of a
    slot when the one before it there has been stored. It ends when the last has been stored.
    """

    host: int | None = None

    def __init__(self, kv: KvCache, link: SimLink, dirty: bool) -> None:
        """`dirty`: store only the part of a layer's KV that a job has written."""
        assert isinstance(kv.layout, LayeredLayout)
        self._plane_bytes = kv.layout.plane_bytes
        self._token_bytes = kv.spec.kv_bytes_per_token // kv.spec.n_layers
        self._dirty = dirty
        self._streams = {way: link.stream(f"kv:{kv.spec.name}", way) for way in Direction}
        self._rotation, self._layers = WHOLE, frozenset[int]()
        self._moved: tuple[int, Direction] = (0, Direction.TO_HOST)
        """Bytes that the next job moves, which computes nothing."""
        self._job: Pass | None = None
        self._absent: set[int] = set()
        """Layers whose KV the job has not loaded yet."""
        self._coming: list[int] = []
        """Those of them that wait for a slot, the next one last."""
        self._storing = 0
        """Layers that the job has not stored yet."""
        self._loaded = self._stored = 0
        """Bytes that it loads and stores of each."""

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        self._moved = len(layers) * len(slabs) * self._plane_bytes, direction

    def turn(self, rotation: Rotation) -> None:
        self._rotation, self._layers = rotation, frozenset(rotation.layers)

    def move(self, now: float, ended: Ended) -> None:
        """Begin the job that computes nothing and moves KV."""
        n_bytes, direction = self._moved
        self._streams[direction].carry(now, n_bytes, ended)

    @property
    def stops(self) -> Sequence[int]:
        return self._rotation.layers

    @property
    def waits(self) -> bool:
        return bool(self._layers)

    @property
    def open(self) -> bool:
        return self._storing > 0

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        layers = self._rotation.layers
        self._job = job
        self._absent, self._coming = set(layers), list(reversed(layers))
        self._storing = len(layers)
        self._loaded = read * self._token_bytes
        self._stored = (written if self._dirty else read + written) * self._token_bytes
        for _ in range(self._rotation.slots):
            self._load_next(now)

    def lacks(self, layer: int) -> bool:
        return layer in self._absent

    def used(self, now: float, layer: int) -> None:
        if layer in self._layers:
            self._streams[Direction.TO_HOST].carry(now, self._stored, self._stored_one)

    def waited(self, seconds: float) -> None:
        """Do nothing: the wait is in the job's `stall`, and KV swap has no counter of its own."""

    def _load_next(self, now: float) -> None:
        if self._coming:
            landed = partial(self._landed, self._coming.pop())
            self._streams[Direction.TO_DEVICE].carry(now, self._loaded, landed)

    def _landed(self, layer: int, now: float, seconds: float) -> None:
        self._absent.remove(layer)
        assert self._job is not None
        self._job.landed(now, layer)

    def _stored_one(self, now: float, seconds: float) -> None:
        self._storing -= 1
        self._load_next(now)
        assert self._job is not None
        if not self._storing:
            self._job.closed(now)


class SimSwappers:
    """The swappers of a device's models, by name."""

    def __init__(self, link: SimLink, dirty: bool) -> None:
        self._link, self._dirty = link, dirty
        self._swappers: dict[str, SimSwapper] = {}

    def make(self, kv: KvCache) -> SimSwapper:
        swapper = SimSwapper(kv, self._link, self._dirty)
        self._swappers[kv.spec.name] = swapper
        return swapper

    def of(self, model: str) -> SimSwapper | None:
        """The model's, if it has one."""
        return self._swappers.get(model)


class _Nothing:
    """`KvSwapper` of a replay: the story gives the durations of jobs."""

    host: int | None = None

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        """There are no bytes."""

    def turn(self, rotation: Rotation) -> None:
        """Nothing to load and store."""


def carry_nothing(kv: KvCache) -> KvSwapper:
    """Return a swapper without transfers, for a device that replays a story."""
    return _Nothing()
