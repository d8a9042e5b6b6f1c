"""The compiled part of paged attention: what one thread does. `paged_attention.py` calls it.

All compiled code but `intrinsics.py` is in this one file, because Numba's cache looks for changes
in the file of the function that it compiles, and not in those that it calls.

Kernels take one argument, the address of a table of int64 whose fields are the constants below.
Threads share work through an atomic counter in it, so any number of them may call one kernel on
one table at the same time.

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

import llvmlite.ir as ir
import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.intrinsics import (
    fetch_add,
    float32_at,
    int32_at,
    int64_at,
    narrow,
    uint16_at,
    widen,
)

# Fields of the table.
NEXT = 0
"""Next item to be taken; 0 before each run."""
ITEMS = 1
"""Items in all."""
TILES = 2
"""Address of int64 (tiles, 4): first row of the batch, tokens, position of the first, table at."""
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
"""Attend: most rows of a tile."""
WORKERS = 19
"""Attend: threads so far; 0 before each run."""
SCRATCH = 20
"""Attend: address of `SCRATCH_BYTES` for each worker, a multiple of `ALIGNMENT`."""
SCRATCH_BYTES = 21
ITEM_HEADS = 22
"""Attend: KV heads of an item; divides KV_HEADS."""
SOFTCAP = 23
"""Attend: scores become softcap * tanh(score / softcap); bits of a float64, 0 for as they are."""
WINDOW = 24
"""Attend: positions that a token sees, its own and those before it; at least 1."""
ORDER = 25
"""Attend: address of int64 (items / parts, 3): tile, split or -1 for all, slot of its sums; parts =
KV_HEADS / ITEM_HEADS, the parts of one entry being items one after the other."""
SLOTS = 26
"""Attend: address of `slot_floats` float32 for each slot. A tile's slots lie side by side."""
PENDING = 27
"""Attend: address of int64 (tiles, parts): splits done. 0 before each run, and after it."""
SINKS = 28
"""Attend: address of a float32 for each query head, which is one more score of its rows that no
value belongs to; 0: there are none."""
N_FIELDS = 29

NO_WINDOW = 1 << 62
"""A window that no context fills."""
CHUNK = 64
"""Tokens whose scores are there at once."""
SPLIT = 256
"""Tokens from whose sums on new sums begin, to be merged later; a multiple of CHUNK."""
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""float32 in a vector of the inner loops: a register of AVX-512 or AVX2."""
ALIGNMENT = 64
MOST_ROWS_IN_PLACE = 8
VALUE_STEP = 8
"""Tokens whose values go through all heads before the next ones."""


def row_width(head_dim: int) -> int:
    """Elements of a row of queries or sums: a head, padded with zeros to whole vectors."""
    return (head_dim + LANES - 1) // LANES * LANES


def scratch_bytes(max_rows: int, item_heads: int, head_dim: int) -> int:
    """What one worker needs to attend: queries, two times sums, maxima and totals; scores, offsets
    of tokens; K or V where they have to be padded."""
    width, rows = row_width(head_dim), item_heads * max_rows
    padded = CHUNK * width if _is_staged(max_rows, head_dim) else 0
    n_bytes = 4 * (rows * (3 * width + CHUNK + 4) + padded) + 16 * (CHUNK + LANES)
    return (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _is_staged(rows, head_dim):
    """Whether K and V are widened into a buffer first, and not read in place.

    Many rows read them many times, and heads that are no whole vectors need padding.
    """
    return rows > MOST_ROWS_IN_PLACE or head_dim % LANES != 0


def slot_floats(max_rows: int, kv_heads: int, head_dim: int) -> int:
    """float32 of a slot: sums, maxima and totals of all rows of a tile."""
    return max_rows * kv_heads * (row_width(head_dim) + 2)


_jit_staged = njit(_is_staged)

_MASKED = np.float32(-1e30)
"""The score of a token that a row does not see."""
_NONE = np.float32(-5e29)
"""The running maximum before the first token: below any score, but so far above `_MASKED` that the
weight of a masked token is 0 even where all are masked."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


# What Numba cannot say: an exp that vectorises, and loops over vectors held in registers.

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)


