"""Multiply one row by a matrix on a GPU: a Triton kernel with fused norm, bias, gate and addition.

Used by `triton/layer.py`. The product is bound by reading the matrix, so one pass computes
everything: the row's norm is a factor of every output, and its sum of squares is cheap beside the
weights. Products and sums are float32. Weights are addresses as numbers, as in `layer_code.py`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_code(
    x,
    matrix,
    norm,
    bias,
    added,
    out,
    n,
    k,
    epsilon,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Programs (n / N rounded up): N outputs each, K elements of the row at once, and those of
    STAGES - 1 such steps on their way, which is what keeps memory busy.

    `out` (n) of what `x` (k) becomes: with `NORM` its RMS norm, weighted; times the matrix (n, k);
    plus `bias` float32, plus `added`. `GATED`: of the matrix (2 n, k), silu of the first n outputs
    times the others. Rounded to the model's dtype after each, but for the norm.
    """
    matrix = tl.multiple_of(matrix.to(tl.pointer_type(DTYPE)), ALIGNED)
    row = tl.program_id(0) * N + tl.arange(0, N)
    real = row < n
    i = tl.arange(0, K)
    start = row.to(tl.int64)[:, None] * k
    ahead = tl.cast(n, tl.int64) * k
    total = tl.zeros([N, K], tl.float32)
    other = tl.zeros([N, K], tl.float32)
    squares = tl.zeros([K], tl.float32)
    if NORM:
        norm = tl.multiple_of(norm.to(tl.pointer_type(DTYPE)), ALIGNED)
    for begin in tl.range(0, k, K, num_stages=STAGES):
        at = begin + i
        there = at < k
        both = real[:, None] & there[None, :]
        w = tl.load(matrix + start + at[None, :], mask=both, other=0.0)
        if GATED:
            up = tl.load(matrix + ahead + start + at[None, :], mask=both, other=0.0)
        v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v = v * tl.load(norm + at, mask=there, other=0.0).to(tl.float32)
        total += v[None, :] * w.to(tl.float32)
        if GATED:
            other += v[None, :] * up.to(tl.float32)
    y = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) / k + epsilon))
    y = (y * scale).to(DTYPE).to(tl.float32)
    if GATED:
        active = (y / (1.0 + tl.exp(-y))).to(DTYPE).to(tl.float32)
        y = active * (tl.sum(other, 1) * scale).to(DTYPE).to(tl.float32)
    if BIAS:
        bias = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), ALIGNED)
        y = (y + tl.load(bias + row, mask=real, other=0.0)).to(DTYPE).to(tl.float32)
    if ADD:
        y = y + tl.load(added + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(DTYPE).to(out.dtype.element_ty), mask=real)
