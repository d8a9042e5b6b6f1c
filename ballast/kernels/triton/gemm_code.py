"""Multiply by weights with an order of summation over K that no tile shape changes.

Used by `triton/gemm.py` and `triton/hybrid_gemm.py`. An element of the output is one chain of
matrix instructions: K in ascending steps of `K` elements, each added to the float32 accumulator of
those before. A tile's rows and columns, and a pause of the accumulator in a workspace, leave the
chain as it is, as long as every tile takes the same kind of matrix instruction: on compute
capability 9 tiles of 64 rows and more and 4 warps take `wgmma`, on 8 all take `mma.sync`.

`matrix` (n, k) is an address as a number, a multiple of `ALIGNED` bytes, of device memory or of
mapped host memory. `x` (m, k), `out` (m, n), rows `x_stride` apart, and n. `EVEN`: k is a multiple
of `K`. `WIDEN`: multiply in float32, as Triton's interpreter has no bfloat16.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

HELD = tl.constexpr(4)
"""Steps of K whose weights `weight_strip` holds while all rows pass."""
GROUP = tl.constexpr(8)
"""Tiles of rows that `gemm_code` goes down before the next tile of columns."""


@triton.jit
def activations(x, rows, real, at, k, x_stride, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """Load x at rows and K elements `at`."""
    there = real[:, None]
    if not EVEN:
        there = there & (at < k)[None, :]
    a = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + at[None, :], mask=there, other=0.0)
    if WIDEN:
        a = a.to(tl.float32)
    return a


@triton.jit
def weights(matrix, columns, real, at, k, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """Load (K, columns) of the matrix."""
    there = real[:, None]
    if not EVEN:
        there = there & (at < k)[None, :]
    w = tl.load(matrix + columns.to(tl.int64)[:, None] * k + at[None, :], mask=there, other=0.0)
    if WIDEN:
        w = w.to(tl.float32)
    return tl.trans(w)


@triton.jit
def output_tile(
    x,
    matrix,
    out,
    row_tile,
    column_tile,
    m,
    n,
    end,
    k,
    x_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of M rows and N columns, those before `end`, its sums in registers."""
    rows = row_tile * M + tl.arange(0, M)
    columns = column_tile * N + tl.arange(0, N)
    i = tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for begin in tl.range(0, k, K, num_stages=STAGES):
        a = activations(x, rows, rows < m, begin + i, k, x_stride, EVEN, WIDEN)
        w = weights(matrix, columns, columns < end, begin + i, k, EVEN, WIDEN)
        total = tl.dot(a, w, total, input_precision="ieee")
    real = (rows < m)[:, None] & (columns < end)[None, :]
    place = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def weight_strip(
    x,
    matrix,
    out,
    partial,
    strip,
    start,
    m,
    n,
    k,
    x_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute N columns from `start` + strip * N: HELD * K weights of each are loaded once and held
    while all rows pass. `partial` (m, n - start) float32 has a row's sums between; one program
    owns its columns of it, and walks K in ascending order."""
    strip_columns = strip * N + tl.arange(0, N)
    columns = start + strip_columns
    kept = columns < n
    i = tl.arange(0, K)
    for begin in range(0, k, HELD * K):
        at0 = begin + i
        at1 = at0 + K
        at2 = at1 + K
        at3 = at2 + K
        w0 = weights(matrix, columns, kept, at0, k, EVEN, WIDEN)
        w1 = weights(matrix, columns, kept, at1, k, EVEN, WIDEN)
        w2 = weights(matrix, columns, kept, at2, k, EVEN, WIDEN)
        w3 = weights(matrix, columns, kept, at3, k, EVEN, WIDEN)
        # The program's other threads have written the sums that follow.
        tl.debug_barrier()
        for row in tl.range(0, m, M, num_stages=STAGES):
            rows = row + tl.arange(0, M)
            real = rows < m
            both = real[:, None] & kept[None, :]
            kept_sums = rows.to(tl.int64)[:, None] * (n - start) + strip_columns[None, :]
            total = tl.load(partial + kept_sums, mask=both & (begin > 0), other=0.0)
            a0 = activations(x, rows, real, at0, k, x_stride, EVEN, WIDEN)
            total = tl.dot(a0, w0, total, input_precision="ieee")
            a1 = activations(x, rows, real, at1, k, x_stride, EVEN, WIDEN)
            total = tl.dot(a1, w1, total, input_precision="ieee")
            a2 = activations(x, rows, real, at2, k, x_stride, EVEN, WIDEN)
            total = tl.dot(a2, w2, total, input_precision="ieee")
            a3 = activations(x, rows, real, at3, k, x_stride, EVEN, WIDEN)
            total = tl.dot(a3, w3, total, input_precision="ieee")
            # By masks: Triton 3.6 does not pipeline a loop with such a branch, and fails.
            remaining = tl.full([M], k - begin, tl.int32)[:, None]
            place = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
            tl.store(place, total.to(out.dtype.element_ty), mask=both & (remaining <= HELD * K))
            tl.store(partial + kept_sums, total, mask=both & (remaining > HELD * K))


@triton.jit
def gemm_code(
    x,
    matrix,
    out,
    m,
    n,
    k,
    x_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile per program, all output-stationary."""
    matrix = tl.multiple_of(matrix.to(tl.pointer_type(DTYPE)), ALIGNED)
    row_tiles = tl.cdiv(m, M)
    column_tiles = tl.cdiv(n, N)
    i = tl.program_id(0)
    first = i // (GROUP * column_tiles) * GROUP
    deep = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + i % (GROUP * column_tiles) % deep
    column_tile = i % (GROUP * column_tiles) // deep
    output_tile(
        x, matrix, out, row_tile, column_tile, m, n, n, k, x_stride, M, N, K, STAGES, EVEN, WIDEN
    )


@triton.jit
def hybrid_gemm_code(
    x,
    matrix,
    out,
    partial,
    m,
    n,
    k,
    boundary,
    os_programs,
    x_stride,
    OS_M: tl.constexpr,
    OS_N: tl.constexpr,
    WS_M: tl.constexpr,
    WS_N: tl.constexpr,
    K: tl.constexpr,
    OS_STAGES: tl.constexpr,
    WS_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Columns before `boundary`, a multiple of OS_N or n, output-stationary, by the first
    `os_programs` programs; the others weight-stationary, by the rest. `EVEN`: k is a multiple of
    HELD * K."""
    matrix = tl.multiple_of(matrix.to(tl.pointer_type(DTYPE)), ALIGNED)
    program = tl.program_id(0)
    if program < os_programs:
        row_tiles = tl.cdiv(m, OS_M)
        for i in range(program, row_tiles * tl.cdiv(boundary, OS_N), os_programs):
            output_tile(
                x,
                matrix,
                out,
                i % row_tiles,
                i // row_tiles,
                m,
                n,
                boundary,
                k,
                x_stride,
                OS_M,
                OS_N,
                K,
                OS_STAGES,
                EVEN,
                WIDEN,
            )
    else:
        strips = tl.cdiv(n - boundary, WS_N)
        for i in range(program - os_programs, strips, tl.num_programs(0) - os_programs):
            weight_strip(
                x,
                matrix,
                out,
                partial,
                i,
                boundary,
                m,
                n,
                k,
                x_stride,
                WS_M,
                WS_N,
                K,
                WS_STAGES,
                EVEN,
                WIDEN,
            )
