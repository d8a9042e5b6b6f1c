"""Multiply panel-packed weights on CPU: the compiled kernels that each thread of a team runs.

All compiled code is in this one file, because Numba's cache looks for changes in the file of the
function that it compiles, and not in those that it calls: hence also a twin of the exponential of
`attention_code.py`.

Kernels take one argument, the address of a table of int64 whose fields are the constants below.
Threads share work through an atomic counter in it, so any number of them may call one kernel on
one table at the same time.

An item is a panel of 64 outputs and a chunk of rows, so small that its inputs stay in the second
cache while all panels pass. Within an item, some inputs of up to `ROWS_MAX` rows at a time are
copied side by side into a small buffer, and a tile of these rows and some vectors of the panel is
summed in registers. Weights in bfloat16 are widened there; or, on CPUs with AVX512_BF16, inputs are
rounded to bfloat16 in the buffer, and pairs of them multiplied with pairs of weights by one
instruction (`DOTS`). An output is one chain of fused multiply-adds from its first input to its
last, whichever tile it falls into: neither the rows around it, nor the number of threads changes a
bit of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import (
    fetch_add,
    float32_at,
    int32_at,
    int64_at,
    uint16_at,
    widen,
)
from ballast.kernels.vector_code import LANES, compiles_for

# Fields of the table.
NEXT = 0
"""Next item to be taken; 0 before each run."""
ROWS = 1
K = 2
"""Inputs."""
N = 3
"""Outputs; rows of the packed matrix."""
X = 4
"""Address of the inputs, float32."""
X_STRIDE = 5
"""Elements from a row of the inputs to the next."""
X_INDEX = 6
"""Address of int64 (ROWS,): which rows of the inputs to take; 0: the first ones."""
WEIGHTS = 7
"""Address of the panels."""
BIAS = 8
"""Address of float32 (N,), in a gated mode of whole panels; 0: none."""
OUT = 9
"""Address of the outputs, float32."""
OUT_STRIDE = 10
"""Elements from a row of the outputs to the next."""
OUT_INDEX = 11
"""Address of int64 (ROWS,): which rows of the outputs to write, each at most once; 0: the first."""
MODE = 12
SCALE = 13
"""ADD: address of float32 (ROWS,), by which what is added is multiplied; 0: by nothing."""
FORM = 14
"""Of quantised panels: their form (`panel_forms.number_of`)."""
PANEL_BYTES = 15
"""Of quantised panels: bytes from one to the next."""
ORDER = 16
"""Of quantised panels: address of int32 (K,), the indices of the inputs in the panels' order; 0: as
they are."""
N_FIELDS = 17

# Modes.
STORE = 0
"""out = W x + b"""
ADD = 1
"""out += scale * (W x + b)"""
GATED = 2
"""out = silu(gate) * up, N / 2 outputs: each panel has 32 rows of gate and then those of up."""
GATED_TANH = 3
"""The same with gelu, approximated by tanh, in place of silu."""
GATED_ERF = 4
"""The same with gelu by the error function."""

PANEL = 64
"""Outputs of a panel."""

DOTS = LANES == 16 and compiles_for("avx512bf16")
"""Whether matrices in bfloat16 are multiplied by dot products of pairs, so that inputs are rounded
to bfloat16, as oneDNN rounds them."""
_TILES = ((6, 4), (14, 2)) if LANES == 16 else ((1, 8), (3, 4), (6, 2))
"""Most rows and how many vectors of outputs: with the weights they have to fit into registers."""
ROWS_MAX = _TILES[-1][0]
"""Most rows of a tile."""
_SLICE = 256
"""Inputs that are summed in registers at a time: those of ROWS_MAX rows fill half a first cache."""
_STRIDE = _SLICE + 16
"""float32 from a row of the buffer for inputs to the next: not a power of two, for the cache."""
_PUT = 16
"""Inputs that are copied into the buffer at once."""
_CHUNK = 9 * ROWS_MAX
"""Most rows of an item."""
_CHUNK_FLOATS = 1 << 17
"""Inputs of an item, if they are more than a tile's: half of the second cache."""
_KEPT = _CHUNK_FLOATS // _SLICE + _CHUNK
"""Slices of rows that the buffer for rounded inputs holds: those of an item, if they are not more
inputs than a tile's."""
_STEP = 4 * PANEL
"""Bytes of a panel that are read at once: one input in float32, two in bfloat16."""
_LINE = 64
_AHEAD = 2048
"""Bytes from what is read to what a tile of all outputs fetches."""
_AHEAD_PART = 1024
"""The same for a tile of some outputs: of them alone, from the second cache into the first."""

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_HALF = PANEL // 2

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOATS = types.CPointer(types.float32)


