"""The compiled part of paged attention: what one thread does. `paged_attention.py` calls it.

All compiled code is in this one file, because Numba's cache looks for changes in the file of the
function that it compiles, and not in those that it calls.

Kernels take one argument, the address of a table of int64 whose fields are the constants below.
Threads share work through an atomic counter in it, so any number of them may call one kernel on
one table at the same time.

*Attend*: an item is a tile and some KV heads. A tile is some query tokens of one sequence; its
rows, for each KV head, are these tokens times the query heads that share it, padded to an even
number. K and V of one block and head at a time are widened into a small float32 buffer, against
which all rows go: each byte of the KV cache is read once per tile, in place. Heads lie side by
side in a block, so an item has all of them if there are items enough, and reads blocks from front
to back (up to a sixth faster than one head at a time when they come from memory). Softmax is
online, in float32. A row's result depends on its own sequence alone, and sums are taken in an order
that depends on positions alone: neither the batch around it, nor the chunk it is in, nor where its
blocks lie changes a bit of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Fields of the table.
NEXT = 0
"""Next item to be taken; 0 before each run."""
ITEMS = 1
"""Items in all."""
TILES = 2
"""Address of int64 (tiles, 4): first row of the batch, rows, position of the first, table at."""
TABLES = 3
"""Address of int32: the block tables, one after the other."""
KV = 4
"""Address of K of the layer in block 0."""
BLOCK_STRIDE = 5
"""Elements from a block to the next."""
BLOCK_TOKENS = 6
HEADS = 7
"""Query heads."""
KV_HEADS = 8
HEAD_DIM = 9
SOURCE = 10
"""Address of the queries (attend) or of the new keys (write)."""
SOURCE_TOKEN = 11
"""Elements from a token of the source to the next."""
SOURCE_HEAD = 12
"""Elements from a head of the source to the next."""
TARGET = 13
"""Attend: address of the output, contiguous (tokens, heads, head_dim)."""
SCALE = 14
"""Attend: the softmax scale, as the bits of a float64."""
VALUE = 15
"""Write: address of the new values."""
VALUE_TOKEN = 16
VALUE_HEAD = 17
MAX_ROWS = 18
"""Attend: most rows of a tile, padding included; even."""
WORKERS = 19
"""Attend: threads so far; 0 before each run."""
SCRATCH = 20
"""Attend: address of `SCRATCH_BYTES` for each worker."""
SCRATCH_BYTES = 21
ITEM_HEADS = 22
"""Attend: KV heads of an item; divides KV_HEADS."""
SOFTCAP = 23
"""Attend: scores become softcap * tanh(score / softcap); bits of a float64, 0 for as they are."""
WINDOW = 24
"""Attend: positions that a token sees, its own and those before it; at least 1."""
N_FIELDS = 25

NO_WINDOW = 1 << 62
"""A window that no context fills."""

STAGE = 32
"""Most tokens of K and V widened at once."""
LANES = 8
"""float32 in a vector of the inner loops: a register of AVX2."""


def scratch_bytes(max_rows: int, item_heads: int, head_dim: int) -> int:
    """What one worker needs to attend: queries, sums, maxima, totals; K or V, and scores."""
    width = (head_dim + LANES - 1) // LANES * LANES
    return 4 * (item_heads * max_rows * (2 * width + 2) + STAGE * width + max_rows * STAGE)


_FAST = {"contract", "reassoc", "nsz", "arcp"}
_MASKED = np.float32(-1e30)
"""The score of a token that a row does not see."""
_NONE = np.float32(-5e29)
"""The running maximum before the first token: below any score, but so far above `_MASKED` that the
weight of a masked token is 0 even where all are masked."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


# What Numba cannot say: addresses as arrays, atomic counters, bfloat16 (handled as its bits,
# uint16), and an exp that vectorises.

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)


