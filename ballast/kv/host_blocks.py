"""Hold the bytes of staged blocks in host memory, and list the copies of each pass.

Used by live devices, whose copy engines make the copies; nothing is copied here. Block `-1 - h` is
the `h`-th of the memory, and lies there as on the device: block-major, its layers one after the
other.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.blocks import KvCache
from ballast.kv.staged import BlockMoves, staged_of
from ballast.memory.copies import Copy
from ballast.residency.buffer import LayerCopy

_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which `mmap` has from Python 3.13 on."""


class HostBlocks:
    """Memory of one cache's staged blocks, allocated on first write, and the copies of one pass."""

    def __init__(self, kv: KvCache) -> None:
        self._kv, self._layout = kv, kv.layout
        n_bytes = max(1, kv.staged.most) * kv.layout.block_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, n_bytes, flags=flags)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._moves = BlockMoves()
        self._read: list[int] = []
        """Staged blocks that the pass reads in slots."""

    def address(self, block: int) -> int:
        """Return the host address of a staged block."""
        return self._base + (-1 - block) * self._layout.block_bytes

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        """Return where a pass that computes `work` finds staged blocks; None: it reads none."""
        blocks, homes = staged_of([w.blocks for w in work]), dict(self._moves.homes)
        if not blocks:
            return None
        layout, staged = self._layout, self._kv.staged
        read = [b for b in blocks if b not in homes]
        slots, layers = range(staged.slots), np.arange(layout.shape[0])
        of_slot = [[staged.offset(s, i, len(read)) for i in range(len(read))] for s in slots]
        there = np.array(list(homes.values()), np.int64) * layout.stride_bytes
        offsets = np.hstack(
            [
                np.array(of_slot, np.int64)[layers % staged.slots],
                there + layers[:, None] * layout.layer_bytes,
            ]
        )
        return LayerPlaces((*read, *homes), offsets, staged.unit)

    def carry(self, moves: BlockMoves) -> None:
        """Set the moves of the next pass."""
        self._moves = moves

    def begin_pass(self, work: Sequence[SequenceWork]) -> None:
        """Set what the pass reads: it is copied of each layer, beside its moves."""
        coming = {staged for staged, _ in self._moves.homes}
        self._read = [b for b in staged_of([w.blocks for w in work]) if b not in coming]

    def copies_of(self, copy: LayerCopy) -> list[Copy]:
        """Return the bytes of a layer's load or store in the pass that has begun."""
        layout, layer = self._layout, copy.layer
        at, size = layer * layout.layer_bytes, layout.layer_bytes
        if copy.direction is Direction.TO_HOST:
            pairs = self._moves.stores
            return [Copy(self.address(h) + at, self._device(b) + at, size) for b, h in pairs]
        found = list(self._loads(copy.slot, at))
        found += [
            Copy(self._device(b) + at, self.address(h) + at, size) for h, b in self._moves.homes
        ]
        return found

    def clear(self) -> None:
        """Return the memory to the operating system; contents are lost."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _loads(self, slot: int, at: int) -> Iterable[Copy]:
        staged, base, size = self._kv.staged, self._kv.base, self._layout.layer_bytes
        for i, block in enumerate(self._read):
            to = base + staged.offset(slot, i, len(self._read))
            yield Copy(to, self.address(block) + at, size)

    def _device(self, block: int) -> int:
        return self._kv.block_address(block)
