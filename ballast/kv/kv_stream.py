"""Define how staged blocks of KV stream between host and device during jobs.

Implemented by the drivers of layer streams: on CPUs, GPUs and in virtual time; tensor-parallel
groups stream no KV. The engine calls it between jobs only; copies are made within jobs.
"""

from __future__ import annotations

from typing import Protocol

from ballast.kv.blocks import KvCache
from ballast.kv.staged import BlockMoves


class KvStream(Protocol):
    """Streams one model's staged blocks: each job reads them layer by layer through slots."""

    def add_staging(self, kv: KvCache) -> None:
        """Stream the staged blocks of this cache. Called once, first."""

    def carry_blocks(self, moves: BlockMoves) -> None:
        """Set what the next job copies beside its work; called before each job of a cache that may
        have staged blocks."""
