"""Define Numba intrinsics of paged attention on CPU: loops over vectors held in registers.

Used by `attention_code` and `attention_steps_code`.
Offsets and numbers of elements are int64; K, V, queries, scores and sums are pointers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.attention_table import ALIGNMENT, CHUNK
from ballast.kernels.vector_code import (
    F32,
    I8,
    LANES,
    VECTOR,
    broadcast,
    combine_lanes,
    element,
    exp_of,
    int64,
    load,
    multiply_add,
    pick_lanes,
    prefetch_at,
    store,
    sums_across,
    tanh_of,
)

_FLOATS = types.CPointer(types.float32)
_OFFSETS = types.CPointer(types.int64)


@intrinsic
def float64_field(context, table, field):
    """A field of a table of int64 that holds the bits of a float64."""

    def generate(ctx, builder, signature, arguments):
        bits = builder.load(builder.gep(arguments[0], [arguments[1]]))
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.CPointer(types.int64), types.int64), generate


def make_dot(n_heads, n_rows, prefetch):
    """Make the intrinsic of dot products of `n_rows` rows of each of `n_heads` heads."""
    n_tokens = LANES // (n_heads * n_rows)

    def dot(context, query, q, width, kv, offsets, t, shift, ahead, shift_ahead, score, s):
        """score[s + r*CHUNK + i] = dot(query[q + r*width], kv[offsets[t + i] + shift]).

        For rows 0 <= r < heads * rows, of which each head has so many, one head after the other.
        Meanwhile fetches kv[offsets[ahead + i] + shift_ahead].
        """

        def generate(ctx, builder, signature, arguments):
            query, q, width, kv, offsets, t, shift, ahead, shift_ahead, score, s = arguments
            zero = ir.Constant(VECTOR, None)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(LANES)]
            rows = [
                element(builder, query, q, builder.mul(width, int64(r)))
                for r in range(n_heads * n_rows)
            ]
            heads = [builder.mul(width, int64(h)) for h in range(n_heads)]

            def tokens_at(first, shift):
                return [
                    element(
                        builder,
                        kv,
                        builder.load(element(builder, offsets, first, int64(i))),
                        shift,
                    )
                    for i in range(n_tokens)
                ]

            tokens = tokens_at(t, shift)
            later = tokens_at(ahead, shift_ahead) if prefetch else []
            with cgutils.for_range_slice(builder, int64(0), width, int64(LANES)) as (d, _):
                for h, head in enumerate(heads):
                    xs = [
                        load(builder, element(builder, row, d))
                        for row in rows[h * n_rows :][:n_rows]
                    ]
                    place = builder.add(d, head) if h else d
                    for i, token in enumerate(tokens):
                        y = load(builder, element(builder, token, place))
                        if prefetch:
                            prefetch_at(builder, element(builder, later[i], place))
                        for r, x in enumerate(xs):
                            total = sums[(h * n_rows + r) * n_tokens + i]
                            product = multiply_add(builder, x, y, builder.load(total))
                            builder.store(product, total)
            totals = sums_across(builder, [builder.load(total) for total in sums])
            for r in range(n_heads * n_rows):
                lanes = list(range(r * n_tokens, (r + 1) * n_tokens))
                to = element(builder, score, s, int64(r * CHUNK))
                store(builder, pick_lanes(builder, totals, totals, lanes), to)
            return ctx.get_dummy_value()

        i64 = types.int64
        given = (_FLOATS, i64, i64, kv, _OFFSETS, i64, i64, i64, i64, _FLOATS, i64)
        return types.void(*given), generate

    return intrinsic(dot)


def make_add(n_rows, n_vectors, prefetch):
    """Make the intrinsic of sums of values of `n_rows` rows, `n_vectors` vectors at once."""

    def add(context, weight, w, kv, offsets, t, n, shift, ahead, shift_ahead, sums, s, width):
        """sums[s + r*width] += sum of weight[w + r*CHUNK + i] * kv[offsets[t + i] + shift], i < n.

        Of so many vectors of each row, token by token. Meanwhile fetches what dot would.
        """

        def generate(ctx, builder, signature, arguments):
            weight, w, kv, offsets, t, n, shift, ahead, shift_ahead, sums, s, width = arguments
            places = [
                element(
                    builder,
                    sums,
                    s,
                    builder.mul(width, int64(r)),
                    int64(v * LANES),
                )
                for r in range(n_rows)
                for v in range(n_vectors)
            ]
            totals = [cgutils.alloca_once_value(builder, load(builder, place)) for place in places]
            line = ALIGNMENT // {F32: 4, I8: 1}.get(kv.type.pointee, 2)
            with cgutils.for_range_slice(builder, int64(0), n, int64(1)) as (
                i,
                _,
            ):
                token = element(builder, kv, builder.load(element(builder, offsets, t, i)), shift)
                if prefetch:
                    at = builder.load(element(builder, offsets, ahead, i))
                    for v in range(0, n_vectors * LANES, line):
                        prefetch_at(builder, element(builder, kv, at, shift_ahead, int64(v)))
                ys = [
                    load(builder, element(builder, token, int64(v * LANES)))
                    for v in range(n_vectors)
                ]
                for r in range(n_rows):
                    one = builder.load(element(builder, weight, w, int64(r * CHUNK), i))
                    x = broadcast(builder, one)
                    for v, y in enumerate(ys):
                        total = totals[r * n_vectors + v]
                        builder.store(multiply_add(builder, x, y, builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                store(builder, builder.load(total), place)
            return ctx.get_dummy_value()

        i64 = types.int64
        given = (_FLOATS, i64, kv, _OFFSETS, i64, i64, i64, i64, i64, _FLOATS, i64, i64)
        return types.void(*given), generate

    return intrinsic(add)


@intrinsic
def widen_scaled(context, source, at, out, to, n, scale):
    """out[to : to + n] = source[at : at + n], widened, times scale; n is a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        source, at, out, to, n, scale = arguments
        scales = broadcast(builder, scale)
        with cgutils.for_range_slice(builder, int64(0), n, int64(LANES)) as (
            d,
            _,
        ):
            one = builder.fmul(load(builder, element(builder, source, at, d)), scales)
            store(builder, one, element(builder, out, to, d))
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(source, i64, _FLOATS, i64, i64, types.float32), generate