@intrinsic
def _float64_field(context, table, field):
    """A field of a table of int64 that holds the bits of a float64."""

    def generate(ctx, builder, signature, arguments):
        bits = builder.load(builder.gep(arguments[0], [arguments[1]]))
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.CPointer(types.int64), types.int64), generate


_VECTOR = ir.VectorType(_F32, LANES)
_FLOATS = types.CPointer(types.float32)
_OFFSETS = types.CPointer(types.int64)


def _int64(value):
    return ir.Constant(_I64, value)


def _at(builder, pointer, *offsets):
    """Pointer to the element at the sum of some offsets."""
    for offset in offsets:
        pointer = builder.gep(pointer, [offset])
    return pointer


def _load(builder, pointer):
    """The vector of float32 that begins at an element: float32, or bfloat16 widened exactly."""
    kind = pointer.type.pointee
    if kind == _F32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    bits = ir.VectorType(_I16, LANES)
    halves = builder.load(builder.bitcast(pointer, bits.as_pointer()), align=2)
    wide = ir.VectorType(_I32, LANES)
    shift = ir.Constant(wide, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, wide), shift), _VECTOR)


def _store(builder, vector, pointer):
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def _call(builder, name, *arguments):
    """An intrinsic of LLVM whose arguments and result are all float32, or all vectors of them."""
    kind = arguments[0].type
    suffix = "f32" if kind == _F32 else f"v{LANES}f32"
    function = ir.FunctionType(kind, [kind] * len(arguments))
    found = cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}")
    return builder.call(found, arguments)


def _multiply_add(builder, a, b, c):
    return _call(builder, "fmuladd", a, b, c)


