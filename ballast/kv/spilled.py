"""Hold the host copy of a layer-major KV cache, and list the pieces that each pass copies.

Used by `LinkSwapper` and `EventSwapper`, which make the copies; nothing is copied here.
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

    def loads(self, work: Sequence[SequenceWork]) -> list[Piece]:
        """Return the pieces that a pass reads of each layer: blocks that have KV."""
        return self._blocks(self._read(work))

    def stores(self, work: Sequence[SequenceWork]) -> list[Piece]:
        """Return the pieces of each layer that a pass copies back to the host."""
        if self._dirty:
            return list(self._rows(work))
        size = self.layout.block_tokens
        written = {b for w in work for b in w.blocks[w.start // size : ceil_div(w.end, size)]}
        return self._blocks(self._read(work) | written)

    def planes(self, slabs: Iterable[int]) -> list[Piece]:
        """Return all of a layer's KV in these slabs, as pieces."""
        size = self.layout.plane_bytes
        return list(_joined((slab * size, size) for slab in slabs))

    def copies(self, layer: int, pieces: Iterable[Piece], direction: Direction) -> Iterator[Copy]:
        first = self._kv.base + layer * self.layout.layer_stride_bytes
        for at, n_bytes in pieces:
            here, there = first + at, first + at + self.host
            if direction is Direction.TO_DEVICE:
                yield Copy(here, there, n_bytes)
            else:
                yield Copy(there, here, n_bytes)

    def plane_address(self, layer: int, plane: int) -> int:
        """Return the host address of a layer's part of a slab."""
        at = layer * self.layout.layer_stride_bytes + plane * self.layout.plane_bytes
        return self._kv.base + self.host + at

    def clear(self) -> None:
        """Return the host memory to the operating system; contents are lost."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _read(self, work: Sequence[SequenceWork]) -> set[int]:
        size = self.layout.block_tokens
        return {b for w in work for b in w.blocks[: ceil_div(w.start, size)]}

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