@intrinsic
def exp(context, x):
    """exp of float32 x <= 0, as `exp_of`."""
    return types.float32(types.float32), lambda ctx, builder, signature, given: exp_of(
        builder, given[0]
    )


@intrinsic
def exp_and_sum(context, score, at, n, top):
    """score[at : at + n] = exp(score - top), and their sum; n > 0 is a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        score, at, n, top = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None))
        tops = broadcast(builder, top)
        with cgutils.for_range_slice(builder, int64(0), n, int64(LANES)) as (
            t,
            _,
        ):
            pointer = element(builder, score, at, t)
            one = exp_of(builder, builder.fsub(load(builder, pointer), tops))
            store(builder, one, pointer)
            builder.store(builder.fadd(builder.load(total), one), total)
        return combine_lanes(builder, builder.load(total), builder.fadd)

    i64 = types.int64
    return types.float32(_FLOATS, i64, i64, types.float32), generate


@intrinsic
def largest(context, score, at, n):
    """Return the largest of score[at : at + n], for n > 0 a multiple of LANES."""

    def greater(builder):
        return lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def generate(ctx, builder, signature, arguments):
        score, at, n = arguments
        found = cgutils.alloca_once_value(builder, load(builder, element(builder, score, at)))
        with cgutils.for_range_slice(builder, int64(LANES), n, int64(LANES)) as (
            t,
            _,
        ):
            one = load(builder, element(builder, score, at, t))
            builder.store(greater(builder)(builder.load(found), one), found)
        return combine_lanes(builder, builder.load(found), greater(builder))

    return types.float32(_FLOATS, types.int64, types.int64), generate


@intrinsic
def soft_cap(context, score, at, n, cap):
    """score[at : at + n] = cap * tanh(score / cap), for n a multiple of LANES."""

    def generate(ctx, builder, signature, arguments):
        score, at, n, cap = arguments
        caps = broadcast(builder, cap)
        with cgutils.for_range_slice(builder, int64(0), n, int64(LANES)) as (
            t,
            _,
        ):
            pointer = element(builder, score, at, t)
            x = builder.fdiv(load(builder, pointer), caps)
            store(builder, builder.fmul(caps, tanh_of(builder, x)), pointer)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(_FLOATS, i64, i64, types.float32), generate
