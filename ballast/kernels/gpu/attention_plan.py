"""Plan the work items of paged attention on a GPU for one job, as arrays made on the host.

Used by `GpuBatch`; also defines the buckets of jobs that one CUDA graph serves.

A *tile* is some rows of one sequence that go through its KV cache together. Sequences with few new
tokens (decodes) have one tile each, cut at multiples of `SPLIT` keys into *items* that run side by
side and are merged; sequences with more are cut into tiles that each are one item. Where an item
begins and ends follows from positions alone, not from the batch around it, so that neither changes
the order of a decode's sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ballast.core.errors import BrokenPromise

Array = np.ndarray[Any, Any]

SPLIT = 256
"""Keys of an item of a tile that is cut; a multiple of every number of keys loaded at once."""
FEW_ROWS = 16
"""Rows (new tokens times heads sharing a KV head) up to which a tile is cut by its keys: the
minimum of a matrix instruction."""
MANY_ROWS = 64
"""Rows of a tile of a longer chunk."""

ITEM_FIELDS = 7
"""Fields of an item: start of its block table, first row of the batch, tokens, position of the
first, first key, end of the keys, slot for a partial result (-1: the result is final)."""
MERGE_FIELDS = 4
"""Fields of a merge, for a tile cut into several items: first row of the batch, tokens, first slot,
number of slots."""

_NO_ITEMS: Array = np.empty((0, ITEM_FIELDS), np.int32)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model that decide how its jobs are cut into tiles and items."""

    heads: int
    kv_heads: int
    block_tokens: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def few(self) -> int:
        """Bound of the new tokens of a sequence whose tile is cut by its keys."""
        return max(1, FEW_ROWS // self.group)

    @property
    def tile(self) -> int:
        """Tokens of a longer chunk's tile."""
        return max(1, MANY_ROWS // self.group)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Capacities of a job's arrays; one CUDA graph serves all jobs of a bucket.

    `tokens`: rows; `wanted`: rows whose output is needed; `blocks`: entries of all block tables;
    `decodes`: every sequence has one new token; `adapters`: number of the model's adapters if some
    row uses one, else 0.
    """

    sequences: int
    tokens: int
    wanted: int
    blocks: int
    decodes: bool = False
    adapters: int = 0

    @classmethod
    def decode(cls, sequences: int, blocks: int, adapters: int = 0) -> Bucket:
        """Return the bucket of a decode-only job: `sequences` and total `blocks`, rounded up."""
        n = round_up(sequences)
        return cls(n, n, n, round_up(blocks, 1024), True, adapters)

    @classmethod
    def holding(cls, counts: Sequence[int], wanted: int, blocks: int, adapters: int = 0) -> Bucket:
        """Return the bucket of a job with prefills: every capacity is rounded up by itself."""
        return cls(
            round_up(len(counts)),
            round_up(sum(counts), 16),
            round_up(wanted),
            round_up(blocks, 1024),
            adapters=adapters,
        )

    def items(self, shape: AttentionShape) -> int:
        """Return the bound of items of cut tiles: full ones, and one remainder per sequence."""
        return self.sequences + self.blocks * shape.block_tokens // SPLIT

    def tiles(self, shape: AttentionShape) -> int:
        """Return the bound of tiles of longer chunks."""
        return self.sequences + self.tokens // shape.tile

    @property
    def adapted_rows(self) -> int:
        """Most rows of a tile of rows that go through one adapter."""
        return FEW_ROWS if self.decodes else MANY_ROWS

    def adapted_tiles(self, rows: int) -> int:
        """Most tiles of so many rows: full ones, and what is left of each adapter's."""
        return min(rows, rows // self.adapted_rows + self.adapters)


def round_up(n: int, least: int = 1) -> int:
    """Round up to a power of two, at least `least`; above 16 also to numbers half-way between two.

    So no bucket is more than 1.5 times as large as necessary.
    """
    power = max(least, 1 << max(0, n - 1).bit_length())
    half_way = power // 4 * 3
    return half_way if power > max(16, least) and n <= half_way else power


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Arrays of one job, int32 unless stated otherwise. T rows, N sequences.

    `positions`: of each row in its sequence. `slots`: of each row, its block times block_tokens
    plus its place in it. `bounds` (N + 1): where each sequence's rows begin. `lengths`: keys of
    each sequence, its new tokens' included. `tables`: block tables one after the other, from
    `table_bounds` (N + 1). `few`, `many` (items, ITEM_FIELDS), `merges` (N, MERGE_FIELDS).
    """

    positions: Array
    slots: Array
    bounds: Array
    lengths: Array
    tables: Array
    table_bounds: Array
    few: Array
    many: Array
    merges: Array


def plan(
    shape: AttentionShape,
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
) -> AttentionPlan:
    """Plan a job: `counts[i]` new tokens of sequence i from position `starts[i]`, in the blocks
    `tables[i]`.

    The blocks cover all positions up to the last new one; a window's may be any before it. Raises
    BrokenPromise where they do not.
    """
    start, count = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    sizes = np.array([len(t) for t in tables], np.int64)
    lengths = start + count
    if not len(count) == len(start) == len(sizes) or not len(count):
        raise BrokenPromise("as many starts, counts and tables as sequences, at least one")
    broken = (count < 1) | (start < 0) | (lengths > sizes * shape.block_tokens)
    for i in np.nonzero(broken)[0].tolist():
        raise BrokenPromise(
            f"{counts[i]} tokens from position {starts[i]} do not fit into {sizes[i]} blocks"
        )
    flat = np.fromiter(chain.from_iterable(tables), np.int32, sizes.sum())
    bounds, table_bounds = _bounds(count), _bounds(sizes)
    first, table = bounds[:-1], table_bounds[:-1]
    if len(count) == bounds[-1]:  # a row of each
        positions, at = start, table + start // shape.block_tokens
    else:
        positions = np.arange(bounds[-1]) - np.repeat(first - start, count)
        at = np.repeat(table, count) + positions // shape.block_tokens
    slots = flat[at].astype(np.int64) * shape.block_tokens + positions % shape.block_tokens
    few = count <= shape.few
    if few.all():
        items, merges = _cut(start, count, lengths, first, table)
        tiles = _NO_ITEMS
    else:
        items, merges = _cut(start[few], count[few], lengths[few], first[few], table[few])
        tiles = _tiles(shape.tile, start[~few], count[~few], first[~few], table[~few])
    return AttentionPlan(
        positions,
        slots.astype(np.int32),
        bounds.astype(np.int32),
        lengths.astype(np.int32),
        flat,
        table_bounds.astype(np.int32),
        items,
        tiles,
        merges,
    )


def _cut(
    start: Array, count: Array, lengths: Array, rows: Array, tables: Array
) -> tuple[Array, Array]:
    """Return the items and merges of sequences that are one tile each."""
    pieces = (lengths + SPLIT - 1) // SPLIT
    alone = pieces == 1
    slots = _bounds(np.where(alone, 0, pieces))[:-1]
    # Of each item its tile, and its number among the tile's.
    of = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of]
    items = np.empty((len(of), ITEM_FIELDS), np.int32)
    items[:, 0] = tables[of]
    items[:, 1] = rows[of]
    items[:, 2] = count[of]
    items[:, 3] = start[of]
    items[:, 4] = number * SPLIT
    items[:, 5] = np.minimum((number + 1) * SPLIT, lengths[of])
    items[:, 6] = np.where(alone[of], -1, slots[of] + number)
    merges = np.stack([rows, count, slots, pieces], axis=1)[~alone]
    return items, merges.astype(np.int32)


def _tiles(tokens: int, start: Array, count: Array, rows: Array, tables: Array) -> Array:
    """Return the items of sequences of several tiles; those with most keys, the longest, first."""
    pieces = (count + tokens - 1) // tokens
    first = (np.arange(pieces.sum()) - np.repeat(_bounds(pieces)[:-1], pieces)) * tokens

    def spread(of: Array) -> Array:
        return np.repeat(of, pieces)

    n = np.minimum(spread(count) - first, tokens)
    position = spread(start) + first
    zero = np.zeros_like(n)
    items = np.stack(
        [spread(tables), spread(rows) + first, n, position, zero, position + n, zero - 1], axis=1
    )
    return items[np.argsort(-items[:, 5], kind="stable")].astype(np.int32)


def _bounds(sizes: Array) -> Array:
    """Return the offsets of consecutive parts of these sizes, and the end: int64 (n + 1)."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds
