"""Multiply quantised panels on CPU: the compiled kernels that each thread of a team runs.

64 inputs of a panel at a time are dequantised in registers into a buffer in the first cache, and
multiplied from there by all rows of the item, as float32 panels are (`linear_code`). One row alone
is multiplied by them in registers, without the buffer. Weights are dequantised exactly, to float32
(with zeros beside scales in float32: to a unit in the last place), and an output is the same chain
of multiply-adds whichever tile computes it: neither the rows around it nor the number of threads
changes a bit of it.

The embedding of tokens in such a matrix is here as well.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from llvmlite import binding as llvm
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels import intrinsics, layer_code, linear_code, panel_forms, vector_code
from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import digest_of, fetch_add, float32_at, float_of, int64_at
from ballast.kernels.linear_code import (
    FORM,
    NEXT,
    ORDER,
    PANEL_BYTES,
    ROWS,
    ROWS_MAX,
    WEIGHTS,
    K,
    N,
    begin_sums,
    chunks_of,
    finish_sums,
    on_stack,
    stage_in_order,
    stage_inputs,
    stage_memory,
    sums_memory,
    unpacked_tile,
)
from ballast.kernels.panel_forms import BLOCK, EXPONENTS, FORMS, PANEL, SCALES
from ballast.kernels.vector_code import LANES, compiles_for, multiply_add

_SLICE = 2 * BLOCK
"""Inputs that are dequantised at a time: with the inputs of rows they fill half a first cache."""
_AHEAD = 2048
"""Bytes from what is read to what is fetched meanwhile."""
_CHAINS = 4 if LANES == 16 else 2
"""Vectors of outputs that one row is multiplied by at a time: each sum is a chain, whose steps wait
for each other."""
_LINE = 64
_SCALE_KINDS = {name: number for number, name in enumerate(SCALES)}
_FLOAT8_SCALE = 2.0**8

_F32, _I64, _I32, _I16, _I8 = (
    ir.FloatType(),
    ir.IntType(64),
    ir.IntType(32),
    ir.IntType(16),
    ir.IntType(8),
)
_FLOATS = types.CPointer(types.float32)
_LOOKS_UP = LANES == 16 and compiles_for("avx512f")
"""Whether a vector of 16 numbers is looked up by the low four bits of others in one instruction."""
_HALVES = compiles_for("f16c") or compiles_for("avx512f")

_unpacked_memory = intrinsic(on_stack(_SLICE * PANEL))


def by_form(builder, form, names=tuple(FORMS)):
    """Yield each kind of panel among `names`, at the place of the code for matrices whose `form` is
    of that kind; what follows the loop comes after whichever ran."""
    done = builder.append_basic_block("done")
    choice = builder.switch(builder.and_(form, _int64(255)), done)
    for number, (name, kind) in enumerate(FORMS.items()):
        if name not in names:
            continue
        case = builder.append_basic_block(f"form{number}")
        choice.add_case(_int64(number), case)
        builder.position_at_end(case)
        yield kind
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def _unpack(context, form, panel, block, out, at):
    """Dequantise block `block` of the panel at an address to float32 (BLOCK, PANEL) at element `at`
    of `out`."""

    def generate(ctx, builder, signature, arguments):
        form, panel, block, out, at = arguments
        out = builder.gep(out, [at])
        for kind in by_form(builder, form):
            place = BlockPlace(builder, kind, form, panel, block)
            _unpack_form(builder, kind, place, out)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, _FLOATS, i64), generate


class BlockPlace:
    """Where a block is: the addresses of its span and of itself, and how its scales are written."""

    def __init__(self, builder, kind, form, panel, block):
        self.is_wide = None
        """Whether scales are float32; None: known when this is compiled, not to be."""
        self._are_exponents = kind.scale == EXPONENTS
        blocks, head = _int64(kind.span // BLOCK), _int64(kind.head_bytes)
        if kind.scale and not self._are_exponents:
            scale = builder.and_(builder.lshr(form, _int64(8)), _int64(255))
            self.is_wide = builder.icmp_unsigned("==", scale, _int64(_SCALE_KINDS["F32"]))
            self.is_half = builder.icmp_unsigned("==", scale, _int64(_SCALE_KINDS["F16"]))
            blocks = builder.lshr(form, _int64(16))
            self.scale_bytes = builder.select(self.is_wide, _int64(4), _int64(2))
            head = builder.mul(self.scale_bytes, _int64(PANEL))
            self.zeros = head
            head = builder.add(head, _int64(PANEL * kind.has_zeros))
        span_bytes = builder.add(head, builder.mul(blocks, _int64(kind.block_bytes)))
        self.span = builder.add(panel, builder.mul(builder.udiv(block, blocks), span_bytes))
        within = builder.mul(builder.urem(block, blocks), _int64(kind.block_bytes))
        self.start = builder.add(self.span, builder.add(within, head))

    def scale(self, builder, lane):
        """Return the scales of LANES outputs from `lane` on, as float32."""
        if self._are_exponents:
            return _power_of_two(builder, at_lane(builder, self.span, lane, 1))
        if self.is_wide is None:
            return _half(builder, at_lane(builder, self.span, lane, 2))
        address = builder.add(self.span, builder.mul(lane, self.scale_bytes))
        floats = ir.VectorType(_F32, LANES)
        with builder.if_else(self.is_wide) as (wide, narrow):
            with wide:
                pointer = builder.inttoptr(address, floats.as_pointer())
                as_wide, after_wide = builder.load(pointer, align=4), builder.block
            with narrow:
                bits = _bfloat16(builder, address)
                as_narrow = builder.select(self.is_half, _half(builder, address), bits)
                after_narrow = builder.block
        found = builder.phi(floats)
        found.add_incoming(as_wide, after_wide)
        found.add_incoming(as_narrow, after_narrow)
        return found


@intrinsic
def _add_row(context, form, panel, block, blocks, inputs, sums):
    """Add the products of one row's inputs, float32 (blocks * BLOCK,), and blocks `block` on of the
    panel at an address to `sums` (PANEL,): the chain of multiply-adds of a tile of one row."""

    def generate(ctx, builder, signature, arguments):
        form, panel, block, blocks, inputs, sums = arguments
        for kind in by_form(builder, form):
            _add_row_of(builder, kind, (form, panel, block), blocks, inputs, sums)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, _FLOATS, _FLOATS), generate


def _add_row_of(builder, form, at, blocks, inputs, sums):
    """Add the products for a form, `_CHAINS` vectors of outputs at a time: each is a chain."""
    number, panel, block = at
    floats = ir.VectorType(_F32, LANES)
    passes = PANEL // (_CHAINS * LANES)
    with cgutils.for_range(builder, _int64(passes)) as loop:
        first = builder.mul(loop.index, _int64(_CHAINS * LANES))
        lanes = [builder.add(first, _int64(c * LANES)) for c in range(_CHAINS)]
        totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in lanes]
        with cgutils.for_range(builder, blocks) as each:
            place = BlockPlace(builder, form, number, panel, builder.add(block, each.index))
            share = form.block_bytes // passes
            ahead = builder.add(place.start, builder.mul(loop.index, _int64(share)))
            _fetch(builder, ahead, share)
            row = builder.gep(inputs, [builder.mul(each.index, _int64(BLOCK))])
            start = builder.add(place.start, _int64(form.subscale_bytes))
            pairs = [scales_of(builder, form, place, lane) for lane in lanes]
            codes = [Codes(builder, form, start, lane) for lane in lanes]
            for i in range(BLOCK):
                x = _spread(builder, builder.load(builder.gep(row, [_int64(i)])))
                for c, total in enumerate(totals):
                    weight = _weight(builder, codes[c], pairs[c], i)
                    builder.store(multiply_add(builder, x, weight, builder.load(total)), total)
        for lane, total in zip(lanes, totals, strict=True):
            target = builder.bitcast(builder.gep(sums, [lane]), floats.as_pointer())
            value = builder.fadd(builder.load(target, align=4), builder.load(total))
            builder.store(value, target, align=4)


def fetch_ahead(builder, form, place):
    """Fetch what is read some blocks later."""
    _fetch(builder, place.start, form.block_bytes)


def _fetch(builder, start, n_bytes):
    for line in range(0, n_bytes, _LINE):
        _prefetch(builder, builder.add(start, _int64(_AHEAD + line)))


def _unpack_form(builder, form, place, out):
    fetch_ahead(builder, form, place)
    with cgutils.for_range(builder, _int64(PANEL // LANES)) as loop:
        lane = builder.mul(loop.index, _int64(LANES))
        start = builder.add(place.start, _int64(form.subscale_bytes))
        pairs = scales_of(builder, form, place, lane)
        codes = Codes(builder, form, start, lane)
        for i in range(BLOCK):
            value = _weight(builder, codes, pairs, i)
            target = builder.gep(out, [builder.add(lane, _int64(i * PANEL))])
            builder.store(value, builder.bitcast(target, value.type.as_pointer()), align=4)


def _weight(builder, codes, pairs, i):
    """The dequantised weights of some outputs for input i of a block."""
    value = codes.value(i)
    if not pairs:
        return value
    scale, offset = pairs[i * len(pairs) // BLOCK]
    if offset is None:
        return builder.fmul(value, scale)
    return multiply_add(builder, value, scale, offset)


def scales_of(builder, form, place, lane, *, from_zero=False):
    """Return (scale, offset or None) for each part of a block's inputs; offsets are of codes as
    they are looked up or read; `from_zero`: as they lie in the panel."""
    if form.bits == 16:
        return []
    span, block = place.span, place.start
    scale = place.scale(builder, lane)
    if form.is_float8:
        scale = builder.fmul(scale, _floats(_FLOAT8_SCALE))
    parts = [scale]
    for i in range(form.subscales):
        there = builder.add(block, _int64(i * PANEL))
        widen = builder.zext if form.has_offset else builder.sext
        parts[i:] = [builder.fmul(scale, _byte(builder, at_lane(builder, there, lane, 1), widen))]
    if form.has_offset:
        offset = _half(builder, at_lane(builder, builder.add(span, _int64(2 * PANEL)), lane, 2))
        if form.subscales:
            there = builder.add(block, _int64(form.subscales * PANEL))
            least = _byte(builder, at_lane(builder, there, lane, 1), builder.zext)
            offset = builder.fneg(builder.fmul(offset, least))
        return [(part, offset) for part in parts]
    if form.has_zeros:
        there = at_lane(builder, builder.add(span, place.zeros), lane, 1)
        zero = builder.fneg(_byte(builder, there, builder.zext))
        return [(part, builder.fmul(part, zero)) for part in parts]
    if not form.zero or (_is_looked_up(form) and not from_zero):
        return [(part, None) for part in parts]
    return [(part, builder.fmul(part, _floats(-form.zero))) for part in parts]


def _is_looked_up(form):
    return _LOOKS_UP and form.bits == 4


class Codes:
    """The codes of some outputs in a block, as float32; less `zero`, if they are looked up."""

    def __init__(self, builder, form, start, lane):
        self._builder, self._form, self._start, self._lane = builder, form, start, lane
        self._words = {}

    def value(self, i):
        builder, bits = self._builder, self._form.bits
        if bits == 16:
            return _half(builder, self._input(i, 2))
        if self._form.is_float8:
            return _float8(builder, self._input(i, 1))
        if bits == 8:
            widen = builder.zext if self._form.has_zeros else builder.sext
            return _byte(builder, self._input(i, 1), widen)
        low = builder.lshr(self.word(i // 8), _ints(i % 8 * 4))
        if _is_looked_up(self._form):
            table = [float(x - self._form.zero) for x in range(16)]
            return _look_up(builder, self._form.values or table, low)
        low = builder.and_(low, _ints(15))
        if self._form.values:
            return _choose(builder, self._form.values, low)
        if bits > 4:
            more, per_word = bits - 4, 32 // (bits - 4)
            high = builder.lshr(self.word(4 + i // per_word), _ints(i % per_word * more))
            high = builder.and_(high, _ints((1 << more) - 1))
            low = builder.or_(low, builder.shl(high, _ints(4)))
        return builder.sitofp(low, ir.VectorType(_F32, LANES))

    def _input(self, i, width):
        builder = self._builder
        there = builder.add(self._start, _int64(i * PANEL * width))
        return at_lane(builder, there, self._lane, width)

    def word(self, w):
        """Return words of the low four bits of eight inputs each, or of high bits."""
        builder = self._builder
        if w not in self._words:
            there = builder.add(self._start, _int64(w * PANEL * 4))
            pointer = ir.VectorType(_I32, LANES).as_pointer()
            address = builder.inttoptr(at_lane(builder, there, self._lane, 4), pointer)
            self._words[w] = builder.load(address, align=4)
        return self._words[w]


def at_lane(builder, start, lane, width):
    """The address of an output's element of `width` bytes."""
    return builder.add(start, builder.mul(lane, _int64(width)))


