"""Protocol for swapping KV of rotating layers between device and host.

Implemented by `LinkSwapper` (CPU), `EventSwapper` (GPU) and the simulator; tensor-parallel groups
have none. The engine calls it between jobs only; copies are made within jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ballast.core.link import Direction
from ballast.core.rotation import Rotation
from ballast.kv.blocks import KvCache


class KvSwapper(Protocol):
    """Swapper of one model's KV. Its methods are called between the model's jobs; during jobs it
    loads and stores the KV that they need.

    Invariant: between jobs the host has all KV of layers that rotate.
    """

    @property
    def host(self) -> int | None:
        """Offset from a device KV address to its host copy; None: no memory is behind either
        (virtual time)."""

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        """Set the copies of the next job, which computes nothing: all KV of `slabs` in `layers`."""

    def turn(self, rotation: Rotation) -> None:
        """Put `rotation` in force from the next job on."""


MakeSwapper = Callable[[KvCache], KvSwapper]
