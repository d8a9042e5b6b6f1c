"""Compute paged attention on a GPU: Triton kernels that write K and V, attend over items, merge.

`gpu/attention_plan.py` defines items, and how rows and slots are counted. Programs take items in
turn until the count in device memory is reached, so that a captured launch fits any job.
Scores and sums are float32; so are products, unless K and V are 16 bits wide: those are multiplied
as they are, and weights are rounded to their dtype before they meet V. Sums of a row run over keys
in steps of `N` from the item's first, whatever is beside it. With items of longer chunks cut like
decodes (`CUT`) and equal M, N and D, a row's result is the same to the bit in a decode, in a chunk
of any length and in any batch. With another M a sum over keys runs in another order, as rows lie
otherwise on warps.

`keys`, `values`: addresses of a layer's K and V in block 0, as numbers, multiples of `ALIGNED`
bytes: Triton's launcher refuses a pointer to what no page backs, and block 0 may be such. `sinks`,
of a value for each head, likewise: a graph may be recorded while the model is away.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def write_code(
    key,
    value,
    keys,
    values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    block_stride,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One row per program. `WIDTH`: a power of two, at least HEADS * DIM."""
    keys = tl.multiple_of(keys.to(tl.pointer_type(DTYPE)), ALIGNED)
    values = tl.multiple_of(values.to(tl.pointer_type(DTYPE)), ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        block = (slot // BLOCK_TOKENS).to(tl.int64)
        place = block * block_stride + (slot % BLOCK_TOKENS) * HEADS * DIM
        i = tl.arange(0, WIDTH)
        real = i < HEADS * DIM
        head = i // DIM
        d = i % DIM
        k = tl.load(key + row * key_token + head * key_head + d, mask=real)
        tl.store(keys + place + i, k, mask=real)
        v = tl.load(value + row * value_token + head * value_head + d, mask=real)
        tl.store(values + place + i, v, mask=real)


@triton.jit
def _sunk(sinks, head, real, largest, weight, total, DTYPE: tl.constexpr):
    """Sums and weights of rows with one score more, of no value: that of their head's sink."""
    sinks = sinks.to(tl.pointer_type(DTYPE))
    score = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
    now = tl.maximum(largest, score)
    before = tl.exp2(largest - now)
    return total * before[:, None], weight * before + tl.exp2(score - now)


@triton.jit
def _merged(largest, weight, total, other_largest, other_weight, other_total):
    """Sums of rows over some keys, and over the keys after them: over both. What has seen no key
    changes nothing."""
    now = tl.maximum(largest, other_largest)
    base = tl.where(now == NOTHING, 0.0, now)
    before = tl.exp2(largest - base)
    share = tl.exp2(other_largest - base)
    weight = weight * before + other_weight * share
    total = total * before[:, None] + other_total * share[:, None]
    return now, weight, total


@triton.jit
def _over_keys(
    q,
    keys,
    values,
    tables,
    table,
    kv_head,
    position,
    low,
    begin,
    end,
    block_stride,
    scale,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sums over keys from `low` to `end` in steps of N from `begin`: largest score (base 2), sum of
    weights, weighted sum of values."""
    d = tl.arange(0, D)
    largest = tl.full([M], NOTHING, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D], tl.float32)
    for step in range(begin, end, N):
        key = step + tl.arange(0, N)
        seen = (key >= low) & (key < end)
        block = tl.load(tables + table + key // BLOCK_TOKENS, mask=seen, other=0)
        inside = (key % BLOCK_TOKENS) * KV_HEADS * DIM + kv_head * DIM
        place = block.to(tl.int64) * block_stride + inside
        there = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], mask=there, other=0.0)
        v = tl.load(values + place[:, None] + d[None, :], mask=there, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            # By the series of tanh near 0, where the difference of exponentials cancels.
            x = score / softcap
            square = x * x
            series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315)))
            far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
            score = softcap * tl.where(square < 0.04, x * series, far)
        score = score * LOG2_E
        visible = seen[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        score = tl.where(visible, score, NOTHING)
        now = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(now == NOTHING, 0.0, now)
        p = tl.exp2(score - base[:, None])
        before = tl.exp2(largest - base)
        weight = weight * before + tl.sum(p, 1)
        if not WIDEN:
            p = p.to(v.dtype)
        total = total * before[:, None] + tl.dot(p, v, input_precision="ieee")
        largest = now
    return largest, weight, total


@triton.jit
def attend_code(
    query,
    keys,
    values,
    out,
    partial,
    items,
    count,
    tables,
    sinks,
    query_token,
    query_head,
    block_stride,
    partial_rows,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Programs (any number, KV_HEADS). M rows, N keys, D >= DIM elements at once, powers of two.

    `partial` (slots, KV_HEADS, partial_rows, DIM + 4) float32: per row its sum, its largest score
    (base 2) and its sum of weights, and two of nothing, which keep rows aligned. `WIDEN`: multiply
    in float32. `CUT`: merge the sums of this many keys each in registers, as `merge_code` does
    those of items; 0: one sum over all keys of an item.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    keys = tl.multiple_of(keys.to(tl.pointer_type(DTYPE)), ALIGNED)
    values = tl.multiple_of(values.to(tl.pointer_type(DTYPE)), ALIGNED)
    kv_head = tl.program_id(1)
    n = tl.load(count)
    r = tl.arange(0, M)
    d = tl.arange(0, D)
    token = r // GROUP
    head = kv_head * GROUP + r % GROUP
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        item = items + i * FIELDS
        table = tl.load(item)
        row = tl.load(item + 1)
        tokens = tl.load(item + 2)
        start = tl.load(item + 3)
        first = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)
        real = token < tokens
        rows = (row + token).to(tl.int64)
        position = start + token
        filled = real[:, None] & (d < DIM)[None, :]
        at = rows[:, None] * query_token + head[:, None] * query_head + d[None, :]
        q = tl.load(query + at, mask=filled, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        low = first
        if WINDOW:
            low = tl.maximum(first, start - window + 1)
        if CUT:
            largest = tl.full([M], NOTHING, tl.float32)
            weight = tl.zeros([M], tl.float32)
            total = tl.zeros([M, D], tl.float32)
            for part in range(low // CUT * CUT, end, CUT):
                part_largest, part_weight, part_total = _over_keys(
                    q,
                    keys,
                    values,
                    tables,
                    table,
                    kv_head,
                    position,
                    low,
                    tl.maximum(part, low // N * N),
                    tl.minimum(part + CUT, end),
                    block_stride,
                    scale,
                    window,
                    softcap,
                    KV_HEADS,
                    DIM,
                    BLOCK_TOKENS,
                    M,
                    N,
                    D,
                    WINDOW,
                    SOFTCAP,
                    WIDEN,
                )
                largest, weight, total = _merged(
                    largest, weight, total, part_largest, part_weight, part_total
                )
        else:
            largest, weight, total = _over_keys(
                q,
                keys,
                values,
                tables,
                table,
                kv_head,
                position,
                low,
                low // N * N,
                end,
                block_stride,
                scale,
                window,
                softcap,
                KV_HEADS,
                DIM,
                BLOCK_TOKENS,
                M,
                N,
                D,
                WINDOW,
                SOFTCAP,
                WIDEN,
            )
        if slot < 0:
            if SINKS:
                total, weight = _sunk(sinks, head, real, largest, weight, total, DTYPE)
            result = total / tl.where(real, weight, 1.0)[:, None]
            place = rows[:, None] * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=filled)
        else:
            line = (slot.to(tl.int64) * KV_HEADS + kv_head) * partial_rows + r
            to = partial + line * (DIM + 4)
            tl.store(to[:, None] + d[None, :], total, mask=filled)
            tl.store(to + DIM, largest, mask=real)
            tl.store(to + DIM + 1, weight, mask=real)


@triton.jit
def merge_code(
    partial,
    out,
    merges,
    count,
    sinks,
    partial_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    SINKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Programs (at least `count`, KV_HEADS): the partial results of a tile into its rows."""
    i = tl.program_id(0)
    if i < tl.load(count):
        GROUP: tl.constexpr = HEADS // KV_HEADS
        kv_head = tl.program_id(1)
        merge = merges + i * FIELDS
        row = tl.load(merge)
        tokens = tl.load(merge + 1)
        slot = tl.load(merge + 2)
        slots = tl.load(merge + 3)
        r = tl.arange(0, M)
        d = tl.arange(0, D)
        token = r // GROUP
        real = token < tokens
        filled = real[:, None] & (d < DIM)[None, :]
        largest = tl.full([M], NOTHING, tl.float32)
        weight = tl.zeros([M], tl.float32)
        total = tl.zeros([M, D], tl.float32)
        for s in range(slots):
            line = ((slot + s).to(tl.int64) * KV_HEADS + kv_head) * partial_rows + r
            at = partial + line * (DIM + 4)
            theirs = tl.load(at + DIM, mask=real, other=NOTHING)
            share = tl.load(at + DIM + 1, mask=real, other=0.0)
            part = tl.load(at[:, None] + d[None, :], mask=filled, other=0.0)
            largest, weight, total = _merged(largest, weight, total, theirs, share, part)
        head = kv_head * GROUP + r % GROUP
        place = (row + token).to(tl.int64) * (HEADS * DIM) + head * DIM
        if SINKS:
            total, weight = _sunk(sinks, head, real, largest, weight, total, DTYPE)
        result = total / tl.where(real, weight, 1.0)[:, None]
        tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=filled)