def _pick(builder, a, b, lanes):
    """The vector of some lanes of `a`, and of `b` if counted on."""
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def _spread(builder, value):
    """A vector of equal elements."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return _pick(builder, single, undefined, [0] * LANES)


def _totals(builder, vectors):
    """The sums across each of LANES vectors, as one vector in their order.

    Each is added up as the same tree: upper half to lower half, and so on.
    """
    segment = LANES
    while segment > 1:
        half, n = segment // 2, len(vectors) // 2
        lower = [
            base + s + i
            for s in range(0, LANES, segment)
            for base in (0, LANES)
            for i in range(half)
        ]
        upper = [lane + half for lane in lower]
        vectors = [
            builder.fadd(
                _pick(builder, vectors[i], vectors[i + n], lower),
                _pick(builder, vectors[i], vectors[i + n], upper),
            )
            for i in range(n)
        ]
        segment = half
    return vectors[0]


def _prefetch(builder, pointer):
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    builder.call(function, [address, read, keep, data])


def _dot_of(n_heads, n_rows, prefetch):
    n_tokens = LANES // (n_heads * n_rows)

    def dot(context, query, q, width, kv, offsets, t, shift, ahead, shift_ahead, score, s):
        """score[s + r*CHUNK + i] = dot(query[q + r*width], kv[offsets[t + i] + shift]).

        For rows 0 <= r < heads * rows, of which each head has so many, one head after the other.
        Meanwhile fetches kv[offsets[ahead + i] + shift_ahead].
        """

        def generate(ctx, builder, signature, arguments):
            query, q, width, kv, offsets, t, shift, ahead, shift_ahead, score, s = arguments
            zero = ir.Constant(_VECTOR, None)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(LANES)]
            rows = [
                _at(builder, query, q, builder.mul(width, _int64(r)))
                for r in range(n_heads * n_rows)
            ]
            heads = [builder.mul(width, _int64(h)) for h in range(n_heads)]

            def tokens_at(first, shift):
                return [
                    _at(builder, kv, builder.load(_at(builder, offsets, first, _int64(i))), shift)
                    for i in range(n_tokens)
                ]

            tokens = tokens_at(t, shift)
            later = tokens_at(ahead, shift_ahead) if prefetch else []
            with cgutils.for_range_slice(builder, _int64(0), width, _int64(LANES)) as (d, _):
                for h, head in enumerate(heads):
                    xs = [
                        _load(builder, _at(builder, row, d)) for row in rows[h * n_rows :][:n_rows]
                    ]
                    place = builder.add(d, head) if h else d
                    for i, token in enumerate(tokens):
                        y = _load(builder, _at(builder, token, place))
                        if prefetch:
                            _prefetch(builder, _at(builder, later[i], place))
                        for r, x in enumerate(xs):
                            total = sums[(h * n_rows + r) * n_tokens + i]
                            product = _multiply_add(builder, x, y, builder.load(total))
                            builder.store(product, total)
            totals = _totals(builder, [builder.load(total) for total in sums])
            for r in range(n_heads * n_rows):
                lanes = list(range(r * n_tokens, (r + 1) * n_tokens))
                to = _at(builder, score, s, _int64(r * CHUNK))
                _store(builder, _pick(builder, totals, totals, lanes), to)
            return ctx.get_dummy_value()

        i64 = types.int64
        given = (_FLOATS, i64, i64, kv, _OFFSETS, i64, i64, i64, i64, _FLOATS, i64)
        return types.void(*given), generate

    return intrinsic(dot)


def _add_of(n_rows, n_vectors, prefetch):
    def add(context, weight, w, kv, offsets, t, n, shift, ahead, shift_ahead, sums, s, width):
        """sums[s + r*width] += sum of weight[w + r*CHUNK + i] * kv[offsets[t + i] + shift], i < n.

        Of so many vectors of each row, token by token. Meanwhile fetches what dot would.
        """

        def generate(ctx, builder, signature, arguments):
            weight, w, kv, offsets, t, n, shift, ahead, shift_ahead, sums, s, width = arguments
            places = [
                _at(builder, sums, s, builder.mul(width, _int64(r)), _int64(v * LANES))
                for r in range(n_rows)
                for v in range(n_vectors)
            ]
            totals = [cgutils.alloca_once_value(builder, _load(builder, place)) for place in places]
            line = ALIGNMENT // (4 if kv.type.pointee == _F32 else 2)
            with cgutils.for_range_slice(builder, _int64(0), n, _int64(1)) as (i, _):
                token = _at(builder, kv, builder.load(_at(builder, offsets, t, i)), shift)
                if prefetch:
                    at = builder.load(_at(builder, offsets, ahead, i))
                    for v in range(0, n_vectors * LANES, line):
                        _prefetch(builder, _at(builder, kv, at, shift_ahead, _int64(v)))
                ys = [
                    _load(builder, _at(builder, token, _int64(v * LANES))) for v in range(n_vectors)
                ]
                for r in range(n_rows):
                    one = builder.load(_at(builder, weight, w, _int64(r * CHUNK), i))
                    x = _spread(builder, one)
                    for v, y in enumerate(ys):
                        total = totals[r * n_vectors + v]
                        builder.store(_multiply_add(builder, x, y, builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                _store(builder, builder.load(total), place)
            return ctx.get_dummy_value()

        i64 = types.int64
        given = (_FLOATS, i64, kv, _OFFSETS, i64, i64, i64, i64, i64, _FLOATS, i64, i64)
        return types.void(*given), generate

    return intrinsic(add)


@intrinsic
def _stretch(context, source, at, out, to, n, scale):
    """out[to : to + n] = source[at : at + n], widened, times scale; n is a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        source, at, out, to, n, scale = arguments
        scales = _spread(builder, scale)
        with cgutils.for_range_slice(builder, _int64(0), n, _int64(LANES)) as (d, _):
            one = builder.fmul(_load(builder, _at(builder, source, at, d)), scales)
            _store(builder, one, _at(builder, out, to, d))
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(source, i64, _FLOATS, i64, i64, types.float32), generate


_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOWEST = -87.0
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
_TANH_NEAR = 0.625


def _constant(kind, value):
    """float32 `value` as a scalar, or in all lanes of a vector."""
    value = float(np.float32(value))
    return ir.Constant(kind, value if kind == _F32 else [value] * LANES)


def _polynomial(builder, x, factors):
    result = _constant(x.type, factors[0])
    for factor in factors[1:]:
        result = _multiply_add(builder, result, x, _constant(x.type, factor))
    return result


