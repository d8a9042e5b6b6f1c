"""Hold the host copy of a layer-major KV cache, and list the bytes that each pass copies.

Used by live devices, whose copy engines make the copies; nothing is copied here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence

from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.units import ceil_div
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout
from ballast.memory.copies import Copy
from ballast.residency.buffer import HOME, LayerCopy

_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which `mmap` has from Python 3.13 on."""

Piece = tuple[int, int]
"""(offset in a layer's part of the cache, bytes)."""


class Spilled:
    """Host copy of a KV cache: as many addresses, in the same order; memory is allocated on first
    write."""

    def __init__(self, kv: KvCache, dirty: bool) -> None:
        """`dirty`: a pass stores only the KV that it has written; else whole blocks, those it
        loads and those it writes."""
        layout = kv.layout
        assert isinstance(layout, LayeredLayout)
        self.layout, self._kv, self._dirty = layout, kv, dirty
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, kv.addresses.n_bytes, flags=flags)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) - kv.base
        """Offset from a device KV address to its host copy."""
        self._loads: list[Piece] = []
        self._stores: list[Piece] = []
        """Pieces that the pass loads and stores of each layer."""
        self._moved: list[Piece] = []

    def begin_pass(self, work: Sequence[SequenceWork]) -> None:
        """Set what is copied of each layer: loads of all blocks that have KV, stores of what the
        pass leaves behind."""
        size = self.layout.block_tokens
        read = {b for w in work for b in w.blocks[: ceil_div(w.start, size)]}
        self._loads = self._blocks(read)
        if self._dirty:
            self._stores = list(self._rows(work))
        else:
            ends = (w.blocks[w.start // size : ceil_div(w.end, size)] for w in work)
            self._stores = self._blocks(read.union(*ends))

    def carry(self, slabs: Iterable[int]) -> None:
        """Set what is moved of each layer that begins or ceases to rotate: all KV of `slabs`."""
        size = self.layout.plane_bytes
        self._moved = list(_joined((slab * size, size) for slab in slabs))

    def copies_of(self, copy: LayerCopy) -> list[Copy]:
        """Return the bytes of a copy in the pass that has begun, or of a move."""
        way = copy.direction
        pieces = self._loads if way is Direction.TO_DEVICE else self._stores
        cut = self._cut(copy.layer, self._moved if copy.slot == HOME else pieces)
        first, host = self._kv.base + copy.layer * self.layout.layer_stride_bytes, self.host
        if way is Direction.TO_DEVICE:
            return [Copy(first + at, first + at + host, n) for at, n in cut]
        return [Copy(first + at + host, first + at, n) for at, n in cut]

    def host_address(self, layer: int, at: int) -> int:
        """Return the host address of byte `at` of a layer's part of the cache."""
        return self._kv.base + self.host + layer * self.layout.layer_stride_bytes + at

    def clear(self) -> None:
        """Return the host memory to the operating system; contents are lost."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _cut(self, layer: int, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """Return the pieces of a layer as they are copied one by one."""
        return pieces

    def _blocks(self, blocks: Iterable[int]) -> list[Piece]:
        stride, size = self.layout.stride_bytes, self.layout.layer_bytes
        return list(_joined(((b * stride, size) for b in sorted(blocks)), stride - size))

    def _rows(self, work: Sequence[SequenceWork]) -> Iterator[Piece]:
        """Yield the pieces of the new tokens' keys and values."""
        layout = self.layout
        half, size = layout.layer_bytes // 2, layout.block_tokens
        row = half // size
        for w in work:
            for i in range(w.start // size, ceil_div(w.end, size)):
                first, end = max(w.start - i * size, 0), min(w.end - i * size, size)
                at = w.blocks[i] * layout.stride_bytes + first * row
                yield at, (end - first) * row
                yield at + half, (end - first) * row


def _joined(pieces: Iterable[Piece], gap: int = 0) -> Iterator[Piece]:
    """Join ascending pieces that are at most `gap` bytes apart."""
    last: Piece | None = None
    for at, n_bytes in pieces:
        if last is not None and at - sum(last) <= gap:
            last = last[0], at + n_bytes - last[0]
        else:
            if last is not None:
                yield last
            last = at, n_bytes
    if last is not None:
        yield last
