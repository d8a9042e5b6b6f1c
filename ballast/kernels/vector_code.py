"""Generate LLVM code for vectors of float32, and say how many lanes they have in all CPU kernels.

The intrinsics of attention consist of it. Each function adds instructions at an LLVM builder. Sums
across a vector are taken as a fixed tree, and nothing is reordered: results are the same to the bit
wherever this code is used.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from llvmlite import binding
from numba.core import cgutils, config


def compiles_for(feature):
    """Return whether Numba may use a feature of CPUs: this one's, unless `NUMBA_CPU_FEATURES` or
    `NUMBA_CPU_NAME=generic` name others."""
    if config.CPU_FEATURES is None:
        return binding.get_host_cpu_features().get(feature, False)
    return f"+{feature}" in config.CPU_FEATURES.split(",")


LANES = 16 if compiles_for("avx512f") else 8
"""float32 in a vector of the kernels' inner loops: a register of AVX-512 or AVX2."""

F32 = ir.FloatType()
I64 = ir.IntType(64)
I32 = ir.IntType(32)
I16 = ir.IntType(16)
I8 = ir.IntType(8)

VECTOR = ir.VectorType(F32, LANES)


def int64(value):
    return ir.Constant(I64, value)


def element(builder, pointer, *offsets):
    """Return a pointer to the element at the sum of some offsets."""
    for offset in offsets:
        pointer = builder.gep(pointer, [offset])
    return pointer


def load(builder, pointer):
    """Load a vector of float32 from an element on: float32, or bfloat16 or int8 widened exactly."""
    kind = pointer.type.pointee
    if kind == F32:
        return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    if kind == I8:
        small = ir.VectorType(I8, LANES)
        whole = builder.load(builder.bitcast(pointer, small.as_pointer()), align=1)
        return builder.sitofp(whole, VECTOR)
    bits = ir.VectorType(I16, LANES)
    halves = builder.load(builder.bitcast(pointer, bits.as_pointer()), align=2)
    wide = ir.VectorType(I32, LANES)
    shift = ir.Constant(wide, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, wide), shift), VECTOR)


def store(builder, vector, pointer):
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def call_llvm(builder, name, *arguments):
    """Call an intrinsic of LLVM whose arguments and result are all float32, or all vectors."""
    kind = arguments[0].type
    suffix = "f32" if kind == F32 else f"v{LANES}f32"
    function = ir.FunctionType(kind, [kind] * len(arguments))
    found = cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}")
    return builder.call(found, arguments)


def multiply_add(builder, a, b, c):
    return call_llvm(builder, "fmuladd", a, b, c)


def pick_lanes(builder, a, b, lanes):
    """Return the vector of some lanes of `a` and `b`, those of `b` counted on from `a`'s."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def broadcast(builder, value):
    """Return a vector of equal elements."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return pick_lanes(builder, single, undefined, [0] * LANES)


def sums_across(builder, vectors):
    """Return the sums across each of LANES vectors, as one vector in their order.

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
                pick_lanes(builder, vectors[i], vectors[i + n], lower),
                pick_lanes(builder, vectors[i], vectors[i + n], upper),
            )
            for i in range(n)
        ]
        segment = half
    return vectors[0]


def prefetch_at(builder, pointer):
    """Fetch a cache line into the second cache: the first has too few outstanding misses to keep
    memory busy, and attention took half as long again where lines were fetched into it."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, keep, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(function, [address, read, keep, data])


def combine_lanes(builder, vector, combine):
    """Combine the lanes of a vector: upper half with lower half, and so on."""
    half = LANES // 2
    while half:
        lower, upper = list(range(half)), list(range(half, 2 * half))
        vector = combine(
            pick_lanes(builder, vector, vector, lower), pick_lanes(builder, vector, vector, upper)
        )
        half //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


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


def float_constant(kind, value):
    """float32 `value` as a scalar, or in all lanes of a vector."""
    value = float(np.float32(value))
    return ir.Constant(kind, value if kind == F32 else [value] * LANES)


def polynomial(builder, x, factors):
    result = float_constant(x.type, factors[0])
    for factor in factors[1:]:
        result = multiply_add(builder, result, x, float_constant(x.type, factor))
    return result


def exp_of(builder, x):
    """exp of float32 x <= 0 to 2 units in the last place; 0 below -87, where it is under 2e-38."""
    kind = x.type
    lowest, one = float_constant(kind, _LOWEST), float_constant(kind, 1.0)
    small = builder.fcmp_ordered("<", x, lowest)
    bounded = builder.select(small, lowest, x)
    n = call_llvm(builder, "rint", builder.fmul(bounded, float_constant(kind, _LOG2_E)))
    y = multiply_add(builder, n, float_constant(kind, -_LN2_HIGH), bounded)
    y = multiply_add(builder, n, float_constant(kind, -_LN2_LOW), y)
    square = builder.fmul(y, y)
    tail = multiply_add(builder, polynomial(builder, y, _EXP), square, builder.fadd(y, one))
    # Times two to the n: the result is a normal number.
    whole = I32 if kind == F32 else ir.VectorType(I32, LANES)
    shift = ir.Constant(whole, 23 if kind == F32 else [23] * LANES)
    exponent = builder.shl(builder.fptosi(n, whole), shift)
    result = builder.bitcast(builder.add(builder.bitcast(tail, whole), exponent), kind)
    return builder.select(small, float_constant(kind, 0.0), result)


def tanh_of(builder, x):
    """tanh of float32 x to about 2e-7 of its value; a polynomial where exp would cancel."""
    kind = x.type
    one = float_constant(kind, 1.0)
    size = call_llvm(builder, "fabs", x)
    e = exp_of(builder, builder.fmul(size, float_constant(kind, -2.0)))
    far = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    z = builder.fmul(x, x)
    cube = builder.fmul(z, size)
    near = multiply_add(builder, polynomial(builder, z, _TANH), cube, size)
    is_near = builder.fcmp_ordered("<", size, float_constant(kind, _TANH_NEAR))
    result = builder.select(is_near, near, far)
    return call_llvm(builder, "copysign", result, x)
