"""Compute a layer's operations between its GEMMs on a GPU: Triton kernels of `triton/layer.py`.

Values are rounded to the model's dtype wherever `transformers`' modules write one out, and computed
in float32 between. Weights, and K and V in block 0, are addresses as numbers, multiples of
`ALIGNED` bytes: Triton's launcher refuses a pointer to what no page backs, and a graph may be
recorded while they are gone.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_code(
    hidden,
    more,
    bias,
    weight,
    out,
    width,
    epsilon,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One row per program. `WIDTH`: a power of two, at least `width`."""
    weight = tl.multiple_of(weight.to(tl.pointer_type(DTYPE)), ALIGNED)
    at = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, WIDTH)
    real = i < width
    x = tl.load(hidden + at + i, mask=real, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(more + at + i, mask=real, other=0.0).to(tl.float32)
        if BIAS:
            bias = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), ALIGNED)
            y = (y + tl.load(bias + i, mask=real, other=0.0)).to(DTYPE).to(tl.float32)
        whole = (x + y).to(DTYPE)
        tl.store(hidden + at + i, whole, mask=real)
        x = whole.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) / width + epsilon))
    w = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at + i, ((x * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE), mask=real)


@triton.jit
def rotate_code(
    qkv,
    bias,
    q_norm,
    k_norm,
    cosine,
    sine,
    keys,
    values,
    slots,
    block_stride,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Programs (rows, HEADS + 2 * KV_HEADS): a head each, queries first, then keys, then values.

    `HALF`: a power of two, at least DIM / 2.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    real = i < DIM // 2
    start = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    first = tl.load(qkv + start + i, mask=real, other=0.0).to(tl.float32)
    second = tl.load(qkv + start + DIM // 2 + i, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), ALIGNED) + head * DIM
        first += tl.load(bias + i, mask=real, other=0.0)
        second += tl.load(bias + DIM // 2 + i, mask=real, other=0.0)
        first = first.to(DTYPE).to(tl.float32)
        second = second.to(DTYPE).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM
            scale = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
            weight = tl.where(head < HEADS, q_norm, k_norm)
            weight = tl.multiple_of(weight.to(tl.pointer_type(DTYPE)), ALIGNED)
            w = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
            first = ((first * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)
            w = tl.load(weight + DIM // 2 + i, mask=real, other=0.0).to(tl.float32)
            second = ((second * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)
        angle = row * (DIM // 2) + i
        c = tl.load(cosine + angle, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sine + angle, mask=real, other=0.0).to(tl.float32)
        turned = (first * c).to(DTYPE).to(tl.float32) - (second * s).to(DTYPE).to(tl.float32)
        second = (second * c).to(DTYPE).to(tl.float32) + (first * s).to(DTYPE).to(tl.float32)
        first = turned
    if head < HEADS:
        tl.store(qkv + start + i, first.to(DTYPE), mask=real)
        tl.store(qkv + start + DIM // 2 + i, second.to(DTYPE), mask=real)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            of_keys = head < HEADS + KV_HEADS
            cache = tl.where(of_keys, keys, values)
            cache = tl.multiple_of(cache.to(tl.pointer_type(DTYPE)), ALIGNED)
            kv_head = head - HEADS - tl.where(of_keys, 0, KV_HEADS)
            block = (slot // BLOCK_TOKENS).to(tl.int64)
            place = block * block_stride + ((slot % BLOCK_TOKENS) * KV_HEADS + kv_head) * DIM
            tl.store(cache + place + i, first.to(DTYPE), mask=real)
            tl.store(cache + place + DIM // 2 + i, second.to(DTYPE), mask=real)


@triton.jit
def gate_code(gate_up, out, width, BLOCK: tl.constexpr):
    """Programs (rows, blocks of so many elements)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < width
    g = tl.load(gate_up + row * 2 * width + i, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=real, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(g.dtype).to(tl.float32)
    tl.store(out + row * width + i, (active * up).to(g.dtype), mask=real)