def _byte(builder, address, widen):
    pointer = ir.VectorType(_I8, LANES).as_pointer()
    found = builder.load(builder.inttoptr(address, pointer), align=1)
    wide = widen(found, ir.VectorType(_I32, LANES))
    return builder.sitofp(wide, ir.VectorType(_F32, LANES))


def _half(builder, address):
    """Float16 numbers as float32; on CPUs without an instruction for it by their bits, as finite
    ones are."""
    pointer = ir.VectorType(_I16, LANES).as_pointer()
    return _from_half(builder, builder.load(builder.inttoptr(address, pointer), align=2))


def _from_half(builder, bits):
    floats = ir.VectorType(_F32, LANES)
    if _HALVES:
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        return builder.fpext(halves, floats)
    wide = builder.zext(bits, ir.VectorType(_I32, LANES))
    size = builder.shl(builder.and_(wide, _ints(0x7FFF)), _ints(13))
    factor = ir.Constant(floats, [2.0**112] * LANES)
    found = builder.bitcast(builder.fmul(builder.bitcast(size, floats), factor), wide.type)
    sign = builder.shl(builder.and_(wide, _ints(0x8000)), _ints(16))
    return builder.bitcast(builder.or_(found, sign), floats)


def _bfloat16(builder, address):
    """bfloat16 numbers as float32."""
    pointer = ir.VectorType(_I16, LANES).as_pointer()
    bits = builder.load(builder.inttoptr(address, pointer), align=2)
    wide = builder.zext(bits, ir.VectorType(_I32, LANES))
    return builder.bitcast(builder.shl(wide, _ints(16)), ir.VectorType(_F32, LANES))


