"""Compute attention over a paged KV cache on CPU, for decodes and prefill chunks together.

Used by the CPU models. One `PagedBatch` per job prepares tables that all layers share; per layer,
`write` stores the new keys and values in their blocks and `attend` reads the blocks in place. It
neither allocates nor moves blocks: tables come with the job. Queries of a chunk see the cached
prefix and, causally, the chunk itself, as far back as a window reaches. float32 and bfloat16, over
KV of int8 as well (`kv_int8_code`), grouped-query attention, soft-capped scores, float32
accumulation. `attend_tables` prepares all layers at once, for a caller that runs the kernel as one
operation among others.

The layout, and the term *block*, are those of `kv/layout.py`: (blocks, layers, 2, block_tokens,
kv_heads, head_dim), with a stride of its own between blocks; in int8 a token's heads are
followed by their scales.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.model import KV_SCALE_BYTES
from ballast.kernels import attention_code, team
from ballast.kernels import attention_table as fields
from ballast.kernels.attention import AttentionParams
from ballast.kernels.attention_table import NO_WINDOW as NO_WINDOW

Array = np.ndarray[Any, Any]

TILE_ROWS = 32
"""Rows (query tokens times heads sharing a KV head) that go through the KV cache together."""
ITEM_ROWS = 64
"""Rows of an item over all its heads; more would not fit in the L1 cache."""
ITEMS_PER_THREAD = 2
"""Target number of items per thread."""
WRITE_TOKENS = 32
"""Tokens written per item."""
ALONE = 1 << 15
"""Elements up to which the calling thread writes alone: waking others would cost more."""
WRITTEN: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.bfloat16,),
    torch.int8: (torch.float32, torch.bfloat16),
}
"""Dtypes of the keys and values that are written into KV of a dtype."""


@dataclass(frozen=True, slots=True)
class KvArray:
    """Address and layout of a model's KV cache; never touches its memory.

    `base`: address; `block_stride`: elements from a block to the next.
    """

    base: int
    block_stride: int
    n_layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    offsets: tuple[int, ...] = ()
    """Bytes from `base` to K of each layer in block 0; empty: layers lie one after the other."""
    latent: bool = False
    """Whether a token's V is the beginning of its K, which alone is kept."""
    groups: tuple[int, ...] = ()
    """Group of each layer, whose blocks hold it; empty: all layers are in each block."""
    n_groups: int = 1

    @property
    def scales(self) -> int:
        """Bytes from a token's K to the scales of its heads; 0: it has none."""
        return self.kv_heads * self.head_dim if self.dtype == torch.int8 else 0

    @property
    def token(self) -> int:
        """Elements from a token's K to the next token's."""
        scales = KV_SCALE_BYTES * self.kv_heads if self.scales else 0
        return self.kv_heads * self.head_dim + scales

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one block."""
        return (2 - self.latent) * self.block_tokens * self.token * self.dtype.itemsize

    @property
    def values(self) -> int:
        """Elements from a token's K to its V."""
        return 0 if self.latent else self.block_tokens * self.token

    def layer_address(self, layer: int) -> int:
        """Return the address of K of a layer in block 0."""
        return self.base + (self.offsets[layer] if self.offsets else layer * self.layer_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlaces:
    """Places of blocks that lie elsewhere in each layer than whole blocks do (`kv/staged.py`)."""

    blocks: tuple[int, ...]
    """Their numbers in block tables; all that are below zero are among them."""
    offsets: Array
    """Bytes from block 0 to each layer's K of each, int64 (layers, blocks); also backwards."""
    unit: int
    """Bytes that divide all offsets, the stride of blocks and that of layers."""

    def tables(self, tables: Array, stride: int, layer_bytes: int, n_layers: int) -> Array:
        """Return the block tables of each layer, in units from block 0: int32 (layers, entries).

        `stride`: bytes from a block to the next; `layer_bytes`: of a layer's part of a block."""
        if (stride | layer_bytes) % self.unit:
            raise BrokenPromise(f"blocks of {stride} bytes are not in units of {self.unit}")
        layers = np.arange(n_layers, dtype=np.int64)[:, None] * (layer_bytes // self.unit)
        found = tables.astype(np.int64) * (stride // self.unit) + layers
        away = np.flatnonzero(np.isin(tables, self.blocks))
        order = np.argsort(self.blocks)
        which = order[np.searchsorted(np.asarray(self.blocks)[order], tables[away])]
        found[:, away] = (self.offsets // self.unit)[:, which]
        if found.size and not -(1 << 31) <= found.min() <= found.max() < 1 << 31:
            raise BrokenPromise(f"{found.max()} units of {self.unit} bytes exceed a block table")
        return found.astype(np.int32)

    def beside(self, other: LayerPlaces) -> LayerPlaces:
        """Return the places of both; no block is in both."""
        offsets = np.hstack([self.offsets, other.offsets])
        return LayerPlaces(self.blocks + other.blocks, offsets, gcd(self.unit, other.unit))


class PagedBatch:
    """The sequences of one job: `counts[i]` new tokens of sequence i, from position `starts[i]`.

    The batch's rows are these tokens in order, T = sum(counts). `tables[i]` are the blocks of
    sequence i, which cover positions 0 .. starts[i] + counts[i] - 1; in turn of each group, if the
    KV has several. Raises BrokenPromise if they do not.
    """

    def __init__(
        self,
        kv: KvArray,
        heads: int,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[int]],
        places: LayerPlaces | None = None,
    ) -> None:
        """`places`: of blocks that only earlier positions have, and that are read alone."""
        self.kv = kv
        self.heads = heads
        self.n_tokens = sum(counts)
        group = heads // kv.kv_heads
        self.tables = np.concatenate([np.asarray(t, np.int32) for t in tables])
        if kv.n_groups > 1:
            self.tables = np.ascontiguousarray(self.tables.reshape(-1, kv.n_groups).T)
        """Block tables, one after the other; of each group, (groups, entries), if there are
        several."""
        item, self._layer_tables = kv.dtype.itemsize, None
        """Tables to attend with, in units of `_unit` elements from block 0; None: `tables`."""
        if places is not None:
            sizes_of_blocks = (kv.block_stride * item, kv.layer_bytes, kv.n_layers)
            self._layer_tables = places.tables(self.tables, *sizes_of_blocks)
        self._unit = kv.block_stride if places is None else places.unit // item
        sizes = [len(t) // kv.n_groups for t in tables]
        for start, count, size in zip(starts, counts, sizes, strict=True):
            if count < 1 or start < 0 or start + count > size * kv.block_tokens:
                raise BrokenPromise(
                    f"{count} tokens from position {start} do not fit into {size} blocks"
                )
        per_tile = max(1, TILE_ROWS // group)
        self._attend_tiles = _tiles(starts, counts, sizes, per_tile)
        self._write_tiles = _tiles(starts, counts, sizes, WRITE_TOKENS)
        rows = min(per_tile, max(counts)) * group
        n_threads = torch.get_num_threads()
        self._order, n_slots = _order(self._attend_tiles, n_threads)
        item_heads = _item_heads(len(self._order), kv.kv_heads, rows, n_threads)
        parts = kv.kv_heads // item_heads
        items = len(self._order) * parts
        self._attend = self._table(self._attend_tiles, items)
        self._write = self._table(self._write_tiles, len(self._write_tiles))
        self._workers = min(items, n_threads)
        n_bytes = fields.scratch_bytes(rows, item_heads, kv.head_dim)
        slot_floats = fields.slot_floats(rows, kv.kv_heads, kv.head_dim)
        # PyTorch's, so that a profile run counts it (`ballast.models.profile_run`).
        self._scratch = torch.empty(
            fields.ALIGNMENT + n_threads * n_bytes + 4 * n_slots * slot_floats, dtype=torch.uint8
        )
        scratch = -(-self._scratch.data_ptr() // fields.ALIGNMENT) * fields.ALIGNMENT
        self._pending = np.zeros(len(self._attend_tiles) * parts, np.int64)
        self._attend[fields.MAX_ROWS] = rows
        self._attend[fields.ITEM_HEADS] = item_heads
        self._attend[fields.SCRATCH] = scratch
        self._attend[fields.SCRATCH_BYTES] = n_bytes
        self._attend[fields.SLOTS] = scratch + n_threads * n_bytes
        self._attend[fields.ORDER] = self._order.ctypes.data
        self._attend[fields.PENDING] = self._pending.ctypes.data
        self._writers = 1 if self.n_tokens * kv.kv_heads * kv.head_dim <= ALONE else 1 << 16
        self._tables_at = self.tables.ctypes.data
        # The address of an array costs a microsecond to ask for.
        self._attend_at, self._write_at = self._attend.ctypes.data, self._write.ctypes.data
        self._attend_float64 = self._attend.view(np.float64)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As `Attention.write`."""
        self._check(key, self.kv.kv_heads, WRITTEN[self.kv.dtype])
        if not self.kv.latent:
            self._check(value, self.kv.kv_heads, (key.dtype,))
        table = self._write
        table[fields.NEXT] = 0
        table[fields.KV] = self.kv.layer_address(layer)
        table[fields.TABLES] = self._tables_of(layer)
        table[fields.SOURCE] = key.data_ptr()
        table[fields.SOURCE_TOKEN], table[fields.SOURCE_HEAD] = key.stride()[:2]
        table[fields.VALUE] = value.data_ptr()
        table[fields.VALUE_TOKEN], table[fields.VALUE_HEAD] = value.stride()[:2]
        code = _kernel(f"write_{_NAMES[key.dtype]}")
        team.run(code, self._write_at, min(self._writers, len(self._write_tiles)))

    def attend(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, params: AttentionParams
    ) -> None:
        """As `Attention.attend`; `query` and `out` are of the KV's dtype, or both float32."""
        self._check(query, self.heads, (torch.float32, self.kv.dtype))
        if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
            raise BrokenPromise("attention's output is not like its query, and contiguous")
        table = self._attend
        table[fields.NEXT] = table[fields.WORKERS] = 0
        if self._layer_tables is None:
            table[fields.KV] = self.kv.layer_address(layer)
            table[fields.TABLES] = self._tables_of(layer)
        else:
            table[fields.KV], table[fields.BLOCK_STRIDE] = self.kv.base, self._unit
            table[fields.TABLES] = self._layer_tables[layer].ctypes.data
        table[fields.SOURCE] = query.data_ptr()
        table[fields.SOURCE_TOKEN], table[fields.SOURCE_HEAD] = query.stride()[:2]
        table[fields.TARGET] = out.data_ptr()
        table[fields.WINDOW] = NO_WINDOW if params.window is None else params.window
        self._attend_float64[fields.SCALE] = params.scale
        self._attend_float64[fields.SOFTCAP] = params.softcap or 0.0
        own = None if params.sinks is None else params.sinks.float().contiguous()
        if own is not None and own.shape != (self.heads,):
            raise BrokenPromise(f"{tuple(own.shape)} sinks for {self.heads} heads")
        table[fields.SINKS] = 0 if own is None else own.data_ptr()
        team.run(_attend_kernel(query.dtype, self.kv.dtype), self._attend_at, self._workers)

    def attend_tables(
        self,
        query: int,
        strides: tuple[int, int],
        out: int,
        dtype: torch.dtype,
        scale: float | Array,
        window: int | Array = NO_WINDOW,
        softcap: float | Array = 0.0,
    ) -> tuple[int, Array]:
        """Return (kernel address, int64 (layers, N_FIELDS)), to `attend` in every layer later.

        Row l is the kernel's argument for layer l; up to `torch.get_num_threads()` (as of when the
        batch was made) threads may call the kernel with it at the same time, one layer after the
        other, and each row once: its counters `NEXT` and `WORKERS` have to be 0 before. The batch
        has to live until then. `query` and `out`: addresses of (T, heads, head_dim) of `dtype`, the
        same for all layers; `strides`: elements from a token, and from a head, of the queries to
        the next; `out` is contiguous. `scale`, `window` (`NO_WINDOW`: everything) and `softcap`
        (0: none) are as in `AttentionParams`, of all layers or one by one.
        """
        kv = self.kv
        tables = np.empty((kv.n_layers, fields.N_FIELDS), np.int64)
        tables[:] = self._attend
        tables[:, fields.NEXT] = tables[:, fields.WORKERS] = 0
        if self._layer_tables is None:
            tables[:, fields.KV] = [kv.layer_address(i) for i in range(kv.n_layers)]
            tables[:, fields.TABLES] = [self._tables_of(i) for i in range(kv.n_layers)]
        else:
            row = self._layer_tables.strides[0]
            tables[:, fields.KV], tables[:, fields.BLOCK_STRIDE] = kv.base, self._unit
            tables[:, fields.TABLES] = self._layer_tables.ctypes.data + np.arange(kv.n_layers) * row
        tables[:, fields.SOURCE] = query
        tables[:, fields.SOURCE_TOKEN], tables[:, fields.SOURCE_HEAD] = strides
        tables[:, fields.TARGET] = out
        tables[:, fields.WINDOW] = window
        floats = tables.view(np.float64)
        floats[:, fields.SCALE] = scale
        floats[:, fields.SOFTCAP] = softcap
        return _attend_kernel(dtype, kv.dtype), tables

    def _tables_of(self, layer: int) -> int:
        """Return the address of the block tables of a layer's group."""
        group = self.kv.groups[layer] if self.kv.groups else 0
        return int(self._tables_at + group * self.tables.strides[0] * (self.tables.ndim - 1))

    def _check(self, given: torch.Tensor, heads: int, dtypes: Sequence[torch.dtype]) -> None:
        shape = (self.n_tokens, heads, self.kv.head_dim)
        if given.shape != shape or given.dtype not in dtypes or given.stride(2) != 1:
            raise BrokenPromise(
                f"attention got {given.dtype} {tuple(given.shape)} {given.stride()}; "
                f"the batch is {self.kv.dtype} {shape}"
            )

    def _table(self, tiles: Array, items: int) -> Array:
        table = np.zeros(fields.N_FIELDS, np.int64)
        table[fields.ITEMS] = items
        table[fields.TILES] = tiles.ctypes.data
        table[fields.TABLES] = self.tables.ctypes.data
        table[fields.BLOCK_STRIDE] = self.kv.block_stride
        table[fields.BLOCK_TOKENS] = self.kv.block_tokens
        table[fields.HEADS] = self.heads
        table[fields.KV_HEADS] = self.kv.kv_heads
        table[fields.HEAD_DIM] = self.kv.head_dim
        table[fields.VALUES] = self.kv.values
        table[fields.TOKEN], table[fields.SCALES] = self.kv.token, self.kv.scales
        return table


def warm_up(dtype: torch.dtype | None = None) -> None:
    """Compile the kernels for a KV cache of `dtype`, or of all, unless Numba's cache has them."""
    for kind in WRITTEN if dtype is None else (dtype,):
        for rows in {torch.float32, kind} - {torch.int8}:
            _attend_kernel(rows, kind)
        for rows in WRITTEN[kind]:
            _kernel(f"write_{_NAMES[rows]}")


def scratch_bytes(heads: int, kv_heads: int, head_dim: int) -> int:
    """Return an upper bound of the scratch bytes that one thread needs to attend."""
    rows = max(TILE_ROWS, heads // kv_heads)
    return fields.scratch_bytes(rows, max(1, ITEM_ROWS // rows), head_dim)


def _order(tiles: Array, threads: int) -> tuple[Array, int]:
    """Return int64 (n, 3), (tile, split or -1, first slot of the tile), and the number of slots.

    The largest come first. A tile is cut into its splits if otherwise one thread might still work
    on it after the others have ended.
    """
    contexts = tiles[:, 1] + tiles[:, 2]
    splits = (contexts + fields.SPLIT - 1) // fields.SPLIT
    work = contexts * tiles[:, 1]
    cut = (work * (ITEMS_PER_THREAD * threads) > work.sum()) & (splits > 1) & (threads > 1)
    pieces = np.where(cut, splits, 1)
    order = np.empty((int(pieces.sum()), 3), np.int64)
    order[:, 0] = np.repeat(np.arange(len(tiles)), pieces)
    ends = np.cumsum(pieces)
    number = np.arange(len(order)) - np.repeat(ends - pieces, pieces)
    order[:, 1] = np.where(np.repeat(cut, pieces), number, -1)
    slots = np.where(cut, splits, 0)
    order[:, 2] = np.repeat(np.cumsum(slots) - slots, pieces)
    by_work = np.argsort(-np.repeat(work // pieces, pieces), kind="stable")
    return order[by_work], int(slots.sum())


def _item_heads(entries: int, kv_heads: int, rows: int, threads: int) -> int:
    """Return the KV heads per item: all, unless items would be too few for the threads or too
    large."""
    for heads in range(min(kv_heads, ITEM_ROWS // rows), 1, -1):
        enough = entries * kv_heads // heads >= ITEMS_PER_THREAD * threads
        if kv_heads % heads == 0 and (enough or threads == 1):
            return heads
    return 1


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
_compiling = threading.Lock()


def _attend_kernel(rows: torch.dtype, kv: torch.dtype) -> int:
    """Return the address of the kernel for queries and output of dtype `rows`."""
    return _kernel(f"attend_{_NAMES[rows]}_over_{_NAMES[kv]}")


def _kernel(name: str) -> int:
    with _compiling:
        return attention_code.address_of(name)


def _tiles(
    starts: Sequence[int], counts: Sequence[int], sizes: Sequence[int], per_tile: int
) -> Array:
    """Return int64 (tiles, 4): first row of the batch, rows, position of the first, table start."""
    tiles: list[tuple[int, int, int, int]] = []
    row = table = 0
    for start, count, size in zip(starts, counts, sizes, strict=True):
        for i in range(0, count, per_tile):
            tiles.append((row + i, min(per_tile, count - i), start + i, table))
        row += count
        table += size
    return np.array(tiles, np.int64).reshape(-1, 4)
