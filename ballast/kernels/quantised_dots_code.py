"""Multiply quantised panels of four bits by activations rounded to int8, on CPU: the option
`linear: int8`.

A row's inputs are rounded to int8 in blocks of 32, each with a scale of its own, and are multiplied
by the codes of weights as they lie in the panel, four products of an output at a time (`vpdpbusd`
where the CPU has VNNI, else by AVX2's multiplications of bytes). Sums of a block are exact; scales
and offsets are applied to them in float32, block by block, so that a row's result depends on that
row alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from llvmlite import binding as llvm
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels import intrinsics, linear_code, panel_forms, quantised_code, vector_code
from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import digest_of, fetch_add, float32_at, int32_at, int64_at
from ballast.kernels.linear_code import (
    FORM,
    NEXT,
    ORDER,
    PANEL_BYTES,
    ROWS,
    WEIGHTS,
    X_INDEX,
    X_STRIDE,
    K,
    N,
    X,
    as_pairs,
    begin_sums,
    chunks_of,
    finish_sums,
    on_stack,
    sums_memory,
)
from ballast.kernels.panel_forms import BLOCK, DOTS_K, PANEL
from ballast.kernels.quantised_code import BlockPlace, Codes, scales_of
from ballast.kernels.vector_code import LANES, compiles_for, multiply_add

_WORDS = BLOCK // 4
"""int32 with four inputs each of a block."""
_MOST = linear_code.ROWS_MAX * DOTS_K
"""Inputs of an item's rows."""
_VNNI = LANES == 16 and compiles_for("avx512vnni")
_BYTES = LANES == 8 and compiles_for("avx2")

_F32, _I64, _I32, _I16, _I8 = (
    ir.FloatType(),
    ir.IntType(64),
    ir.IntType(32),
    ir.IntType(16),
    ir.IntType(8),
)
_FLOATS, _INTS = types.CPointer(types.float32), types.CPointer(types.int32)
_LEVELS = np.float32(127.0)
_LEAST = np.float32(1e-30)
"""Inputs that are not more are rounded to zero: of less, levels over them are infinite."""

