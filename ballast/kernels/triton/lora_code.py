"""Compute LoRA on a GPU: Triton kernels shrink (t = x A^T of rows with an adapter), expand (t B).

One program has a tile of rows of one adapter (`gpu/lora.py`); tiles of no rows do nothing, so that
a captured launch fits any job. Sums are float32; so are products, unless matrices are 16 bits wide:
those are multiplied as they are, and t is rounded to their dtype before it meets B. What belongs to
a row is summed in an order that depends on sizes alone.

Matrices' addresses are numbers, multiples of `ALIGNED` bytes: Triton's launcher refuses a pointer
to what no page backs.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_code(
    x,
    t,
    order,
    tiles,
    matrices,
    x_row,
    inputs,
    part_inputs,
    parts,
    t_part,
    t_row,
    ADAPTERS: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Programs (tiles, targets * parts, blocks of R ranks). M rows, K inputs at once.

    `t` (sorted rows, targets * parts, ranks) float32, `t_row` and `t_part` floats apart: each part
    has the sum over its `part_inputs` of the inputs, a multiple of K.
    """
    tile = tiles + tl.program_id(0) * FIELDS
    count = tl.load(tile + 1)
    if count > 0:
        first = tl.load(tile)
        adapter = tl.load(tile + 2)
        target = tl.program_id(1) // parts
        entry = matrices + (target * ADAPTERS + adapter) * 3
        rank = tl.load(entry + 2).to(tl.int32)
        r = tl.program_id(2) * R + tl.arange(0, R)
        if tl.program_id(2) * R < rank:
            a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), ALIGNED)
            i = tl.arange(0, M)
            real = i < count
            row = tl.load(order + first + i, mask=real, other=0).to(tl.int64)
            begin = tl.program_id(1) % parts * part_inputs
            end = tl.minimum(begin + part_inputs, inputs)
            total = tl.zeros([M, R], tl.float32)
            for k0 in range(begin, end, K):
                k = k0 + tl.arange(0, K)
                there = (k < end)[None, :]
                rows = tl.load(
                    x + row[:, None] * x_row + k[None, :], mask=real[:, None] & there, other=0.0
                )
                at = r[:, None].to(tl.int64) * inputs + k[None, :]
                columns = tl.load(a + at, mask=(r < rank)[:, None] & there, other=0.0)
                if WIDEN:
                    rows = rows.to(tl.float32)
                    columns = columns.to(tl.float32)
                total += tl.dot(rows, tl.trans(columns), input_precision="ieee")
            to = t + (first + i).to(tl.int64)[:, None] * t_row + tl.program_id(1) * t_part
            tl.store(to + r[None, :], total, mask=real[:, None] & (r < rank)[None, :])


@triton.jit
def expand_code(
    y,
    t,
    order,
    tiles,
    matrices,
    scales,
    columns,
    y_row,
    parts,
    t_part,
    t_row,
    ADAPTERS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs (tiles, blocks of N outputs, targets): y += scale * t B.

    `STEP`: what all numbers of outputs and first columns are multiples of.
    """
    tile = tiles + tl.program_id(0) * FIELDS
    count = tl.load(tile + 1)
    if count > 0:
        first = tl.load(tile)
        adapter = tl.load(tile + 2)
        target = tl.program_id(2)
        outputs = tl.multiple_of(tl.load(columns + target * 2), STEP)
        column = tl.multiple_of(tl.load(columns + target * 2 + 1), STEP)
        entry = target * ADAPTERS + adapter
        rank = tl.load(matrices + entry * 3 + 2).to(tl.int32)
        if (rank > 0) & (tl.program_id(1) * N < outputs):
            b = tl.load(matrices + entry * 3 + 1).to(tl.pointer_type(DTYPE))
            b = tl.multiple_of(b, ALIGNED)
            i = tl.arange(0, M)
            real = i < count
            n = tl.program_id(1) * N + tl.arange(0, N)
            total = tl.zeros([M, N], tl.float32)
            for r0 in range(0, rank, R):
                r = r0 + tl.arange(0, R)
                some = real[:, None] & (r < rank)[None, :]
                at = t + (first + i).to(tl.int64)[:, None] * t_row + target * parts * t_part
                made = tl.zeros([M, R], tl.float32)
                for part in range(parts):
                    made += tl.load(at + part * t_part + r[None, :], mask=some, other=0.0)
                there = (r < rank)[:, None] & (n < outputs)[None, :]
                rows = tl.load(
                    b + r[:, None].to(tl.int64) * outputs + n[None, :], mask=there, other=0.0
                )
                if WIDEN:
                    rows = rows.to(tl.float32)
                else:
                    made = made.to(DTYPE)
                total += tl.dot(made, rows, input_precision="ieee")
            row = tl.load(order + first + i, mask=real, other=0).to(tl.int64)
            to = y + row[:, None] * y_row + column + n[None, :]
            kept = real[:, None] & (n < outputs)[None, :]
            before = tl.load(to, mask=kept, other=0.0).to(tl.float32)
            result = before + tl.load(scales + entry) * total
            tl.store(to, result.to(y.dtype.element_ty), mask=kept)