def _power_of_two(builder, address):
    """Powers of two as float32, by their exponents plus 127, a byte each: the exponent of a float32
    as it is, but for the least, which has a bit of the fraction."""
    pointer = ir.VectorType(_I8, LANES).as_pointer()
    found = builder.load(builder.inttoptr(address, pointer), align=1)
    wide = builder.zext(found, ir.VectorType(_I32, LANES))
    is_least = builder.icmp_unsigned("==", wide, _ints(0))
    bits = builder.select(is_least, _ints(1 << 22), builder.shl(wide, _ints(23)))
    return builder.bitcast(bits, ir.VectorType(_F32, LANES))


def _float8(builder, address):
    """Float8 numbers (E4M3) over `_FLOAT8_SCALE`, as float32: with three more bits before its
    exponent, whose bias is 8 less, each is a float16."""
    pointer = ir.VectorType(_I8, LANES).as_pointer()
    found = builder.load(builder.inttoptr(address, pointer), align=1)
    shorts = ir.VectorType(_I16, LANES)
    moved = builder.shl(builder.sext(found, shorts), ir.Constant(shorts, [7] * LANES))
    return _from_half(builder, builder.and_(moved, ir.Constant(shorts, [0xBF80] * LANES)))


def _choose(builder, table, indices):
    """The element of `table` at each index below 16, by a tree of selections."""
    floats = ir.VectorType(_F32, LANES)
    found = [ir.Constant(floats, [value] * LANES) for value in table]
    for bit in (1, 2, 4, 8):
        is_set = builder.icmp_unsigned("!=", builder.and_(indices, _ints(bit)), _ints(0))
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [builder.select(is_set, high, low) for low, high in pairs]
    return found[0]


