"""Compute LoRA on CPU: the compiled kernels that each thread of a team runs (tables: `lora.py`).

All compiled code but `intrinsics.py` is in this one file, because Numba's cache looks for changes
in the file of the function that it compiles, and not in those that it calls. Intrinsics that are
arguments (`float32_at`, `uint16_at`) have names of their own for the same cache's sake.

Kernels take one argument, the address of a table of int64 whose fields are the constants below.
Threads share work through an atomic counter in it, so any number of them may call one kernel on
one table at the same time. *Shrink* computes t = scale * x A^T, *expand* adds t B^T to y; shrink
must end before expand begins.

Rows of a batch are taken in an order that puts those of one adapter together; a row's place in it
is its *position*. A tile is some positions of one adapter. An item of either kernel is a tile of
one target and some ranks or some columns of it. An element of t is a sum over lanes of partial sums
from the first input to the last, one of y a chain from the first rank to the last, whichever tile
they are in: neither the rows around a row nor the number of threads changes a bit of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import fetch_add, float32_at, int64_at, uint16_at
from ballast.kernels.vector_code import LANES

# Fields of the table. Those of a job come first.
NEXT = 0
"""Next item to be taken; 0 before each run."""
TILES = 1
TILES_AT = 2
"""Address of int64 (TILES, 3): first position, positions, adapter."""
POSITIONS = 3
"""Positions in all."""
X_ROWS = 4
"""Address of int64 (POSITIONS,): row of x at each position; Y_ROWS likewise."""
Y_ROWS = 5
X = 6
"""Address of the inputs."""
X_STRIDE = 7
"""Elements from a row of x to the next."""
Y = 8
"""Address of the outputs."""
Y_STRIDE = 9
T = 10
"""Address of float32 (TARGETS, POSITIONS, T_STRIDE)."""
JOB_FIELDS = 11
T_STRIDE = 11
K = 12
"""Inputs."""
TARGETS = 13
TARGETS_AT = 14
"""Address of int64 (TARGETS, TARGET_FIELDS)."""
CHUNKS = 15
"""Chunks of RANKS ranks (shrink) or of COLUMNS columns (expand), of the largest target."""
N_FIELDS = 16

# Fields of a target: linear modules of one input, with outputs of their own.
ADAPTERS_AT = 0
"""Address of int64 (adapters, 4): of A (rank, K) and of B transposed (rank, N), rank, and the bits
of the scale as float32. Rank 0: the adapter leaves this target alone."""
N = 1
"""Outputs."""
COLUMN = 2
"""Column of y of the first output."""
BLOCK = 3
"""Outputs that lie side by side in y; a multiple of COLUMN_TILE, or at least N."""
BLOCK_STEP = 4
"""Columns from the first output of a block to that of the next."""
TARGET_FIELDS = 5

RANKS = 16
"""Ranks of an item."""
COLUMNS = 512
"""Columns of an item."""
COLUMN_TILE = 32
"""Columns summed in registers at a time."""

_ROWS = 4 if LANES == 16 else 2
"""Rows of a tile in registers."""
_TILE_RANKS = 4
_VECTORS = COLUMN_TILE // LANES

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)
_VECTOR = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(_I16, LANES)


# What Numba cannot say: sums in vector registers in an order that is ours.


def _int64(value):
    return ir.Constant(_I64, value)


def _splat(kind, value):
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)


def _fma(builder, kind, name, x, y, z):
    function = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [x, y, z])


def _fma_vector(builder, x, y, z):
    return _fma(builder, _VECTOR, f"llvm.fma.v{LANES}f32", x, y, z)


def _fma_scalar(builder, x, y, z):
    return _fma(builder, _F32, "llvm.fma.f32", x, y, z)


def _load_vector(builder, pointer, at):
    """LANES elements from `at` on, of float32 or bfloat16, as float32."""
    here = builder.gep(pointer, [at])
    if pointer.type.pointee == _F32:
        return builder.load(builder.bitcast(here, _VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(here, _HALVES.as_pointer()), align=2)
    words = builder.shl(builder.zext(halves, _WORDS), _splat(_WORDS, 16))
    return builder.bitcast(words, _VECTOR)


def _load_scalar(builder, pointer, at):
    value = builder.load(builder.gep(pointer, [at]))
    if pointer.type.pointee == _F32:
        return value
    return builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)


def _rounded(builder, value, words, halves, constant):
    """bfloat16 bits of float32, to nearest, ties to even; `constant` makes one of `words`."""
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, constant(words, 16)), constant(words, 1))
    up = builder.add(bits, builder.add(odd, constant(words, 0x7FFF)))
    top = builder.trunc(builder.lshr(up, constant(words, 16)), halves)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, constant(halves, 0x7FC0), top)


def _store_vector(builder, value, pointer, at):
    here = builder.gep(pointer, [at])
    if pointer.type.pointee == _F32:
        builder.store(value, builder.bitcast(here, _VECTOR.as_pointer()), align=4)
        return
    halves = _rounded(builder, value, _WORDS, _HALVES, _splat)
    builder.store(halves, builder.bitcast(here, _HALVES.as_pointer()), align=2)


def _store_scalar(builder, value, pointer, at):
    here = builder.gep(pointer, [at])
    if pointer.type.pointee == _F32:
        builder.store(value, here)
    else:
        builder.store(_rounded(builder, value, _I32, _I16, ir.Constant), here)


def _spread(builder, value):
    """A vector of equal elements."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_WORDS, None))


