"""KV of rotating layers in virtual time: how long jobs take that load and store it.

A job has so much of the link as of the device's compute, so that jobs on several lanes together
never move more than it carries; a job that has all of the compute has all of it. What weights move
meanwhile does not slow its loads and stores, nor they that. Blocks that sequences of a job have in
common count for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.link import Direction, LinkRates
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.swapping import swapped_seconds
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout
from ballast.kv.swapper import KvSwapper


class SimSwapper:
    """Implements `KvSwapper`. `dirty`: of a layer only what a job has written is stored."""

    host: int | None = None

    def __init__(self, kv: KvCache, rates: LinkRates, dirty: bool) -> None:
        assert isinstance(kv.layout, LayeredLayout)
        self._plane_bytes = kv.layout.plane_bytes
        self._n_layers = kv.spec.n_layers
        self._token_bytes = kv.spec.kv_bytes_per_token // kv.spec.n_layers
        self._rates, self._dirty = rates, dirty
        self._rotation = WHOLE
        self.carrying = 0.0
        """Seconds of the next job that computes nothing."""

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        n_bytes = len(layers) * len(slabs) * self._plane_bytes
        self.carrying = n_bytes / self._rates.of(direction, mixed=False)

    def turn(self, rotation: Rotation) -> None:
        self._rotation = rotation

    def stall(self, seconds: float, read: int, written: int, share: float = 1.0) -> float:
        """Seconds more of a job that takes so many alone: it reads and writes KV of such numbers
        of tokens, with such a share of the link."""
        if self._rotation == WHOLE:
            return 0.0
        stored = written if self._dirty else read + written
        return (
            swapped_seconds(
                self._n_layers,
                self._rotation,
                seconds,
                read * self._token_bytes,
                stored * self._token_bytes,
                self._rates.part(share),
            )
            - seconds
        )


class SimSwappers:
    """Of a device's models, by name."""

    def __init__(self, rates: LinkRates, dirty: bool) -> None:
        self._rates, self._dirty = rates, dirty
        self._swappers: dict[str, SimSwapper] = {}

    def make(self, kv: KvCache) -> SimSwapper:
        swapper = SimSwapper(kv, self._rates, self._dirty)
        self._swappers[kv.spec.name] = swapper
        return swapper

    def carrying(self, model: str) -> float:
        """Seconds of its job that computes nothing."""
        return self._swappers[model].carrying

    def stall(
        self, model: str, seconds: float, read: int, written: int, share: float = 1.0
    ) -> float:
        """As of `SimSwapper`; 0 of a model that has none."""
        swapper = self._swappers.get(model)
        return 0.0 if swapper is None else swapper.stall(seconds, read, written, share)


class _Nothing:
    """Implements `KvSwapper` where the story says how long jobs take."""

    host: int | None = None

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        """There are no bytes."""

    def turn(self, rotation: Rotation) -> None:
        """Nothing to load and store."""


def carry_nothing(kv: KvCache) -> KvSwapper:
    """For a device that replays."""
    return _Nothing()