def on_stack(n):
    """An intrinsic: pointer to `n` float32 of the thread's stack, aligned to a cache line."""

    def on_stack(context):
        def generate(ctx, builder, signature, arguments):
            with builder.goto_entry_block():
                array = builder.alloca(ir.ArrayType(_F32, n))
            array.align = 64
            return builder.bitcast(array, _F32.as_pointer())

        return _FLOATS(), generate

    return on_stack


stage_memory = intrinsic(on_stack(ROWS_MAX * _STRIDE))
_kept_memory = intrinsic(on_stack(_KEPT * _STRIDE // 2))
sums_memory = intrinsic(on_stack(_CHUNK * PANEL))
_rest_memory = intrinsic(on_stack(_PUT))
_PAIRS = types.CPointer(types.int32)


@intrinsic
def as_pairs(context, stage):
    """The buffer for inputs as one of pairs of bfloat16."""

    def generate(ctx, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32.as_pointer())

    return _PAIRS(_FLOATS), generate


@intrinsic
def _put(context, x, at, stage, to):
    """Copy _PUT inputs from `at` on into the buffer for inputs, from input `to` on; into one of
    pairs, rounded to nearest bfloat16."""
    pairs = stage == _PAIRS
    stage_kind = stage

    def generate(ctx, builder, signature, arguments):
        x, at, stage, to = arguments
        wide, half = ir.VectorType(_F32, _PUT), ir.VectorType(_I32, _PUT // 2)
        source = builder.bitcast(builder.gep(x, [at]), wide.as_pointer())
        value = builder.load(source, align=4)
        if pairs:
            kind = ir.FunctionType(half, [wide])
            value = builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value])
        target = builder.bitcast(_input(builder, stage, to), value.type.as_pointer())
        builder.store(value, target, align=4)
        return ctx.get_dummy_value()

    return types.void(_FLOATS, types.int64, stage_kind, types.int64), generate


def _tile_of(*, fetches):
    """An intrinsic: add the products of some rows and a panel to sums, input by input.

    sums[s + r * PANEL + j] += sum(stage[at + r * _STRIDE + i] * weight(i, j)) for i < k in turn,
    where the panel's weights begin at element `w` of float32 or of bfloat16 (as uint16), and
    `stage` holds float32, or pairs of bfloat16 (as int32; then also in turn, by pairs). If it
    `fetches`, it fetches `share` bytes per step from address `next_at` meanwhile, where what is
    read next begins: the hardware does not look beyond the end of a page.
    """

    def tile(context, rows, stage, at, weights, w, k, sums, s, next_at, share):
        width = weights.dtype.bitwidth // 8
        sum_tile = _sum_pairs if stage == _PAIRS else _sum_tile
        stage_kind = stage

        def generate(ctx, builder, signature, arguments):
            rows, stage, at, weights, w, k, sums, s, next_at, share = arguments
            stage = _input(builder, stage, at)
            panel = builder.ptrtoint(builder.gep(weights, [w]), _I64)
            sums = builder.gep(sums, [s])
            steps = k
            if width == 2:
                steps = builder.lshr(builder.add(k, _int64(1)), _int64(1))
            done = builder.append_basic_block("done")
            choice = builder.switch(rows, done)
            for r in range(1, ROWS_MAX + 1):
                vectors = next(v for most, v in _TILES if r <= most)
                block = builder.append_basic_block(f"rows{r}")
                choice.add_case(_int64(r), block)
                builder.position_at_end(block)
                passes = PANEL // (vectors * LANES)
                for j in range(passes):
                    first = j * vectors * LANES
                    given = (width, r, vectors, first, stage, panel, steps, sums)
                    with sum_tile(builder, *given) as i:
                        if fetches and passes == 1:
                            _fetch_soon(builder, panel, i, steps, next_at)
                        elif fetches:
                            _fetch_part(builder, panel, first, i, passes)
                            done_before = builder.mul(steps, _int64(j))
                            part = builder.add(i, done_before)
                            _fetch_share(builder, next_at, part, share, passes)
                builder.branch(done)
            builder.position_at_end(done)
            return ctx.get_dummy_value()

        i64 = types.int64
        given = (i64, stage_kind, i64, weights, i64, i64, _FLOATS, i64, i64, i64)
        return types.void(*given), generate

    tile.__name__ = tile.__qualname__ = "tile" if fetches else "unpacked_tile"
    return tile


_tile = intrinsic(_tile_of(fetches=True))
unpacked_tile = intrinsic(_tile_of(fetches=False))
"""The same for weights that are in the first cache."""


def _input(builder, stage, i):
    """Pointer to input i, even, of a buffer for inputs."""
    return builder.gep(stage, [builder.lshr(i, _int64(1)) if stage.type.pointee == _I32 else i])


def _fetch_soon(builder, panel, i, steps, next_at):
    """Fetch into the first cache what is _AHEAD bytes behind step i, or in what is read next."""
    later = builder.add(i, _int64(_AHEAD // _STEP))
    beyond = builder.sub(later, steps)
    here = builder.icmp_signed("<", beyond, _int64(0))
    origin = builder.select(here, panel, next_at)
    step = builder.select(here, later, beyond)
    _prefetch(builder, builder.add(origin, builder.mul(step, _int64(_STEP))), _STEP // _LINE, 3)


def _fetch_part(builder, panel, first, i, passes):
    """Fetch into the first cache what outputs `first` on have some steps after step i."""
    step = builder.mul(i, _int64(_STEP))
    soon = builder.add(step, _int64(_AHEAD_PART + 4 * first))
    _prefetch(builder, builder.add(panel, soon), _STEP // _LINE // passes, 3)


def _fetch_share(builder, next_at, i, share, passes):
    """Fetch into the second cache the i-th part of what is read next."""
    each = builder.udiv(share, _int64(passes))
    _prefetch(builder, builder.add(next_at, builder.mul(i, each)), _STEP // _LINE // passes, 2)


def _prefetch(builder, address, lines, locality):
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(_I32, value) for value in (0, locality, 1)]
    for line in range(lines):
        at = builder.add(address, _int64(line * _LINE))
        builder.call(prefetch, [builder.inttoptr(at, pointer), *how])


@contextmanager
def _sum_tile(builder, width, rows, vectors, first, stage, panel, steps, sums):
    """One tile: outputs first .. first + vectors * LANES - 1 of the panel. Yields the step."""
    vector = ir.VectorType(_F32, LANES)
    name = f"llvm.fmuladd.v{LANES}f32"
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), name
    )
    places = []
    for r in range(rows):
        for v in range(vectors):
            at = builder.gep(sums, [_int64(r * PANEL + first + v * LANES)])
            places.append(builder.bitcast(at, vector.as_pointer()))
    zero = ir.Constant(vector, None)
    totals = [cgutils.alloca_once_value(builder, zero) for _ in places]
    bits = ir.VectorType(_I32, LANES)
    with cgutils.for_range(builder, steps) as loop:
        yield loop.index
        at = builder.add(panel, builder.mul(loop.index, _int64(_STEP)))
        loaded = []
        for v in range(vectors):
            address = builder.add(at, _int64(4 * (first + v * LANES)))
            loaded.append(builder.load(builder.inttoptr(address, bits.as_pointer()), align=4))
        for part in range(4 // width):
            weights = [_float32_of(builder, w, width, part) for w in loaded]
            i = builder.mul(loop.index, _int64(4 // width))
            for r in range(rows):
                place = builder.add(i, _int64(r * _STRIDE + part))
                x = _spread(builder, builder.load(builder.gep(stage, [place])), LANES)
                for v, w in enumerate(weights):
                    total = totals[r * vectors + v]
                    value = builder.call(multiply_add, [x, w, builder.load(total)])
                    builder.store(value, total)
    for place, total in zip(places, totals, strict=True):
        value = builder.fadd(builder.load(place, align=4), builder.load(total))
        builder.store(value, place, align=4)


@contextmanager
def _sum_pairs(builder, width, rows, vectors, first, stage, panel, steps, sums):
    """One tile as `_sum_tile` does, of pairs of bfloat16 on both sides."""
    vector, bits = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
    kind = ir.FunctionType(vector, [vector, bits, bits])
    dot = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v")
    places = []
    for r in range(rows):
        for v in range(vectors):
            at = builder.gep(sums, [_int64(r * PANEL + first + v * LANES)])
            places.append(builder.bitcast(at, vector.as_pointer()))
    totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in places]
    with cgutils.for_range(builder, steps) as loop:
        yield loop.index
        at = builder.add(panel, builder.mul(loop.index, _int64(_STEP)))
        weights = []
        for v in range(vectors):
            address = builder.add(at, _int64(4 * (first + v * LANES)))
            weights.append(builder.load(builder.inttoptr(address, bits.as_pointer()), align=4))
        for r in range(rows):
            place = builder.gep(stage, [builder.add(loop.index, _int64(r * _STRIDE // 2))])
            x = _spread(builder, builder.load(place), LANES)
            for v, w in enumerate(weights):
                total = totals[r * vectors + v]
                builder.store(builder.call(dot, [builder.load(total), w, x]), total)
    for place, total in zip(places, totals, strict=True):
        value = builder.fadd(builder.load(place, align=4), builder.load(total))
        builder.store(value, place, align=4)


def _float32_of(builder, bits, width, part):
    """float32 of a vector of int32: as it is, or the first or second bfloat16 of each."""
    kind = bits.type
    if width == 2 and part == 0:
        bits = builder.shl(bits, _spread(builder, ir.Constant(_I32, 16), LANES))
    elif width == 2:
        bits = builder.and_(bits, _spread(builder, ir.Constant(_I32, 0xFFFF0000), LANES))
    return builder.bitcast(bits, ir.VectorType(_F32, kind.count))


def _int64(value):
    return ir.Constant(_I64, value)


def _spread(builder, value, lanes):
    """A vector of equal elements."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), None)
    return builder.shuffle_vector(single, undefined, mask)


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
    """
    bounded = max(x, _LOWEST)
    n = _rounded(bounded * _LOG2_E)
    y = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * y + _C1) * y + _C2) * y + _C3) * y + _C4) * y + _C5
    result = _times_power(p * y * y + y + _ONE, n)
    return result if x > _LOWEST else _ZERO


@njit(error_model="numpy")
def _gated(gate, up):
    """silu(gate) * up"""
    e = _exp(-abs(gate))
    numerator = gate if gate >= _ZERO else gate * e
    return numerator / (_ONE + e) * up


_TWICE_ROOT = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBED = np.float32(0.044715)


@njit(error_model="numpy")
def _gated_tanh(gate, up):
    """gelu(gate) * up, where gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u) for a cubic u of x."""
    u = _TWICE_ROOT * gate * (_ONE + _CUBED * gate * gate)
    e = _exp(-abs(u))
    numerator = gate if u >= _ZERO else gate * e
    return numerator / (_ONE + e) * up


_ROOT_HALF = np.float32(0.7071067811865476)
_E0 = np.float32(-1.26551223)
_E1 = np.float32(1.00002368)
_E2 = np.float32(0.37409196)
_E3 = np.float32(0.09678418)
_E4 = np.float32(-0.18628806)
_E5 = np.float32(0.27886807)
_E6 = np.float32(-1.13520398)
_E7 = np.float32(1.48851587)
_E8 = np.float32(-0.82215223)
_E9 = np.float32(0.17087277)


@njit(error_model="numpy")
def _gated_erf(gate, up):
    """gelu(gate) * up, where gelu(x) = x (1 + erf(x / sqrt(2))) / 2.

    By the fit of erfc of Numerical Recipes (Press et al. 1992, section 6.2), to 2e-7 of it.
    """
    z = abs(gate) * _ROOT_HALF
    t = _ONE / (_ONE + _C5 * z)
    p = (((_E9 * t + _E8) * t + _E7) * t + _E6) * t + _E5
    p = ((((p * t + _E4) * t + _E3) * t + _E2) * t + _E1) * t + _E0
    tail = _C5 * t * _exp(p - z * z)
    share = _ONE - tail if gate >= _ZERO else tail
    return gate * share * up


@njit(error_model="numpy")
def _gate_all(mode, x, gates, ups, out, to, n):
    """out[to + j] = f(x[gates + j]) * x[ups + j] for j < n, with the activation of a gated mode."""
    if mode == GATED_TANH:
        for j in range(n):
            out[to + j] = _gated_tanh(widen(x[gates + j]), widen(x[ups + j]))
    elif mode == GATED_ERF:
        for j in range(n):
            out[to + j] = _gated_erf(widen(x[gates + j]), widen(x[ups + j]))
    else:
        for j in range(n):
            out[to + j] = _gated(widen(x[gates + j]), widen(x[ups + j]))


@njit(error_model="numpy")
def chunks_of(rows, k):
    """Return the number of parts into which the rows are cut."""
    most = min(_CHUNK, max(ROWS_MAX, _CHUNK_FLOATS // k))
    return (rows + most - 1) // most


@njit(error_model="numpy")
def stage_inputs(table, first, rows, start, n, stage, begin):
    """Copy inputs start .. start + n - 1 of some rows into the buffer, from input `begin` on, and
    zeros behind them."""
    x, stride = float32_at(table[X]), table[X_STRIDE]
    whole = n // _PUT * _PUT
    for r in range(rows):
        row = first + r
        if table[X_INDEX] != 0:
            row = int64_at(table[X_INDEX])[row]
        at, to = row * stride + start, begin + r * _STRIDE
        for i in range(0, whole, _PUT):
            _put(x, at + i, stage, to + i)
        if whole < n:
            rest = _rest_memory()
            for i in range(_PUT):
                rest[i] = x[at + whole + i] if whole + i < n else _ZERO
            _put(rest, 0, stage, to + whole)


@njit(error_model="numpy")
def stage_in_order(table, first, rows, start, n, stage):
    """Copy inputs in the order of the panels, from `start` on, as `stage_inputs` does."""
    x, stride = float32_at(table[X]), table[X_STRIDE]
    order = int32_at(table[ORDER])
    for r in range(rows):
        row = first + r
        if table[X_INDEX] != 0:
            row = int64_at(table[X_INDEX])[row]
        at, to = row * stride, r * _STRIDE
        for i in range(n):
            stage[to + i] = x[at + order[start + i]]


@njit(error_model="numpy")
def begin_sums(table, panel, rows, sums):
    """Set sums to the bias, or to zero."""
    for j in range(rows * PANEL):
        sums[j] = _ZERO
    if table[BIAS] != 0:
        bias = float32_at(table[BIAS] + 4 * panel * PANEL)
        n = PANEL if table[MODE] >= GATED else min(PANEL, table[N] - panel * PANEL)
        for r in range(rows):
            for j in range(n):
                sums[r * PANEL + j] = bias[j]


@njit(error_model="numpy")
def finish_sums(table, panel, first, rows, sums):
    """Write the sums of an item as the mode says: store, add or gate."""
    mode = table[MODE]
    width = _HALF if mode >= GATED else PANEL
    n = min(width, table[N] * width // PANEL - panel * width)
    for r in range(rows):
        at = r * PANEL
        # Of a length that is known when this is compiled: else it is no vector code in place.
        if mode == GATED:
            for j in range(_HALF):
                sums[at + j] = _gated(sums[at + j], sums[at + _HALF + j])
        elif mode == GATED_TANH:
            for j in range(_HALF):
                sums[at + j] = _gated_tanh(sums[at + j], sums[at + _HALF + j])
        elif mode == GATED_ERF:
            for j in range(_HALF):
                sums[at + j] = _gated_erf(sums[at + j], sums[at + _HALF + j])
        if mode == ADD and table[SCALE] != 0:
            scale = float32_at(table[SCALE])[first + r]
            for j in range(PANEL):
                sums[at + j] *= scale
        row = first + r
        if table[OUT_INDEX] != 0:
            row = int64_at(table[OUT_INDEX])[row]
        out = float32_at(table[OUT] + 4 * (row * table[OUT_STRIDE] + panel * width))
        if mode == ADD:
            for j in range(n):
                out[j] += sums[at + j]
        else:
            for j in range(n):
                out[j] = sums[at + j]


@njit(error_model="numpy")
def _linear(table, weights, itemsize, stage, kept):
    """Multiply items until none is left. Where `stage` holds `kept` slices of rows, and these are
    all of an item, inputs are copied once for all panels."""
    sums = sums_memory()
    all_rows, k = table[ROWS], table[K]
    panels = (table[N] + PANEL - 1) // PANEL
    whole = 64 // itemsize
    panel_size = (k + whole - 1) // whole * whole * PANEL
    chunks = chunks_of(all_rows, k)
    slices = (k + _SLICE - 1) // _SLICE
    staged = -1
    item = fetch_add(table, NEXT, 1)
    while item < panels * chunks:
        panel, chunk = item % panels, item // panels
        first = chunk * all_rows // chunks
        rows = (chunk + 1) * all_rows // chunks - first
        groups = (rows + ROWS_MAX - 1) // ROWS_MAX
        begin_sums(table, panel, rows, sums)
        # Where nothing is kept, kept > 0 is known to be false as this is compiled, and addresses in
        # the buffer to be constant: 1 to 2 % of the time at 16 rows.
        keeps = kept > 0 and rows * slices <= kept
        if keeps and staged != chunk:
            for i in range(slices):
                n = min(_SLICE, k - i * _SLICE)
                stage_inputs(table, first, rows, i * _SLICE, n, stage, i * rows * _STRIDE)
            staged = chunk
        for start in range(0, k, _SLICE):
            n = min(_SLICE, k - start)
            w = panel * panel_size + start * PANEL
            after = w + _SLICE * PANEL
            if start + _SLICE >= k:
                # Not sooner: the item would be lost to idle threads. Not later: it is prefetched.
                item = fetch_add(table, NEXT, 1)
                after = item % panels * panel_size if item < panels * chunks else w
            after = table[WEIGHTS] + after * itemsize
            for g in range(groups):
                row = g * rows // groups
                many = (g + 1) * rows // groups - row
                at = (start // _SLICE * rows + row) * _STRIDE if keeps else 0
                if not keeps:
                    stage_inputs(table, first + row, many, start, n, stage, 0)
                next_at = after + n * PANEL * itemsize * g // groups
                _tile(many, stage, at, weights, w, n, sums, row * PANEL, next_at, _STEP // groups)
        finish_sums(table, panel, first, rows, sums)


_SIGNATURE = types.void(types.CPointer(types.int64))


def _linear_float32(table):
    _linear(table, float32_at(table[WEIGHTS]), 4, stage_memory(), 0)


def _linear_bfloat16(table):
    _linear(table, uint16_at(table[WEIGHTS]), 2, stage_memory(), 0)


def _linear_bfloat16_by_dots(table):
    _linear(table, uint16_at(table[WEIGHTS]), 2, as_pairs(_kept_memory()), _KEPT)


@njit(error_model="numpy")
def _gate(table, x):
    """Apply the gated MODE to stored gates and ups: rows of N outputs from X, where K gates, then
    their K ups, and so on, are adjacent."""
    out = float32_at(table[OUT])
    n, k, mode = table[N], table[K], table[MODE]
    row = fetch_add(table, NEXT, 1)
    while row < table[ROWS]:
        at, to = row * table[X_STRIDE], row * table[OUT_STRIDE]
        for first in range(0, n, k):
            gates, many = at + 2 * first, min(k, n - first)
            _gate_all(mode, x, gates, gates + k, out, to + first, many)
        row = fetch_add(table, NEXT, 1)


def _gate_float32(table):
    _gate(table, float32_at(table[X]))


def _gate_bfloat16(table):
    _gate(table, uint16_at(table[X]))


_PLAIN = {
    "float32": _linear_float32,
    "bfloat16": _linear_bfloat16_by_dots if DOTS else _linear_bfloat16,
    "gate_float32": _gate_float32,
    "gate_bfloat16": _gate_bfloat16,
}
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of the kernel for a dtype, or of `gate` of rows of one, from Numba's cache if it is
    there. Call it from one thread."""
    if name not in _compiled:
        if DOTS:
            llvm.initialize_native_asmparser()
        _compiled[name] = compiled(_SIGNATURE, _PLAIN[name])
    return int(_compiled[name].address)