def _exp_of(builder, x):
    """exp of float32 x <= 0 to 2 units in the last place; 0 below -87, where it is under 2e-38."""
    kind = x.type
    lowest, one = _constant(kind, _LOWEST), _constant(kind, 1.0)
    small = builder.fcmp_ordered("<", x, lowest)
    bounded = builder.select(small, lowest, x)
    n = _call(builder, "rint", builder.fmul(bounded, _constant(kind, _LOG2_E)))
    y = _multiply_add(builder, n, _constant(kind, -_LN2_HIGH), bounded)
    y = _multiply_add(builder, n, _constant(kind, -_LN2_LOW), y)
    square = builder.fmul(y, y)
    tail = _multiply_add(builder, _polynomial(builder, y, _EXP), square, builder.fadd(y, one))
    # Times two to the n: the result is a normal number.
    whole = _I32 if kind == _F32 else ir.VectorType(_I32, LANES)
    shift = ir.Constant(whole, 23 if kind == _F32 else [23] * LANES)
    exponent = builder.shl(builder.fptosi(n, whole), shift)
    result = builder.bitcast(builder.add(builder.bitcast(tail, whole), exponent), kind)
    return builder.select(small, _constant(kind, 0.0), result)


def _tanh_of(builder, x):
    """tanh of float32 x to about 2e-7 of its value; a polynomial where exp would cancel."""
    kind = x.type
    one = _constant(kind, 1.0)
    size = _call(builder, "fabs", x)
    e = _exp_of(builder, builder.fmul(size, _constant(kind, -2.0)))
    far = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    z = builder.fmul(x, x)
    cube = builder.fmul(z, size)
    near = _multiply_add(builder, _polynomial(builder, z, _TANH), cube, size)
    is_near = builder.fcmp_ordered("<", size, _constant(kind, _TANH_NEAR))
    result = builder.select(is_near, near, far)
    return _call(builder, "copysign", result, x)


@intrinsic
def _exp(context, x):
    return types.float32(types.float32), lambda ctx, builder, signature, given: _exp_of(
        builder, given[0]
    )


@intrinsic
def _weigh(context, score, at, n, top):
    """score[at : at + n] = exp(score - top), and their sum; n > 0 is a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        score, at, n, top = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
        tops = _spread(builder, top)
        with cgutils.for_range_slice(builder, _int64(0), n, _int64(LANES)) as (t, _):
            pointer = _at(builder, score, at, t)
            one = _exp_of(builder, builder.fsub(_load(builder, pointer), tops))
            _store(builder, one, pointer)
            builder.store(builder.fadd(builder.load(total), one), total)
        return _across(builder, builder.load(total), builder.fadd)

    i64 = types.int64
    return types.float32(_FLOATS, i64, i64, types.float32), generate


@intrinsic
def _largest(context, score, at, n):
    """The largest of score[at : at + n], for n > 0 a multiple of LANES."""

    def greater(builder):
        return lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def generate(ctx, builder, signature, arguments):
        score, at, n = arguments
        found = cgutils.alloca_once_value(builder, _load(builder, _at(builder, score, at)))
        with cgutils.for_range_slice(builder, _int64(LANES), n, _int64(LANES)) as (t, _):
            one = _load(builder, _at(builder, score, at, t))
            builder.store(greater(builder)(builder.load(found), one), found)
        return _across(builder, builder.load(found), greater(builder))

    return types.float32(_FLOATS, types.int64, types.int64), generate


@intrinsic
def _cap(context, score, at, n, cap):
    """score[at : at + n] = cap * tanh(score / cap), for n a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        score, at, n, cap = arguments
        caps = _spread(builder, cap)
        with cgutils.for_range_slice(builder, _int64(0), n, _int64(LANES)) as (t, _):
            pointer = _at(builder, score, at, t)
            x = builder.fdiv(_load(builder, pointer), caps)
            _store(builder, builder.fmul(caps, _tanh_of(builder, x)), pointer)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(_FLOATS, i64, i64, types.float32), generate


def _across(builder, vector, combine):
    """The lanes of a vector combined: upper half with lower half, and so on."""
    half = LANES // 2
    while half:
        lower, upper = list(range(half)), list(range(half, 2 * half))
        vector = combine(
            _pick(builder, vector, vector, lower), _pick(builder, vector, vector, upper)
        )
        half //= 2
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@njit(error_model="numpy")
def _place(table, blocks, chunk, first, n, offsets):
    """Offsets of K of the tokens at positions from chunk on, head 0; CHUNK + LANES of them.

    Tokens before `first`, and from `n` on, stand where the nearest other one does: they are
    computed with, and masked. Nothing else is read.
    """
    step = table[KV_HEADS] * table[HEAD_DIM]
    block_tokens, stride = table[BLOCK_TOKENS], table[BLOCK_STRIDE]
    at = (chunk + first) // block_tokens
    inside = chunk + first - at * block_tokens
    block = np.int64(blocks[at]) * stride
    for t in range(first, n):
        if inside == block_tokens:
            at, inside = at + 1, 0
            block = np.int64(blocks[at]) * stride
        offsets[t] = block + inside * step
        inside += 1
    for t in range(first):
        offsets[t] = offsets[first]
    for t in range(n, CHUNK + LANES):
        offsets[t] = offsets[n - 1]


