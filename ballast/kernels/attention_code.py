"""Compute paged attention on CPU: the compiled kernels that each thread of a team runs.

Used by `paged_attention.py` only. Kernels take one argument, the address of a table of int64
(`attention_table.py`). Threads share work through an atomic counter in it, so any number of them
may call one kernel on one table at the same time.

*Attend*: a tile is some query tokens of one sequence; its rows, for each KV head, are these tokens
times the query heads that share it. An item is a tile, some KV heads, and the whole context of the
tile or one *split* of it: `SPLIT` tokens from a multiple of it on. Where a tile's splits are items
of their own, each leaves its sums in memory, and the thread that comes to the end last merges them.
Within a split, `CHUNK` tokens at a time: scores of all rows and heads, softmax, sums of values. K
and V are read in place and widened in registers; heads lie side by side in a block, and so a few
tokens at a time go through all heads of the item, close to the order of addresses.

A row's result depends on its own sequence alone, and sums are taken in an order that depends on
positions alone: each dot product lane by lane and then across the lanes as a fixed tree, values
token by token, splits from first to last. Tokens that a row does not see add nothing, exactly. So
neither the batch around it, nor the chunk it is in, nor where its blocks lie, nor how its context
is cut into items, nor the number of threads changes a bit of it: whichever of the inner loops below
computes it, and whether K and V are widened in registers or (for many rows) into a buffer first.
All code is compiled without leave to reorder.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ballast.kernels import (
    attention_intrinsics,
    attention_steps_code,
    attention_table,
    intrinsics,
    kv_int8_code,
    vector_code,
)
from ballast.kernels.attention_intrinsics import exp, float64_field, soft_cap
from ballast.kernels.attention_steps_code import (
    MASKED,
    ONE,
    ZERO,
    add_values_in_place,
    add_values_staged,
    clear,
    copy_sums,
    is_staged_code,
    merge,
    scale_tokens,
    scores_in_place,
    scores_staged,
    softmax,
    token_offsets,
    widen_row,
    widen_tokens,
)
from ballast.kernels.attention_table import (
    BLOCK_STRIDE,
    BLOCK_TOKENS,
    CHUNK,
    HEAD_DIM,
    HEADS,
    ITEM_HEADS,
    ITEMS,
    KV,
    KV_HEADS,
    MAX_ROWS,
    NEXT,
    ORDER,
    PENDING,
    SCALE,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    SINKS,
    SLOTS,
    SOFTCAP,
    SOURCE,
    SOURCE_HEAD,
    SOURCE_TOKEN,
    SPLIT,
    TABLES,
    TARGET,
    TILES,
    TOKEN,
    VALUE,
    VALUE_HEAD,
    VALUE_STEP,
    VALUE_TOKEN,
    VALUES,
    WINDOW,
    WORKERS,
)
from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import (
    digest_of,
    fetch_add,
    float32_at,
    int8_at,
    int32_at,
    int64_at,
    narrow,
    uint16_at,
)
from ballast.kernels.kv_int8_code import quantise_heads
from ballast.kernels.vector_code import LANES


@njit(error_model="numpy")
def _attend(table, source, target, kv):
    """Attend over items until none is left: scores, softmax and values of each split, then
    merge."""
    heads, kv_heads, dim = table[HEADS], table[KV_HEADS], table[HEAD_DIM]
    group = heads // kv_heads
    values, scales = table[VALUES], table[SCALES]
    scale = np.float32(float64_field(table, SCALE))
    softcap = np.float32(float64_field(table, SOFTCAP))
    window = table[WINDOW]
    tiles, order = int64_at(table[TILES]), int64_at(table[ORDER])
    pending = int64_at(table[PENDING])
    max_rows, item_heads = table[MAX_ROWS], table[ITEM_HEADS]
    parts = kv_heads // item_heads
    width = (dim + LANES - 1) // LANES * LANES
    part_floats = item_heads * max_rows * (width + 2)

    # This worker's part of the scratch memory.
    all_rows = item_heads * max_rows
    place = table[SCRATCH] + fetch_add(table, WORKERS, 1) * table[SCRATCH_BYTES]
    query_at, sums_at = place, place + 4 * all_rows * width
    query, sums = float32_at(query_at), float32_at(sums_at)
    sums_all = float32_at(place + 8 * all_rows * width)
    place += 12 * all_rows * width
    score_at = place
    score = float32_at(score_at)
    place += 4 * all_rows * CHUNK
    padded = float32_at(place)
    if is_staged_code(max_rows, dim):
        place += 4 * CHUNK * width
    offsets, places = int64_at(place), int64_at(place + 8 * (CHUNK + LANES))
    for t in range(CHUNK + LANES):
        places[t] = t * width
    place += 16 * (CHUNK + LANES)
    best = float32_at(place)
    total = float32_at(place + 4 * all_rows)
    best_all = float32_at(place + 8 * all_rows)
    total_all = float32_at(place + 12 * all_rows)
    factors = float32_at(place + 16 * all_rows)

    while True:
        item = fetch_add(table, NEXT, 1)
        if item >= table[ITEMS]:
            break
        part = item % parts
        first_head = part * item_heads
        entry = item // parts * 3
        tile, split, slot = order[entry], order[entry + 1], order[entry + 2]
        first, n_tokens = tiles[tile * 4], tiles[tile * 4 + 1]
        position = tiles[tile * 4 + 2]
        blocks = int32_at(table[TABLES] + 4 * tiles[tile * 4 + 3])
        rows = n_tokens * group
        staged = is_staged_code(rows, dim)
        context = position + n_tokens
        oldest = max(0, position + 1 - window)
        first_split, last_split = oldest // SPLIT, (context - 1) // SPLIT
        begin, end = first_split, last_split
        if split >= 0:
            begin, end = max(split, first_split), split

        if begin <= end:
            for h in range(item_heads):
                for r in range(rows):
                    head = (first_head + h) * group + r % group
                    q = (first + r // group) * table[SOURCE_TOKEN] + head * table[SOURCE_HEAD]
                    row = (h * rows + r) * width
                    widen_row(source, q, query, row, dim, width, scale)
        clear(best_all, total_all, sums_all, item_heads * rows, width)
        for one in range(begin, end + 1):
            clear(best, total, sums, item_heads * rows, width)
            start = max(one * SPLIT, oldest // CHUNK * CHUNK)
            for chunk in range(start, min(one * SPLIT + SPLIT, context), CHUNK):
                n = min(CHUNK, context - chunk)
                whole = (n + LANES - 1) // LANES * LANES
                ahead = min(CHUNK + LANES, context - chunk)
                token_offsets(table, blocks, chunk, max(0, oldest - chunk), ahead, offsets)
                shift = first_head * dim
                if staged:
                    for h in range(item_heads):
                        widen_tokens(kv, offsets, shift + h * dim, n, dim, width, padded)
                        q, at = query_at + 4 * h * rows * width, score_at + 4 * h * rows * CHUNK
                        scores_staged(
                            float32_at(q), 1, rows, width, padded, places, n, 0, 0, float32_at(at)
                        )
                else:
                    scores_in_place(
                        query, item_heads, rows, width, kv, offsets, n, shift, values, score
                    )
                if scales:
                    at = table[KV] + scales + 4 * first_head
                    scale_tokens(score, item_heads, rows, whole, offsets, at, factors)
                if softcap > ZERO:
                    for r in range(item_heads * rows):
                        soft_cap(score, r * CHUNK, whole, softcap)
                if whole > n or chunk + n > position + 1 or chunk < context - window:
                    for r in range(item_heads * rows):
                        last = position + r % rows // group
                        unseen = max(0, min(whole, last + 1 - window - chunk))
                        seen = max(unseen, min(n, last + 1 - chunk))
                        for t in range(r * CHUNK, r * CHUNK + unseen):
                            score[t] = MASKED
                        for t in range(r * CHUNK + seen, r * CHUNK + whole):
                            score[t] = MASKED
                softmax(score, best, total, sums, item_heads * rows, whole, width)
                if scales:
                    at = table[KV] + values + scales + 4 * first_head
                    scale_tokens(score, item_heads, rows, whole, offsets, at, factors)

                if staged:
                    for h in range(item_heads):
                        widen_tokens(kv, offsets, shift + h * dim + values, n, dim, width, padded)
                        at, to = score_at + 4 * h * rows * CHUNK, sums_at + 4 * h * rows * width
                        add_values_staged(
                            float32_at(at),
                            1,
                            rows,
                            width,
                            padded,
                            places,
                            n,
                            n,
                            0,
                            0,
                            float32_at(to),
                        )
                else:
                    add_values_in_place(
                        score,
                        item_heads,
                        rows,
                        width,
                        kv,
                        offsets,
                        n,
                        VALUE_STEP,
                        shift + values,
                        values,
                        sums,
                    )
            if split < 0:
                merge(best_all, total_all, sums_all, best, total, sums, item_heads * rows, width)

        if split >= 0:
            # Slots hold, part by part: sums, maxima, totals.
            base = table[SLOTS] + 4 * part * part_floats
            slot_bytes = 4 * parts * part_floats
            at = base + (slot + split) * slot_bytes
            n_sums = item_heads * rows * width
            if begin <= end:
                copy_sums(best, total, sums, float32_at(at), item_heads * rows, width)
            if fetch_add(pending, tile * parts + part, 1) < last_split:
                continue
            pending[tile * parts + part] = 0
            for one in range(first_split, last_split + 1):
                at = base + (slot + one) * slot_bytes
                best_2 = float32_at(at + 4 * n_sums)
                total_2 = float32_at(at + 4 * n_sums + 4 * item_heads * rows)
                merge(
                    best_all,
                    total_all,
                    sums_all,
                    best_2,
                    total_2,
                    float32_at(at),
                    item_heads * rows,
                    width,
                )
        for h in range(item_heads):
            for r in range(rows):
                row = h * rows + r
                head = (first_head + h) * group + r % group
                inverse = ONE / total_all[row]
                if table[SINKS] != 0:
                    sink = float32_at(table[SINKS])[head]
                    top = max(best_all[row], sink)
                    one = exp(best_all[row] - top)
                    inverse = one / (total_all[row] * one + exp(sink - top))
                out = ((first + r // group) * heads + head) * dim
                for d in range(dim):
                    target[out + d] = narrow(sums_all[row * width + d] * inverse, target[0])


@njit(error_model="numpy")
def _write(table, keys, values, kv):
    """Write new keys and values into their blocks until no item is left."""
    kv_heads, dim = table[KV_HEADS], table[HEAD_DIM]
    block_tokens = table[BLOCK_TOKENS]
    step, apart = table[TOKEN], table[VALUES]
    tiles = int64_at(table[TILES])
    blocks = int32_at(table[TABLES])
    while True:
        item = fetch_add(table, NEXT, 1)
        if item >= table[ITEMS]:
            break
        tile = item * 4
        for i in range(tiles[tile + 1]):
            token = tiles[tile] + i
            position = tiles[tile + 2] + i
            block = np.int64(blocks[tiles[tile + 3] + position // block_tokens])
            to = block * table[BLOCK_STRIDE] + position % block_tokens * step
            if table[SCALES]:
                k, v = token * table[SOURCE_TOKEN], token * table[VALUE_TOKEN]
                at = table[KV] + to
                quantise_heads(keys, k, table[SOURCE_HEAD], kv_heads, dim, at)
                if apart:
                    quantise_heads(values, v, table[VALUE_HEAD], kv_heads, dim, at + apart)
                continue
            for h in range(kv_heads):
                k = token * table[SOURCE_TOKEN] + h * table[SOURCE_HEAD]
                v = token * table[VALUE_TOKEN] + h * table[VALUE_HEAD]
                for d in range(dim):
                    kv[to + h * dim + d] = keys[k + d]
                for d in range(dim if apart else 0):
                    kv[to + apart + h * dim + d] = values[v + d]


_SIGNATURE = types.void(types.CPointer(types.int64))
_SOURCES = digest_of(
    attention_intrinsics,
    attention_steps_code,
    attention_table,
    intrinsics,
    kv_int8_code,
    vector_code,
)


def _entry_points(sources: int) -> dict[str, Any]:
    """Return the kernels by name. They close over `sources`, a digest of all source files involved:
    Numba's cache keys a function by its closure, and checks only its own file for changes."""

    def attend_float32(table):
        _ = sources
        _attend(table, float32_at(table[SOURCE]), float32_at(table[TARGET]), float32_at(table[KV]))

    def attend_bfloat16(table):
        _ = sources
        _attend(table, uint16_at(table[SOURCE]), uint16_at(table[TARGET]), uint16_at(table[KV]))

    def attend_float32_over_bfloat16(table):
        _ = sources
        _attend(table, float32_at(table[SOURCE]), float32_at(table[TARGET]), uint16_at(table[KV]))

    def attend_float32_over_int8(table):
        _ = sources
        _attend(table, float32_at(table[SOURCE]), float32_at(table[TARGET]), int8_at(table[KV]))

    def write_float32(table):
        _ = sources
        _write(table, float32_at(table[SOURCE]), float32_at(table[VALUE]), float32_at(table[KV]))

    def write_bfloat16(table):
        _ = sources
        _write(table, uint16_at(table[SOURCE]), uint16_at(table[VALUE]), uint16_at(table[KV]))

    return {
        "attend_float32_over_float32": attend_float32,
        "attend_bfloat16_over_bfloat16": attend_bfloat16,
        "attend_float32_over_bfloat16": attend_float32_over_bfloat16,
        "attend_float32_over_int8": attend_float32_over_int8,
        "write_float32": write_float32,
        "write_bfloat16": write_bfloat16,
    }


_entries = _entry_points(_SOURCES)
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a compiled kernel, from Numba's cache if it is there. Call it from one thread."""
    if name not in _compiled:
        _compiled[name] = compiled(_SIGNATURE, _entries[name])
    return int(_compiled[name].address)
