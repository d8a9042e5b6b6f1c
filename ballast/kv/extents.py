"""Locate the bytes of KV blocks: virtual addresses in this process, offsets in device memory.

Used by `Migration` to export a request's KV to another device and to import it. Reads layouts and
mappings only; copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.migration import Piece, joined
from ballast.core.units import ceil_div
from ballast.kv.blocks import KvCache


def form(kv: KvCache) -> str:
    """Return a key that is equal for two KV caches iff their blocks have the same byte format.

    It is made of the model's fingerprint, and the dtypes, shape and bytes of a block."""
    spec, layout = kv.spec, kv.layout
    shape = "x".join(map(str, (*layout.shape, layout.block_bytes, spec.kv_groups)))
    return f"{spec.fingerprint}:{spec.dtype}:{spec.kv_dtype}:{shape}"


def extents(kv: KvCache, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the data of backed blocks, neighbours joined.

    The order is block by block, and layer by layer within a block."""
    base = kv.base
    stride, size = kv.layout.stride_bytes, kv.layout.block_bytes
    return list(joined([(base + b * stride, size) for b in blocks]))


def pieces(kv: KvCache, blocks: Sequence[int]) -> tuple[int, tuple[Piece, ...]]:
    """Return (number of blocks, pieces): the blocks' data as offsets in the device's own memory.

    Stops before the first staged block, or one on borrowed pages; the number counts the blocks
    covered."""
    size, stride = kv.layout.page_bytes, kv.layout.stride_bytes
    found: list[Piece] = []
    for n, block in enumerate(blocks):
        if block < 0 or kv.borrowed.among([block]):
            return n, joined(found)
        at, end = block * stride, block * stride + kv.layout.block_bytes
        for i in range(at // size, ceil_div(end, size)):
            start, stop = max(at, i * size), min(end, (i + 1) * size)
            found.append((kv.book.backing.page_at(start) * size + start - i * size, stop - start))
    return len(blocks), joined(found)