@njit(error_model="numpy")
def _widen_row(source, at, out, to, dim, width, scale):
    """A head times `scale` into a row of `width`, zero beyond `dim`."""
    whole = dim // LANES * LANES
    _stretch(source, at, out, to, whole, scale)
    for d in range(whole, dim):
        out[to + d] = widen(source[at + d]) * scale
    for d in range(dim, width):
        out[to + d] = _ZERO


@njit(error_model="numpy")
def _pad(source, offsets, shift, n, dim, width, out):
    """Widen n tokens into rows of `width` at `out`, zero beyond `dim`."""
    for t in range(n):
        _widen_row(source, offsets[t] + shift, out, t * width, dim, width, _ONE)


def _named(function, prefetch):
    """Compile one of two functions that are alike but for what they fetch ahead, by a name of its
    own: in one process, code loaded from Numba's cache goes by names and types alone."""
    function.__qualname__ = f"{function.__name__}_{'in_place' if prefetch else 'staged'}"
    return njit(error_model="numpy")(function)


def _scores_of(prefetch):
    dot_4, dot_2x2, dot_4x1 = (
        _dot_of(1, 4, prefetch),
        _dot_of(2, 2, prefetch),
        _dot_of(4, 1, prefetch),
    )
    dot_2, dot_1 = _dot_of(1, 2, prefetch), _dot_of(1, 1, prefetch)

    def scores(query, heads, rows, width, kv, offsets, n, shift, values, score):
        """Of all rows of some heads against n tokens; those of the last LANES may be too many.

        `shift` leads from K of a token to that of the first head, and `values` from K to V.
        """
        step = LANES // 4 if rows % 4 == 0 or (heads * rows % 4 == 0 and rows < 3) else LANES
        for t in range(0, n, step):
            ahead, start = t + step, shift
            if ahead >= n:
                ahead, start = 0, shift + values
            h = 0
            while rows == 1 and heads % 4 == 0 and h < heads:
                a, b = shift + h * width, start + h * width
                at = h * CHUNK + t
                dot_4x1(query, h * width, width, kv, offsets, t, a, ahead, b, score, at)
                h += 4
            while rows == 2 and heads % 2 == 0 and h < heads:
                a, b = shift + h * width, start + h * width
                q, at = 2 * h * width, 2 * h * CHUNK + t
                dot_2x2(query, q, width, kv, offsets, t, a, ahead, b, score, at)
                h += 2
            while h < heads:
                a, b = shift + h * width, start + h * width
                r, end = h * rows, h * rows + rows
                while r + 4 <= end:
                    for i in range(0, step, LANES // 4):
                        at = r * CHUNK + t + i
                        dot_4(
                            query, r * width, width, kv, offsets, t + i, a, ahead + i, b, score, at
                        )
                    r += 4
                if r + 2 <= end:
                    for i in range(0, step, LANES // 2):
                        at = r * CHUNK + t + i
                        dot_2(
                            query, r * width, width, kv, offsets, t + i, a, ahead + i, b, score, at
                        )
                    r += 2
                if r < end:
                    at = r * CHUNK + t
                    dot_1(query, r * width, width, kv, offsets, t, a, ahead, b, score, at)
                h += 1

    return _named(scores, prefetch)


def _add_values_of(prefetch):
    wide = LANES // 4
    add_4_wide, add_2_wide, add_1_wide = (
        _add_of(4, wide, prefetch),
        _add_of(2, wide, prefetch),
        _add_of(1, wide, prefetch),
    )
    add_4, add_2, add_1 = _add_of(4, 1, prefetch), _add_of(2, 1, prefetch), _add_of(1, 1, prefetch)
    much = wide * LANES

    def add_values(weight, heads, rows, width, kv, offsets, n, step, shift, back, sums):
        """Sums of all rows of some heads over n tokens, `step` at a time.

        `shift` leads from K of a token to V of the first head, and `back` from V to K.
        """
        for t in range(0, n, step):
            ahead, start = t + step, shift
            if ahead >= n:
                ahead, start = CHUNK, shift - back
            some = min(step, n - t)
            for h in range(heads):
                d = 0
                while d < width:
                    a, b = shift + h * width + d, start + h * width + d
                    r, end = h * rows, h * rows + rows
                    if d + much <= width:
                        while r + 4 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_4_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                            r += 4
                        if r + 2 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_2_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                            r += 2
                        if r < end:
                            w, to = r * CHUNK + t, r * width + d
                            add_1_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                        d += much
                    else:
                        while r + 4 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_4(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                            r += 4
                        if r + 2 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_2(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                            r += 2
                        if r < end:
                            w, to = r * CHUNK + t, r * width + d
                            add_1(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                        d += LANES

    return _named(add_values, prefetch)


_scores_in_place, _scores_staged = _scores_of(True), _scores_of(False)
_add_in_place, _add_staged = _add_values_of(True), _add_values_of(False)


@njit(error_model="numpy")
def _softmax(score, best, total, sums, rows, n, width):
    """Turn scores into weights against the running maximum; rescale the sums so far.

    `n` is a multiple of LANES.
    """
    for r in range(rows):
        at = r * CHUNK
        top = _largest(score, at, n)
        if top > best[r]:
            shrink = _exp(best[r] - top)
            best[r] = top
            total[r] *= shrink
            for d in range(r * width, r * width + width):
                sums[d] *= shrink
        total[r] += _weigh(score, at, n, best[r])


@njit(error_model="numpy")
def _clear(best, total, sums, rows, width):
    for r in range(rows):
        best[r] = _NONE
        total[r] = _ZERO
    for d in range(rows * width):
        sums[d] = _ZERO


@njit(error_model="numpy")
def _merge(best, total, sums, best_2, total_2, sums_2, rows, width):
    """Add the second sums to the first."""
    for r in range(rows):
        top = max(best[r], best_2[r])
        one, two = _exp(best[r] - top), _exp(best_2[r] - top)
        best[r] = top
        total[r] = total[r] * one + total_2[r] * two
        for d in range(r * width, r * width + width):
            sums[d] = sums[d] * one + sums_2[d] * two


@njit(error_model="numpy")
def _copy(best, total, sums, to, rows, width):
    for d in range(rows * width):
        to[d] = sums[d]
    for r in range(rows):
        to[rows * width + r] = best[r]
        to[rows * width + rows + r] = total[r]


@njit(error_model="numpy")
def _attend(table, source, target, kv):
    heads, kv_heads, dim = table[HEADS], table[KV_HEADS], table[HEAD_DIM]
    group = heads // kv_heads
    values = table[BLOCK_TOKENS] * kv_heads * dim
    scale = np.float32(_float64_field(table, SCALE))
    softcap = np.float32(_float64_field(table, SOFTCAP))
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
    if _jit_staged(max_rows, dim):
        place += 4 * CHUNK * width
    offsets, places = int64_at(place), int64_at(place + 8 * (CHUNK + LANES))
    for t in range(CHUNK + LANES):
        places[t] = t * width
    place += 16 * (CHUNK + LANES)
    best = float32_at(place)
    total = float32_at(place + 4 * all_rows)
    best_all = float32_at(place + 8 * all_rows)
    total_all = float32_at(place + 12 * all_rows)

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
        staged = _jit_staged(rows, dim)
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
                    _widen_row(source, q, query, row, dim, width, scale)
        _clear(best_all, total_all, sums_all, item_heads * rows, width)
        for one in range(begin, end + 1):
            _clear(best, total, sums, item_heads * rows, width)
            start = max(one * SPLIT, oldest // CHUNK * CHUNK)
            for chunk in range(start, min(one * SPLIT + SPLIT, context), CHUNK):
                n = min(CHUNK, context - chunk)
                whole = (n + LANES - 1) // LANES * LANES
                ahead = min(CHUNK + LANES, context - chunk)
                _place(table, blocks, chunk, max(0, oldest - chunk), ahead, offsets)
                shift = first_head * dim
                if staged:
                    for h in range(item_heads):
                        _pad(kv, offsets, shift + h * dim, n, dim, width, padded)
                        q, at = query_at + 4 * h * rows * width, score_at + 4 * h * rows * CHUNK
                        _scores_staged(
                            float32_at(q), 1, rows, width, padded, places, n, 0, 0, float32_at(at)
                        )
                else:
                    _scores_in_place(
                        query, item_heads, rows, width, kv, offsets, n, shift, values, score
                    )
                if softcap > _ZERO:
                    for r in range(item_heads * rows):
                        _cap(score, r * CHUNK, whole, softcap)
                if whole > n or chunk + n > position + 1 or chunk < context - window:
                    for r in range(item_heads * rows):
                        last = position + r % rows // group
                        unseen = max(0, min(whole, last + 1 - window - chunk))
                        seen = max(unseen, min(n, last + 1 - chunk))
                        for t in range(r * CHUNK, r * CHUNK + unseen):
                            score[t] = _MASKED
                        for t in range(r * CHUNK + seen, r * CHUNK + whole):
                            score[t] = _MASKED
                _softmax(score, best, total, sums, item_heads * rows, whole, width)

                if staged:
                    for h in range(item_heads):
                        _pad(kv, offsets, shift + h * dim + values, n, dim, width, padded)
                        at, to = score_at + 4 * h * rows * CHUNK, sums_at + 4 * h * rows * width
                        _add_staged(
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
                    _add_in_place(
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
                _merge(best_all, total_all, sums_all, best, total, sums, item_heads * rows, width)

        if split >= 0:
            # Slots hold, part by part: sums, maxima, totals.
            base = table[SLOTS] + 4 * part * part_floats
            slot_bytes = 4 * parts * part_floats
            at = base + (slot + split) * slot_bytes
            n_sums = item_heads * rows * width
            if begin <= end:
                _copy(best, total, sums, float32_at(at), item_heads * rows, width)
            if fetch_add(pending, tile * parts + part, 1) < last_split:
                continue
            pending[tile * parts + part] = 0
            for one in range(first_split, last_split + 1):
                at = base + (slot + one) * slot_bytes
                best_2 = float32_at(at + 4 * n_sums)
                total_2 = float32_at(at + 4 * n_sums + 4 * item_heads * rows)
                _merge(
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
                inverse = _ONE / total_all[row]
                if table[SINKS] != 0:
                    sink = float32_at(table[SINKS])[head]
                    top = max(best_all[row], sink)
                    one = _exp(best_all[row] - top)
                    inverse = one / (total_all[row] * one + _exp(sink - top))
                out = ((first + r // group) * heads + head) * dim
                for d in range(dim):
                    target[out + d] = narrow(sums_all[row * width + d] * inverse, target[0])


@njit(error_model="numpy")
def _write(table, keys, values, kv):
    kv_heads, dim = table[KV_HEADS], table[HEAD_DIM]
    block_tokens = table[BLOCK_TOKENS]
    step = kv_heads * dim
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
            for h in range(kv_heads):
                k = token * table[SOURCE_TOKEN] + h * table[SOURCE_HEAD]
                v = token * table[VALUE_TOKEN] + h * table[VALUE_HEAD]
                for d in range(dim):
                    kv[to + h * dim + d] = keys[k + d]
                for d in range(dim):
                    kv[to + block_tokens * step + h * dim + d] = values[v + d]


_SIGNATURE = types.void(types.CPointer(types.int64))


def _attend_float32(table):
    _attend(table, float32_at(table[SOURCE]), float32_at(table[TARGET]), float32_at(table[KV]))


def _attend_bfloat16(table):
    _attend(table, uint16_at(table[SOURCE]), uint16_at(table[TARGET]), uint16_at(table[KV]))


def _attend_float32_over_bfloat16(table):
    _attend(table, float32_at(table[SOURCE]), float32_at(table[TARGET]), uint16_at(table[KV]))


def _write_float32(table):
    _write(table, float32_at(table[SOURCE]), float32_at(table[VALUE]), float32_at(table[KV]))


def _write_bfloat16(table):
    _write(table, uint16_at(table[SOURCE]), uint16_at(table[VALUE]), uint16_at(table[KV]))


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