def _look_up(builder, table, indices):
    """The element of `table` at the low four bits of each index."""
    floats, ints = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16)
    kind = ir.FunctionType(floats, [floats, ints])
    name = "llvm.x86.avx512.permvar.sf.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(permute, [ir.Constant(floats, table), indices])


def _prefetch(builder, address):
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(_I32, value) for value in (0, 3, 1)]
    builder.call(prefetch, [builder.inttoptr(address, pointer), *how])


def _spread(builder, value):
    """A vector of equal elements."""
    undefined = ir.Constant(ir.VectorType(_F32, LANES), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, LANES), None)
    return builder.shuffle_vector(single, undefined, mask)


def _int64(value):
    return ir.Constant(_I64, value)


def _floats(value):
    """A vector of equal float32."""
    return ir.Constant(ir.VectorType(_F32, LANES), [float(value)] * LANES)


def _ints(value):
    """A vector of equal int32."""
    return ir.Constant(ir.VectorType(_I32, LANES), [value] * LANES)


@njit(error_model="numpy")
def _linear(table):
    """Multiply items until none is left, as `linear_code` does."""
    sums, stage, weights = sums_memory(), stage_memory(), _unpacked_memory()
    all_rows, k, form = table[ROWS], table[K], table[FORM]
    panels = (table[N] + PANEL - 1) // PANEL
    chunks = chunks_of(all_rows, k)
    item = fetch_add(table, NEXT, 1)
    while item < panels * chunks:
        panel, chunk = item % panels, item // panels
        first = chunk * all_rows // chunks
        rows = (chunk + 1) * all_rows // chunks - first
        groups = (rows + ROWS_MAX - 1) // ROWS_MAX
        begin_sums(table, panel, rows, sums)
        at = table[WEIGHTS] + panel * table[PANEL_BYTES]
        alone = rows == 1 and k % BLOCK == 0
        for start in range(0, k, _SLICE):
            n = min(_SLICE, k - start)
            if alone:
                if table[ORDER] != 0:
                    stage_in_order(table, first, 1, start, n, stage)
                else:
                    stage_inputs(table, first, 1, start, n, stage, 0)
                _add_row(form, at, start // BLOCK, n // BLOCK, stage, sums)
                continue
            for i in range(0, n, BLOCK):
                _unpack(form, at, (start + i) // BLOCK, weights, i * PANEL)
            for g in range(groups):
                row = g * rows // groups
                many = (g + 1) * rows // groups - row
                if table[ORDER] != 0:
                    stage_in_order(table, first + row, many, start, n, stage)
                else:
                    stage_inputs(table, first + row, many, start, n, stage, 0)
                unpacked_tile(many, stage, 0, weights, 0, n, sums, row * PANEL, 0, 0)
        finish_sums(table, panel, first, rows, sums)
        item = fetch_add(table, NEXT, 1)


@njit(error_model="numpy")
def _embed(table):
    """Write the rows of tokens, times SCALE: an embedding table's fields are `layer_code`'s."""
    weights = _unpacked_memory()
    target, index = float32_at(table[layer_code.TARGET]), int64_at(table[layer_code.INDEX])
    width, scale = table[layer_code.WIDTH], float_of(table[layer_code.SCALE])
    form, panel_bytes = table[layer_code.PANEL_FORM], table[layer_code.SOURCE_ROW]
    first, end = layer_code.next_rows(table)
    while first < end:
        for row in range(first, end):
            token, to = index[row], row * table[layer_code.TARGET_ROW]
            at, lane = table[layer_code.SOURCE] + token // PANEL * panel_bytes, token % PANEL
            for start in range(0, width, BLOCK):
                _unpack(form, at, start // BLOCK, weights, 0)
                for i in range(min(BLOCK, width - start)):
                    target[to + start + i] = weights[i * PANEL + lane] * scale
        first, end = layer_code.next_rows(table)


_SIGNATURE = types.void(types.CPointer(types.int64))
_SOURCES = digest_of(intrinsics, layer_code, linear_code, panel_forms, vector_code)


def _entry_points(sources: int) -> dict[str, Any]:
    """Return the kernels by name; see `attention_code._entry_points`."""

    def linear_quantised(table):
        _ = sources
        _linear(table)

    def embed_quantised(table):
        _ = sources
        _embed(table)

    return {"linear": linear_quantised, "embed": embed_quantised}


_entries = _entry_points(_SOURCES)
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a kernel, `linear` or `embed`, from Numba's cache if it is there. Call it from one
    thread."""
    if name not in _compiled:
        llvm.initialize_native_asmparser()
        _compiled[name] = compiled(_SIGNATURE, _entries[name])
    return int(_compiled[name].address)
