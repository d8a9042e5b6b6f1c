"""Where the bytes of some blocks lie: at which addresses here, and in which pages, for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ballast.core.migration import Piece, joined
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout


def form(kv: KvCache) -> str:
    """What two caches have in common whose blocks are the same, byte by byte, in this order."""
    spec, shape = kv.spec, "x".join(map(str, kv.layout.shape))
    return f"{spec.fingerprint}:{spec.dtype}:{shape}"


def extents(kv: KvCache, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(address, bytes) of the data of some backed blocks, one block after the other, and of each
    one layer after the other, however they lie."""
    base = kv.base
    return list(joined([(base + at, n_bytes) for b in blocks for at, n_bytes in _of(kv, b)]))


def pieces(kv: KvCache, blocks: Sequence[int]) -> tuple[int, tuple[Piece, ...]]:
    """Where the same lies in the device's own memory: of how many of the blocks, from the first to
    the last before one that has a borrowed page, and the pieces."""
    size = kv.range.page_bytes
    found: list[Piece] = []
    for n, block in enumerate(blocks):
        if kv.lies_abroad([block]):
            return n, joined(found)
        for at, n_bytes in _of(kv, block):
            first, last = at // size, (at + n_bytes - 1) // size
            for i, page in enumerate(kv.range.pages(first, last - first + 1), first):
                start, end = max(at, i * size), min(at + n_bytes, (i + 1) * size)
                found.append((page * size + start - i * size, end - start))
    return len(blocks), joined(found)


def _of(kv: KvCache, block: int) -> Iterator[tuple[int, int]]:
    """(offset in the range, bytes) of a block's data."""
    layout = kv.layout
    if not isinstance(layout, LayeredLayout):
        yield block * layout.stride_bytes, layout.block_bytes
        return
    for layer in range(layout.shape[0]):
        yield (
            layer * layout.layer_stride_bytes + block * layout.stride_bytes,
            layout.layer_bytes,
        )