def _pointer_to(kind):
    def pointer(context, address):
        def generate(ctx, builder, signature, arguments):
            return builder.inttoptr(arguments[0], ctx.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_float32_at = intrinsic(_pointer_to(types.float32))
"""int64 address -> pointer to float32, for `carray`."""
_uint16_at = intrinsic(_pointer_to(types.uint16))
_int64_at = intrinsic(_pointer_to(types.int64))
_int32_at = intrinsic(_pointer_to(types.int32))


@intrinsic
def _fetch_add(context, table, field, amount):
    """Add to a field of a table of int64 as one atomic step; its value before."""

    def generate(ctx, builder, signature, arguments):
        pointer = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), generate


@intrinsic
def _float64_field(context, table, field):
    """A field of a table of int64 that holds the bits of a float64."""

    def generate(ctx, builder, signature, arguments):
        bits = builder.load(builder.gep(arguments[0], [arguments[1]]))
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.CPointer(types.int64), types.int64), generate


_VECTOR = ir.VectorType(_F32, LANES)
_FLOATS = types.CPointer(types.float32)


def _vector_at(builder, pointer, *offsets):
    """Pointer to the vector at the sum of some offsets, counted in elements."""
    for offset in offsets:
        pointer = builder.gep(pointer, [offset])
    return builder.bitcast(pointer, _VECTOR.as_pointer())


def _multiply_add(builder):
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")


def _load(builder, pointer):
    return builder.load(pointer, align=4)


