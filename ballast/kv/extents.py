"""Locate the bytes of KV blocks: virtual addresses in this process, offsets in device memory.

Used by `Migration` to export a request's KV to another device and to import it. Reads layouts and
mappings only; copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ballast.core.migration import Piece, joined
from ballast.core.units import ceil_div
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout


def form(kv: KvCache) -> str:
    """Return a key that is equal for two KV caches iff their blocks have the same byte format.

    It is made of the model's fingerprint, the dtype and the shape of a block."""
    spec, shape = kv.spec, "x".join(map(str, kv.layout.shape))
    return f"{spec.fingerprint}:{spec.dtype}:{shape}"


def extents(kv: KvCache, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the data of backed blocks, neighbours joined.

    The order is block by block, and layer by layer within a block, in both layouts."""
    base = kv.base
    return list(joined([(base + at, n_bytes) for b in blocks for at, n_bytes in _of(kv, b)]))


def pieces(kv: KvCache, blocks: Sequence[int]) -> tuple[int, tuple[Piece, ...]]:
    """Return (number of blocks, pieces): the blocks' data as offsets in the device's own memory.

    Stops before the first staged block, or one on borrowed pages; the number counts the blocks
    covered."""
    size = kv.layout.page_bytes
    found: list[Piece] = []
    for n, block in enumerate(blocks):
        if block < 0 or kv.lies_abroad([block]):
            return n, joined(found)
        for at, n_bytes in _of(kv, block):
            for i in range(at // size, ceil_div(at + n_bytes, size)):
                start, end = max(at, i * size), min(at + n_bytes, (i + 1) * size)
                found.append((kv.page_at(start) * size + start - i * size, end - start))
    return len(blocks), joined(found)


def _of(kv: KvCache, block: int) -> Iterator[tuple[int, int]]:
    """Yield (offset in the cache's addresses, bytes) of a block's data."""
    layout = kv.layout
    if not isinstance(layout, LayeredLayout):
        yield block * layout.stride_bytes, layout.block_bytes
        return
    for layer in range(layout.shape[0]):
        yield (
            layer * layout.layer_stride_bytes + block * layout.stride_bytes,
            layout.layer_bytes,
        )