_inputs_memory = intrinsic(on_stack(_MOST // 4))
_scales_memory = intrinsic(on_stack(2 * _MOST // BLOCK))


@intrinsic
def _add_block(context, form, panel, block, blocks, rows, inputs, scales, sums):
    """Add the products of a block's weights and of as many inputs of some rows to `sums` (rows,
    PANEL). `inputs`: int32 (rows, blocks, _WORDS); `scales`: (rows, blocks, 2)."""

    def generate(ctx, builder, signature, arguments):
        form, panel, block, blocks, rows, inputs, scales, sums = arguments
        for kind in quantised_code.by_form(builder, form, panel_forms.DOTS):
            place = BlockPlace(builder, kind, form, panel, block)
            _add_form(builder, kind, place, block, blocks, rows, inputs, scales, sums)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, _INTS, _FLOATS, _FLOATS), generate


def _add_form(builder, form, place, block, blocks, rows, inputs, scales, sums):
    quantised_code.fetch_ahead(builder, form, place)
    with cgutils.for_range(builder, _int64(PANEL // LANES)) as loop:
        lane = builder.mul(loop.index, _int64(LANES))
        start = builder.add(place.start, _int64(form.subscale_bytes))
        [(scale, offset)] = scales_of(builder, form, place, lane, from_zero=True)
        words = Codes(builder, form, start, lane)
        codes = [part for w in range(BLOCK // 8) for part in _bytes_of(builder, words.word(w))]
        with cgutils.for_range(builder, rows) as row:
            at = builder.add(builder.mul(row.index, blocks), block)
            first = builder.gep(inputs, [builder.mul(at, _int64(_WORDS))])
            total = ir.Constant(ir.VectorType(_I32, LANES), None)
            for w, code in enumerate(codes):
                four = builder.load(builder.gep(first, [_int64(w)]))
                total = _add_dots(builder, total, code, four)
            pair = builder.gep(scales, [builder.mul(at, _int64(2))])
            size = _spread(builder, builder.load(pair))
            whole = _spread(builder, builder.load(builder.gep(pair, [_int64(1)])))
            target = builder.gep(sums, [builder.add(builder.mul(row.index, _int64(PANEL)), lane)])
            target = builder.bitcast(target, ir.VectorType(_F32, LANES).as_pointer())
            value = builder.load(target, align=4)
            products = builder.sitofp(total, ir.VectorType(_F32, LANES))
            value = multiply_add(builder, products, builder.fmul(scale, size), value)
            if offset is not None:
                value = multiply_add(builder, whole, offset, value)
            builder.store(value, target, align=4)


def _bytes_of(builder, word):
    """The even and the odd codes of four bits in words of eight, as bytes."""
    mask = _ints(0x0F0F0F0F)
    return builder.and_(word, mask), builder.and_(builder.lshr(word, _ints(4)), mask)


def _add_dots(builder, total, codes, inputs):
    """total + the products of four unsigned bytes in each lane with the signed bytes of a word."""
    ints = ir.VectorType(_I32, LANES)
    x = _spread(builder, inputs)
    if _VNNI:
        kind = ir.FunctionType(ints, [ints] * 3)
        dot = ir.InlineAsm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v")
        return builder.call(dot, [total, codes, x])
    if _BYTES:
        bytes_, shorts = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)
        kind = ir.FunctionType(shorts, [bytes_, bytes_])
        pairs = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.ub.sw")
        kind = ir.FunctionType(ints, [shorts, shorts])
        fours = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        both = [builder.bitcast(codes, bytes_), builder.bitcast(x, bytes_)]
        ones = ir.Constant(shorts, [1] * 16)  # 2 * 15 * 127 is within int16
        return builder.add(total, builder.call(fours, [builder.call(pairs, both), ones]))
    for i in range(4):
        code = builder.and_(builder.lshr(codes, _ints(8 * i)), _ints(255))
        value = builder.ashr(builder.shl(x, _ints(24 - 8 * i)), _ints(24))
        total = builder.add(total, builder.mul(code, value))
    return total


def _spread(builder, value):
    """A vector of equal elements."""
    kind = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, LANES), None)
    return builder.shuffle_vector(single, undefined, mask)


def _int64(value):
    return ir.Constant(_I64, value)


def _ints(value):
    return ir.Constant(ir.VectorType(_I32, LANES), [value] * LANES)


@njit(error_model="numpy")
def _round_inputs(table, first, rows, blocks, inputs, scales):
    """Round the inputs of some rows to int8, as words of four even ones and of four odd ones of
    eight, with the scale of each block and that times its sum."""
    x, stride, k = float32_at(table[X]), table[X_STRIDE], table[K]
    for r in range(rows):
        row = first + r
        if table[X_INDEX] != 0:
            row = int64_at(table[X_INDEX])[row]
        for b in range(blocks):
            most = np.float32(0.0)
            for i in range(b * BLOCK, min(k, (b + 1) * BLOCK)):
                at = int32_at(table[ORDER])[i] if table[ORDER] != 0 else i
                most = max(most, abs(x[row * stride + at]))
            inverse = _LEVELS / most if most > _LEAST else np.float32(0.0)
            total = 0
            for w in range(_WORDS):
                word = 0
                for j in range(4):
                    i = b * BLOCK + w // 2 * 8 + w % 2 + 2 * j
                    if i < k:
                        at = int32_at(table[ORDER])[i] if table[ORDER] != 0 else i
                        level = int(np.rint(x[row * stride + at] * inverse))
                        total += level
                        word |= (level & 255) << 8 * j
                inputs[(r * blocks + b) * _WORDS + w] = np.int32(np.uint32(word))
            scales[(r * blocks + b) * 2] = most / _LEVELS
            scales[(r * blocks + b) * 2 + 1] = most / _LEVELS * np.float32(total)


@njit(error_model="numpy")
def _linear(table):
    """Multiply items until none is left, as `linear_code` does."""
    sums, inputs, scales = sums_memory(), as_pairs(_inputs_memory()), _scales_memory()
    all_rows, k, form = table[ROWS], table[K], table[FORM]
    panels = (table[N] + PANEL - 1) // PANEL
    blocks = (k + BLOCK - 1) // BLOCK
    chunks = chunks_of(all_rows, k)
    rounded = -1
    item = fetch_add(table, NEXT, 1)
    while item < panels * chunks:
        panel, chunk = item % panels, item // panels
        first = chunk * all_rows // chunks
        rows = (chunk + 1) * all_rows // chunks - first
        if rounded != chunk:
            _round_inputs(table, first, rows, blocks, inputs, scales)
            rounded = chunk
        begin_sums(table, panel, rows, sums)
        at = table[WEIGHTS] + panel * table[PANEL_BYTES]
        for block in range(blocks):
            _add_block(form, at, block, blocks, rows, inputs, scales, sums)
        finish_sums(table, panel, first, rows, sums)
        item = fetch_add(table, NEXT, 1)


_SIGNATURE = types.void(types.CPointer(types.int64))
_SOURCES = digest_of(intrinsics, linear_code, panel_forms, quantised_code, vector_code)


def _entry_points(sources: int) -> dict[str, Any]:
    """Return the kernels by name; see `attention_code._entry_points`."""

    def linear_dots(table):
        _ = sources
        _linear(table)

    return {"linear": linear_dots}


_entries = _entry_points(_SOURCES)
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a kernel, from Numba's cache if it is there. Call it from one thread."""
    if name not in _compiled:
        llvm.initialize_native_asmparser()
        _compiled[name] = compiled(_SIGNATURE, _entries[name])
    return int(_compiled[name].address)