@intrinsic
def _dot_2x4(context, query, q, key, k, width, score, s):
    """score[s + r*STAGE + t] = dot(query[q + r*width], key[k + t*width]) for 2 rows, 4 tokens."""

    def generate(ctx, builder, signature, arguments):
        query, q, key, k, width, score, s = arguments
        multiply_add = _multiply_add(builder)
        zero = ir.Constant(_VECTOR, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(8)]
        rows = [builder.add(q, builder.mul(width, _int64(i))) for i in range(2)]
        tokens = [builder.add(k, builder.mul(width, _int64(i))) for i in range(4)]
        with cgutils.for_range_slice(builder, _int64(0), width, _int64(LANES)) as (d, _):
            xs = [_load(builder, _vector_at(builder, query, row, d)) for row in rows]
            ys = [_load(builder, _vector_at(builder, key, token, d)) for token in tokens]
            for i, total in enumerate(sums):
                product = builder.call(multiply_add, [xs[i // 4], ys[i % 4], builder.load(total)])
                builder.store(product, total)
        for i, total in enumerate(sums):
            value = _across(builder, builder.load(total))
            at = builder.add(s, _int64(i // 4 * STAGE + i % 4))
            builder.store(value, builder.gep(score, [at]))
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(_FLOATS, i64, _FLOATS, i64, i64, _FLOATS, i64), generate


@intrinsic
def _add_2x4(context, weight, w, value, v, width, sums, s):
    """sums[s + r*width] += sum of weight[w + r*STAGE + t] * value[v + t*width] over 4 tokens."""

    def generate(ctx, builder, signature, arguments):
        weight, w, value, v, width, sums, s = arguments
        multiply_add = _multiply_add(builder)
        weights = []
        for i in range(8):
            at = builder.add(w, _int64(i // 4 * STAGE + i % 4))
            one = builder.load(builder.gep(weight, [at]))
            weights.append(_spread(builder, one))
        rows = [builder.add(s, builder.mul(width, _int64(i))) for i in range(2)]
        tokens = [builder.add(v, builder.mul(width, _int64(i))) for i in range(4)]
        with cgutils.for_range_slice(builder, _int64(0), width, _int64(LANES)) as (d, _):
            ys = [_load(builder, _vector_at(builder, value, token, d)) for token in tokens]
            for i, row in enumerate(rows):
                pointer = _vector_at(builder, sums, row, d)
                total = _load(builder, pointer)
                for j in range(4):
                    total = builder.call(multiply_add, [weights[4 * i + j], ys[j], total])
                builder.store(total, pointer, align=4)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(_FLOATS, i64, _FLOATS, i64, i64, _FLOATS, i64), generate


@intrinsic
def _sum(context, score, at, n):
    """The sum of score[at : at + n], for n a multiple of LANES, lane by lane and then across."""

    def generate(ctx, builder, signature, arguments):
        score, at, n = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
        with cgutils.for_range_slice(builder, _int64(0), n, _int64(LANES)) as (t, _):
            one = _load(builder, _vector_at(builder, score, at, t))
            builder.store(builder.fadd(builder.load(total), one), total)
        return _across(builder, builder.load(total))

    return types.float32(_FLOATS, types.int64, types.int64), generate


def _across(builder, vector):
    """The sum of a vector's elements."""
    kind = ir.FunctionType(_F32, [_F32, _VECTOR])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    add_up = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(add_up, [ir.Constant(_F32, 0.0), vector], fastmath=("reassoc",))


def _int64(value):
    return ir.Constant(ir.IntType(64), value)


def _spread(builder, value):
    """A vector of equal elements."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, LANES), None)
    return builder.shuffle_vector(single, undefined, mask)


@intrinsic
def _widen(context, element):
    """An element of a KV array or a query as float32, exactly."""
    if element == types.float32:
        return types.float32(types.float32), lambda ctx, builder, signature, arguments: arguments[0]

    def generate(ctx, builder, signature, arguments):
        bits = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _narrow(context, value, like):
    """float32 `value` as an element of the type of `like`, rounded to nearest, ties to even."""
    if like == types.float32:
        return (
            types.float32(types.float32, types.float32),
            lambda ctx, builder, signature, arguments: arguments[0],
        )

    def generate(ctx, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        top = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_nan, ir.Constant(_I16, 0x7FC0), top)

    return types.uint16(types.float32, types.uint16), generate


@intrinsic
def _rounded(context, value):
    """float32 to the nearest integer, as float32."""

    def generate(ctx, builder, signature, arguments):
        rint = builder.module.declare_intrinsic("llvm.rint", [_F32])
        return builder.call(rint, arguments)

    return types.float32(types.float32), generate


@intrinsic
def _times_power(context, value, n):
    """`value * 2**n` for float32 integers n, as long as the result is a normal number."""

    def generate(ctx, builder, signature, arguments):
        exponent = builder.shl(builder.fptosi(arguments[1], _I32), ir.Constant(_I32, 23))
        return builder.bitcast(builder.add(builder.bitcast(arguments[0], _I32), exponent), _F32)

    return types.float32(types.float32, types.float32), generate


_LOWEST = np.float32(-87.0)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(0.5)


@njit(error_model="numpy")
def _exp(x):
    """exp of float32 x <= 0 to 2 units in the last place; 0 below -87, where it is under 2e-38.

    The Cephes polynomial, without branches or calls, so that loops over it become vector code.
    Nothing here relies on the order of additions, as callers may be compiled with fast-math.
    """
    bounded = max(x, _LOWEST)
    n = _rounded(bounded * _LOG2_E)
    y = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * y + _C1) * y + _C2) * y + _C3) * y + _C4) * y + _C5
    result = _times_power(p * y * y + y + _ONE, n)
    return result if x > _LOWEST else _ZERO


_TANH_POLYNOMIAL = np.float32(0.625)
_T0 = np.float32(-5.70498872745e-3)
_T1 = np.float32(2.06390887954e-2)
_T2 = np.float32(-5.37397155531e-2)
_T3 = np.float32(1.33314422036e-1)
_T4 = np.float32(-3.33332819422e-1)
_TWO = np.float32(2.0)


@njit(error_model="numpy")
def _tanh(x):
    """tanh of float32 x to about 2e-7 of its value; a polynomial where exp would cancel."""
    size = abs(x)
    e = _exp(-_TWO * size)
    far = (_ONE - e) / (_ONE + e)
    z = x * x
    near = ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4) * z * size + size
    result = near if size < _TANH_POLYNOMIAL else far
    return -result if x < _ZERO else result


@njit(fastmath=_FAST, error_model="numpy")
def _stage(source, at, step, n, dim, width, out):
    """Widen `n` rows of `dim` elements, `step` apart, into rows of `width` at `out`.

    Rows up to the next multiple of LANES become zero: what they held may be infinite, and 0
    times that would be NaN in a sequence that has nothing to do with it.
    """
    for t in range(n):
        row = at + t * step
        for d in range(dim):
            out[t * width + d] = _widen(source[row + d])
    for d in range(n * width, (n + LANES - 1) // LANES * LANES * width):
        out[d] = _ZERO


@njit(fastmath=_FAST, error_model="numpy")
def _softmax(score, first, best, total, sums, rows, n, width):
    """Turn scores into weights against the running maximum; rescale what was summed before.

    Scores are those of rows first .. first + rows - 1.

    `n` is a multiple of LANES: so the order of summation does not depend on how many tokens of
    the block there are, and a prompt comes out the same in whichever chunks it is computed.
    """
    for i in range(rows):
        at, r = i * STAGE, first + i
        top = best[r]
        for t in range(n):
            top = max(top, score[at + t])
        if top > best[r]:
            shrink = _exp(best[r] - top)
            best[r] = top
            total[r] *= shrink
            for d in range(width):
                sums[r * width + d] *= shrink
        for t in range(n):
            score[at + t] = _exp(score[at + t] - top)
        total[r] += _sum(score, at, n)


@njit(fastmath=_FAST, error_model="numpy")
def _attend(table, source, target, kv):
    heads, kv_heads, dim = table[HEADS], table[KV_HEADS], table[HEAD_DIM]
    group = heads // kv_heads
    block_tokens, block_stride = table[BLOCK_TOKENS], table[BLOCK_STRIDE]
    step = kv_heads * dim
    scale = np.float32(_float64_field(table, SCALE))
    softcap = np.float32(_float64_field(table, SOFTCAP))
    uncap = _ONE / softcap
    window = table[WINDOW]
    tiles = _int64_at(table[TILES])
    blocks = _int32_at(table[TABLES])

    # This worker's part of the scratch memory. Rows are padded with zeros to whole vectors.
    width = (dim + LANES - 1) // LANES * LANES
    max_rows, item_heads = table[MAX_ROWS], table[ITEM_HEADS]
    all_rows = item_heads * max_rows
    worker = _fetch_add(table, WORKERS, 1)
    place = table[SCRATCH] + worker * table[SCRATCH_BYTES]
    query = _float32_at(place)
    sums = _float32_at(place + 4 * all_rows * width)
    best = _float32_at(place + 8 * all_rows * width)
    total = _float32_at(place + 8 * all_rows * width + 4 * all_rows)
    place += 8 * all_rows * (width + 1)
    stage = _float32_at(place)
    score = _float32_at(place + 4 * STAGE * width)
    for d in range(all_rows * width):
        query[d] = _ZERO
    for d in range(STAGE * width):
        stage[d] = _ZERO

    parts = kv_heads // item_heads
    while True:
        # Tiles late in a prompt have the most to do: they go first.
        item = table[ITEMS] - 1 - _fetch_add(table, NEXT, 1)
        if item < 0:
            break
        tile = item // parts * 4
        first_head = item % parts * item_heads
        first, n_tokens = tiles[tile], tiles[tile + 1]
        position, at = tiles[tile + 2], tiles[tile + 3]
        rows = n_tokens * group
        padded = rows + rows % 2
        for h in range(item_heads):
            for r in range(rows):
                head = (first_head + h) * group + r % group
                q = (first + r // group) * table[SOURCE_TOKEN] + head * table[SOURCE_HEAD]
                row = (h * max_rows + r) * width
                for d in range(dim):
                    query[row + d] = _widen(source[q + d]) * scale
            for r in range(h * max_rows + rows, h * max_rows + padded):
                for d in range(width):
                    query[r * width + d] = _ZERO
        for r in range(all_rows):
            best[r] = _NONE
            total[r] = _ZERO
        for d in range(all_rows * width):
            sums[d] = _ZERO

        context = position + n_tokens
        oldest = max(0, position + 1 - window)
        for start in range(oldest // block_tokens * block_tokens, context, block_tokens):
            block = np.int64(blocks[at + start // block_tokens]) * block_stride
            for offset in range(0, min(block_tokens, context - start), STAGE):
                n = min(STAGE, block_tokens - offset, context - start - offset)
                whole = (n + LANES - 1) // LANES * LANES
                token = start + offset
                for h in range(item_heads):
                    key = block + offset * step + (first_head + h) * dim
                    above = h * max_rows
                    _stage(kv, key, step, n, dim, width, stage)
                    for r in range(0, padded, 2):
                        q = (above + r) * width
                        for t in range(0, n, 4):
                            _dot_2x4(query, q, stage, t * width, width, score, r * STAGE + t)
                    if softcap > _ZERO:
                        for r in range(padded):
                            for t in range(whole):
                                i = r * STAGE + t
                                score[i] = softcap * _tanh(score[i] * uncap)
                    if whole > n or token + n > position + 1 or token < context - window:
                        for r in range(padded):
                            last = position + r // group
                            unseen = max(0, min(whole, last + 1 - window - token))
                            seen = max(unseen, min(n, last + 1 - token))
                            for t in range(unseen):
                                score[r * STAGE + t] = _MASKED
                            for t in range(seen, whole):
                                score[r * STAGE + t] = _MASKED
                    _softmax(score, above, best, total, sums, padded, whole, width)
                    _stage(kv, key + block_tokens * step, step, n, dim, width, stage)
                    for r in range(0, padded, 2):
                        to = (above + r) * width
                        for t in range(0, n, 4):
                            _add_2x4(score, r * STAGE + t, stage, t * width, width, sums, to)

        for h in range(item_heads):
            for r in range(rows):
                row = h * max_rows + r
                inverse = _ONE / total[row]
                head = (first_head + h) * group + r % group
                out = ((first + r // group) * heads + head) * dim
                for d in range(dim):
                    target[out + d] = _narrow(sums[row * width + d] * inverse, target[0])


@njit(error_model="numpy")
def _write(table, keys, values, kv):
    kv_heads, dim = table[KV_HEADS], table[HEAD_DIM]
    block_tokens = table[BLOCK_TOKENS]
    step = kv_heads * dim
    tiles = _int64_at(table[TILES])
    blocks = _int32_at(table[TABLES])
    while True:
        item = _fetch_add(table, NEXT, 1)
        if item >= table[ITEMS]:
            break
        tile = item * 4
        for i in range(tiles[tile + 1]):
            token = tiles[tile] + i
            position = tiles[tile + 2] + i
            block = np.int64(blocks[tiles[tile + 3] + position // block_tokens])
            to = block * table[BLOCK_STRIDE] + position % block_tokens * step
            for h in range(kv_heads):
                k = token * table[SOURCE_TOKEN] + h * table[SOURCE_HEAD]
                v = token * table[VALUE_TOKEN] + h * table[VALUE_HEAD]
                for d in range(dim):
                    kv[to + h * dim + d] = keys[k + d]
                for d in range(dim):
                    kv[to + block_tokens * step + h * dim + d] = values[v + d]


_SIGNATURE = types.void(types.CPointer(types.int64))


def _attend_float32(table):
    _attend(table, _float32_at(table[SOURCE]), _float32_at(table[TARGET]), _float32_at(table[KV]))


def _attend_bfloat16(table):
    _attend(table, _uint16_at(table[SOURCE]), _uint16_at(table[TARGET]), _uint16_at(table[KV]))


def _attend_float32_over_bfloat16(table):
    _attend(table, _float32_at(table[SOURCE]), _float32_at(table[TARGET]), _uint16_at(table[KV]))


def _write_float32(table):
    _write(table, _float32_at(table[SOURCE]), _float32_at(table[VALUE]), _float32_at(table[KV]))


def _write_bfloat16(table):
    _write(table, _uint16_at(table[SOURCE]), _uint16_at(table[VALUE]), _uint16_at(table[KV]))


_PLAIN = {
    "attend_float32_over_float32": _attend_float32,
    "attend_bfloat16_over_bfloat16": _attend_bfloat16,
    "attend_float32_over_bfloat16": _attend_float32_over_bfloat16,
    "write_float32": _write_float32,
    "write_bfloat16": _write_bfloat16,
}
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a compiled kernel, from Numba's cache if it is there. Call it from one thread."""
    if name not in _compiled:
        _compiled[name] = cfunc(_SIGNATURE, cache=True, error_model="numpy")(_PLAIN[name])
    return int(_compiled[name].address)
