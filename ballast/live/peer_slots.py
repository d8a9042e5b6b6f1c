"""Copy borrowed KV into slots of a device, layer by layer, for passes that read it there.

SwiftCache's way (3.2, 3.3), as an arm of comparisons: `in_place_reads` has passes read it where it
lies, for which nothing is copied. A pass reads layer `i` in slot `i % SLOTS`::

    slot 0     | b0 | b1 | b2 |  ...  |     layers 0, 2, 4, ...
    slot 1     | b0 | b1 | b2 |  ...  |     layers 1, 3, 5, ...

Full blocks alone are copied, since these never change; what a pass writes, and what has no room, it
reads in place. The link between devices makes the copies at its pace (`paced_reads`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from math import gcd

import numpy as np

from ballast.core.job import SequenceWork
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.blocks import KvCache
from ballast.kv.host_blocks import joined_copies
from ballast.kv.staged import SLOTS
from ballast.memory.copies import Copy


class PeerSlots:
    """Slots of one executor, for the blocks that one pass at a time reads as copies."""

    def __init__(self, kv: KvCache, n_bytes: int) -> None:
        """`n_bytes` of both slots together."""
        self._kv, self._layout = kv, kv.layout
        self._slot_bytes = n_bytes // SLOTS // mmap.PAGESIZE * mmap.PAGESIZE
        self.room = self._slot_bytes // kv.layout.layer_bytes
        """Blocks that a pass can read as copies."""
        self._memory = mmap.mmap(-1, max(1, SLOTS * self._slot_bytes))
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._blocks: list[int] = []

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        """Return where a pass that computes `work` reads copies; None: it reads none."""
        blocks, layout = self._chosen(work), self._layout
        if not blocks:
            return None
        layers = range(layout.shape[0])
        there = [[self._address(layer, i) for i in range(len(blocks))] for layer in layers]
        offsets = np.array(there, np.int64) - self._kv.base
        unit = gcd(layout.stride_bytes, layout.layer_bytes, mmap.PAGESIZE)
        return LayerPlaces(tuple(blocks), offsets, unit)

    def begin_pass(self, work: Sequence[SequenceWork]) -> int:
        """Begin the pass of `work`; returns the number of blocks that it reads as copies."""
        self._blocks = self._chosen(work)
        return len(self._blocks)

    def copies(self, layer: int) -> Sequence[Copy]:
        """Return the copies of a layer of the pass that has begun."""
        size = self._layout.layer_bytes
        pairs = (
            (self._address(layer, i), self._kv.block_address(block) + layer * size)
            for i, block in enumerate(self._blocks)
        )
        return list(joined_copies(pairs, size))

    def _chosen(self, work: Sequence[SequenceWork]) -> list[int]:
        return self._kv.borrowed.read_alone([(w.blocks, w.start) for w in work])[: self.room]

    def _address(self, layer: int, index: int) -> int:
        """Return the address of a layer of the block with this index among those of the pass."""
        return self._base + layer % SLOTS * self._slot_bytes + index * self._layout.layer_bytes


def peer_slots(kv: KvCache, n_bytes: int) -> PeerSlots | None:
    """Return slots of `n_bytes` for a model's borrowed KV; None: it is read in place, as is all KV
    whose blocks are not cut into equal layers."""
    spec = kv.spec
    if not n_bytes or spec.states or spec.layer_kv or spec.kv_groups > 1:
        return None
    return PeerSlots(kv, n_bytes)
