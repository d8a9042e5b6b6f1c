"""Hold the bytes of staged blocks in host memory, and list the copies of each pass.

Used by live devices, whose copy engines make the copies; nothing is copied here. The memory is
layer-major: passes read a layer of many blocks at a time, which lie side by side in it, as they do
in slots. Block `-1 - h` is the `h`-th of each layer.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import MiB, ceil_div
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
        n_bytes = ceil_div(max(1, kv.staged.most) * kv.layout.block_bytes, 2 * MiB) * 2 * MiB
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, n_bytes, flags=flags)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """Address of the memory, which is whole huge pages long."""
        self._moves = BlockMoves()
        self._read: list[int] = []
        """Staged blocks that the pass reads in slots."""

    def address(self, block: int, layer: int) -> int:
        """Return the host address of a layer's part of a staged block."""
        at = layer * max(1, self._kv.staged.most) - 1 - block
        return self.base + at * self._layout.layer_bytes

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

    def carry(self, moves: BlockMoves) -> Rotation:
        """Set the moves of the next pass; returns the layers of KV that pass through slots."""
        self._moves, staged = moves, self._kv.staged
        return staged.rotation if moves or staged.blocks else WHOLE

    def begin_pass(self, work: Sequence[SequenceWork]) -> None:
        """Set what the pass reads: it is copied of each layer, beside its moves."""
        coming = {staged for staged, _ in self._moves.homes}
        self._read = [b for b in staged_of([w.blocks for w in work]) if b not in coming]

    def copies_of(self, copy: LayerCopy) -> list[Copy]:
        """Return the bytes of a layer's load or store in the pass that has begun."""
        layer, size = copy.layer, self._layout.layer_bytes
        at = layer * size
        if copy.direction is Direction.TO_HOST:
            stores = ((self.address(h, layer), self._device(b) + at) for b, h in self._moves.stores)
            return list(joined_copies(stores, size))
        slots = self._slots(copy.slot)
        loads = ((to, self.address(h, layer)) for to, h in zip(slots, self._read, strict=True))
        homes = ((self._device(b) + at, self.address(h, layer)) for h, b in self._moves.homes)
        return list(joined_copies(chain(loads, homes), size))

    def clear(self) -> None:
        """Return the memory to the operating system; contents are lost."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _slots(self, slot: int) -> Iterator[int]:
        """Yield the addresses of a slot's parts of the blocks that the pass reads there."""
        n, staged = len(self._read), self._kv.staged
        return (self._kv.base + staged.offset(slot, i, n) for i in range(n))

    def _device(self, block: int) -> int:
        return self._kv.block_address(block)


def joined_copies(pairs: Iterable[tuple[int, int]], size: int) -> Iterator[Copy]:
    """Yield copies of `size` bytes each, (to, from), neighbours in both joined."""
    last: Copy | None = None
    for to, source in pairs:
        if last and (to - last.dst, source - last.src) == (last.n_bytes, last.n_bytes):
            last = Copy(last.dst, last.src, last.n_bytes + size)
        else:
            if last:
                yield last
            last = Copy(to, source, size)
    if last:
        yield last