def _across(builder, vector):
    """The sum of a vector's elements: halves added to halves, always in this order."""
    width = LANES
    while width > 1:
        width //= 2
        swap = [(i + width) % (2 * width) if i < 2 * width else i for i in range(LANES)]
        other = builder.shuffle_vector(vector, vector, ir.Constant(_WORDS, swap))
        vector = builder.fadd(vector, other)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _row_offsets(builder, rows, at, n, stride):
    """Where `n` rows begin, counted in elements."""
    numbers = [builder.load(builder.gep(rows, [builder.add(at, _int64(i))])) for i in range(n)]
    return [builder.mul(number, stride) for number in numbers]


def _dots(rows, ranks):
    def dots(context, x, x_rows, position, stride, a, at, k, t, to, t_stride, scale):
        """t[to + r*t_stride + j] = scale * dot(x[x_rows[position + r]], a[at + j*k]), of length k,
        for all r of some rows and j of some ranks."""

        def generate(ctx, builder, signature, arguments):
            x, x_rows, position, stride, a, at, k, t, to, t_stride, scale = arguments
            xs = _row_offsets(builder, x_rows, position, rows, stride)
            ys = [builder.add(at, builder.mul(k, _int64(j))) for j in range(ranks)]
            zero = ir.Constant(_VECTOR, None)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * ranks)]
            for slot in sums:
                builder.store(zero, slot)
            whole = builder.and_(k, _int64(-LANES))
            with cgutils.for_range_slice(builder, _int64(0), whole, _int64(LANES)) as (d, _):
                left = [_load_vector(builder, x, builder.add(row, d)) for row in xs]
                right = [_load_vector(builder, a, builder.add(row, d)) for row in ys]
                for i, slot in enumerate(sums):
                    one, two = left[i // ranks], right[i % ranks]
                    builder.store(_fma_vector(builder, one, two, builder.load(slot)), slot)
            totals = [cgutils.alloca_once(builder, _F32) for _ in sums]
            for slot, total in zip(sums, totals, strict=True):
                builder.store(_across(builder, builder.load(slot)), total)
            with cgutils.for_range_slice(builder, whole, k, _int64(1)) as (d, _):
                left = [_load_scalar(builder, x, builder.add(row, d)) for row in xs]
                right = [_load_scalar(builder, a, builder.add(row, d)) for row in ys]
                for i, total in enumerate(totals):
                    one, two = left[i // ranks], right[i % ranks]
                    builder.store(_fma_scalar(builder, one, two, builder.load(total)), total)
            for i, total in enumerate(totals):
                down = builder.mul(t_stride, _int64(i // ranks))
                place = builder.add(builder.add(to, down), _int64(i % ranks))
                value = builder.fmul(builder.load(total), scale)
                builder.store(value, builder.gep(t, [place]))
            return ctx.get_dummy_value()

        i64, f32 = types.int64, types.float32
        return types.void(x, x_rows, i64, i64, a, i64, i64, t, i64, i64, f32), generate

    return intrinsic(dots)


def _sums(rows, vectors):
    def sums(context, t, at, t_stride, b, column, n, rank, y, y_rows, position, stride, to):
        """y[y_rows[position + r], to + c] += sum of t[at + r*t_stride + j] * b[j*n + column + c]
        over j below rank, for all r of some rows and c of some vectors of columns; of one column
        where `vectors` is 0."""

        def generate(ctx, builder, signature, arguments):
            t, at, t_stride, b, column, n, rank, y, y_rows, position, stride, to = arguments
            ys = _row_offsets(builder, y_rows, position, rows, stride)
            ys = [builder.add(row, to) for row in ys]
            ts = [builder.add(at, builder.mul(t_stride, _int64(i))) for i in range(rows)]
            scalar = vectors == 0
            kind = _F32 if scalar else _VECTOR
            load = _load_scalar if scalar else _load_vector
            store = _store_scalar if scalar else _store_vector
            fma = _fma_scalar if scalar else _fma_vector
            width = max(1, vectors)
            zero = ir.Constant(kind, 0.0) if scalar else ir.Constant(kind, None)
            sums = [cgutils.alloca_once(builder, kind) for _ in range(rows * width)]
            for slot in sums:
                builder.store(zero, slot)
            steps = [_int64(v * LANES) for v in range(width)]
            with cgutils.for_range_slice(builder, _int64(0), rank, _int64(1)) as (j, _):
                line = builder.add(column, builder.mul(j, n))
                right = [load(builder, b, builder.add(line, step)) for step in steps]
                for r in range(rows):
                    one = builder.load(builder.gep(t, [builder.add(ts[r], j)]))
                    left = one if scalar else _spread(builder, one)
                    for v in range(width):
                        slot = sums[r * width + v]
                        builder.store(fma(builder, left, right[v], builder.load(slot)), slot)
            for i, slot in enumerate(sums):
                place = builder.add(ys[i // width], steps[i % width])
                value = builder.fadd(load(builder, y, place), builder.load(slot))
                store(builder, value, y, place)
            return ctx.get_dummy_value()

        i64 = types.int64
        return types.void(t, i64, i64, b, i64, i64, i64, y, y_rows, i64, i64, i64), generate

    return intrinsic(sums)


_dots_rows_ranks = _dots(_ROWS, _TILE_RANKS)
_dots_rows_one = _dots(_ROWS, 1)
_dots_one_ranks = _dots(1, _TILE_RANKS)
_dots_one_one = _dots(1, 1)
_sums_rows_tile = _sums(_ROWS, _VECTORS)
_sums_rows_vector = _sums(_ROWS, 1)
_sums_one_tile = _sums(1, _VECTORS)
_sums_one_vector = _sums(1, 1)
_sum_one_one = _sums(1, 0)


@njit(error_model="numpy")
def _shrink(table, x, like):
    tiles, targets = int64_at(table[TILES_AT]), int64_at(table[TARGETS_AT])
    x_rows, stride = int64_at(table[X_ROWS]), table[X_STRIDE]
    t, t_stride = float32_at(table[T]), table[T_STRIDE]
    k = table[K]
    items = table[TARGETS] * table[TILES] * table[CHUNKS]
    while True:
        item = fetch_add(table, NEXT, 1)
        if item >= items:
            break
        target = item // (table[TILES] * table[CHUNKS])
        tile = item // table[CHUNKS] % table[TILES] * 3
        begin = item % table[CHUNKS] * RANKS
        entry = targets[target * TARGET_FIELDS + ADAPTERS_AT] + tiles[tile + 2] * 32
        adapter = int64_at(entry)
        end = min(begin + RANKS, adapter[2])
        if begin >= end:
            continue
        a = like(adapter[0])
        scale = float32_at(entry + 24)[0]
        first, last = tiles[tile], tiles[tile] + tiles[tile + 1]
        row = first
        above = target * table[POSITIONS]
        while row + _ROWS <= last:
            to = (above + row) * t_stride
            j = begin
            while j + _TILE_RANKS <= end:
                _dots_rows_ranks(x, x_rows, row, stride, a, j * k, k, t, to + j, t_stride, scale)
                j += _TILE_RANKS
            while j < end:
                _dots_rows_one(x, x_rows, row, stride, a, j * k, k, t, to + j, t_stride, scale)
                j += 1
            row += _ROWS
        while row < last:
            to = (above + row) * t_stride
            j = begin
            while j + _TILE_RANKS <= end:
                _dots_one_ranks(x, x_rows, row, stride, a, j * k, k, t, to + j, t_stride, scale)
                j += _TILE_RANKS
            while j < end:
                _dots_one_one(x, x_rows, row, stride, a, j * k, k, t, to + j, t_stride, scale)
                j += 1
            row += 1


@njit(error_model="numpy")
def _expand(table, y, like):
    tiles, targets = int64_at(table[TILES_AT]), int64_at(table[TARGETS_AT])
    y_rows, stride = int64_at(table[Y_ROWS]), table[Y_STRIDE]
    t, t_stride = float32_at(table[T]), table[T_STRIDE]
    items = table[TARGETS] * table[TILES] * table[CHUNKS]
    while True:
        item = fetch_add(table, NEXT, 1)
        if item >= items:
            break
        number = item // (table[TILES] * table[CHUNKS])
        target = number * TARGET_FIELDS
        tile = item // table[CHUNKS] % table[TILES] * 3
        begin = item % table[CHUNKS] * COLUMNS
        adapter = int64_at(targets[target + ADAPTERS_AT] + tiles[tile + 2] * 32)
        n, rank = targets[target + N], adapter[2]
        end = min(begin + COLUMNS, n)
        if rank == 0 or begin >= end:
            continue
        b = like(adapter[1])
        block, step = targets[target + BLOCK], targets[target + BLOCK_STEP]
        first, last = tiles[tile], tiles[tile] + tiles[tile + 1]
        above = number * table[POSITIONS]
        c = begin
        while c < end:
            to = targets[target + COLUMN] + c // block * step + c % block
            row = first
            if c + COLUMN_TILE <= end:
                width = COLUMN_TILE
                while row + _ROWS <= last:
                    at = (above + row) * t_stride
                    _sums_rows_tile(t, at, t_stride, b, c, n, rank, y, y_rows, row, stride, to)
                    row += _ROWS
                while row < last:
                    at = (above + row) * t_stride
                    _sums_one_tile(t, at, t_stride, b, c, n, rank, y, y_rows, row, stride, to)
                    row += 1
            elif c + LANES <= end:
                width = LANES
                while row + _ROWS <= last:
                    at = (above + row) * t_stride
                    _sums_rows_vector(t, at, t_stride, b, c, n, rank, y, y_rows, row, stride, to)
                    row += _ROWS
                while row < last:
                    at = (above + row) * t_stride
                    _sums_one_vector(t, at, t_stride, b, c, n, rank, y, y_rows, row, stride, to)
                    row += 1
            else:
                width = 1
                while row < last:
                    at = (above + row) * t_stride
                    _sum_one_one(t, at, t_stride, b, c, n, rank, y, y_rows, row, stride, to)
                    row += 1
            c += width


_SIGNATURE = types.void(types.CPointer(types.int64))


def _shrink_float32_float32(table):
    _shrink(table, float32_at(table[X]), float32_at)


def _shrink_float32_bfloat16(table):
    _shrink(table, float32_at(table[X]), uint16_at)


def _shrink_bfloat16_bfloat16(table):
    _shrink(table, uint16_at(table[X]), uint16_at)


def _expand_float32_float32(table):
    _expand(table, float32_at(table[Y]), float32_at)


def _expand_float32_bfloat16(table):
    _expand(table, float32_at(table[Y]), uint16_at)


def _expand_bfloat16_bfloat16(table):
    _expand(table, uint16_at(table[Y]), uint16_at)


_PLAIN = {
    "shrink_float32_float32": _shrink_float32_float32,
    "shrink_float32_bfloat16": _shrink_float32_bfloat16,
    "shrink_bfloat16_bfloat16": _shrink_bfloat16_bfloat16,
    "expand_float32_float32": _expand_float32_float32,
    "expand_float32_bfloat16": _expand_float32_bfloat16,
    "expand_bfloat16_bfloat16": _expand_bfloat16_bfloat16,
}
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a compiled kernel, from Numba's cache if it is there. Call it from one thread.

    By name: what it does, the dtype of the activations, that of the adapters.
    """
    if name not in _compiled:
        _compiled[name] = compiled(_SIGNATURE, _PLAIN[name])
    return int(_compiled[name].address)
