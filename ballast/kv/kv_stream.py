"""Define how KV streams between device and host during jobs: rotating layers, or staged blocks.

Implemented by the drivers of layer streams: on CPUs, GPUs and in virtual time; tensor-parallel
groups stream no KV. The engine calls it between jobs only; copies are made within jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ballast.core.link import Direction
from ballast.core.rotation import Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.staged import BlockMoves


class KvStream(Protocol):
    """Streams one model's KV. Its methods are called between the model's jobs; during jobs it loads
    and stores the KV that they need.

    Invariant: between jobs the host has all KV of layers that rotate.
    """

    def add_kv(self, kv: KvCache) -> None:
        """Stream the KV of this layer-major cache. Called once, first."""

    @property
    def kv_host(self) -> int | None:
        """Offset from a device KV address to its host copy; None: no memory is behind either
        (virtual time)."""

    def carry_kv(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        """Set the copies of the next job, which computes nothing: all KV of `slabs` in `layers`."""

    def turn_kv(self, rotation: Rotation) -> None:
        """Put `rotation` in force from the next job on."""


@runtime_checkable
class BlockStream(Protocol):
    """Streams one model's staged blocks: each job reads them layer by layer through slots."""

    def add_staging(self, kv: KvCache) -> None:
        """Stream the staged blocks of this cache. Called once, first, in place of `add_kv`."""

    def carry_blocks(self, moves: BlockMoves) -> None:
        """Set what the next job copies beside its work; called before each job of a cache that may
        have staged blocks."""
