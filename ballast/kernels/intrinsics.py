"""Define Numba intrinsics for all CPU kernels: addresses as arrays, atomics, bfloat16, calls.

A bfloat16 number is handled as its bits, uint16. Numba's cache does not see that a kernel depends
on this file: touch the modules that import it when it changes, or let their kernels close over its
digest (`digest_of`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.compiled import compiled as compile_kernel

_VOID = ir.VoidType()
_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)


_kept: list[Any] = []
"""Compiled functions: their code lives as long as these do."""


def digest_of(*modules: ModuleType) -> int:
    """A digest of the source of some modules, as an int64: equal only where that is."""
    digest = hashlib.sha256()
    for module in modules:
        assert module.__file__ is not None, "it is a file of this package"
        digest.update(Path(module.__file__).read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


@functools.cache
def compiled(kernel: Any) -> int:
    """Address of a `kernel`, compiled as `void (int64 table)`, from Numba's cache if it is there.

    Call it from one thread.
    """
    _kept.append(compile_kernel(types.void(types.int64), kernel))
    return int(_kept[-1].address)


def _pointer_to(kind):
    def pointer(context, address):
        def generate(ctx, builder, signature, arguments):
            return builder.inttoptr(arguments[0], ctx.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    # Where an intrinsic is an argument, its name tells functions specialised by it apart: in one
    # process, code loaded from Numba's cache goes by such names alone.
    pointer.__name__ = pointer.__qualname__ = f"{kind}_at"
    return pointer


float32_at = intrinsic(_pointer_to(types.float32))
"""int64 address -> pointer."""
uint16_at = intrinsic(_pointer_to(types.uint16))
int64_at = intrinsic(_pointer_to(types.int64))
int32_at = intrinsic(_pointer_to(types.int32))
int8_at = intrinsic(_pointer_to(types.int8))


@intrinsic
def fetch_add(context, table, field, amount):
    """Atomically add to a field of a table of int64; return its previous value."""

    def generate(ctx, builder, signature, arguments):
        pointer = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), generate


@intrinsic
def replace_if_equal(context, table, old, new):
    """Atomically set the first field of a table to `new` if it is `old`."""

    def generate(ctx, builder, signature, arguments):
        builder.cmpxchg(*arguments, "seq_cst")
        return ctx.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64), generate


@intrinsic
def load_acquire(context, table):
    """Load the first field of a table with acquire semantics."""

    def generate(ctx, builder, signature, arguments):
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def call_kernel(context, kernel, table):
    """Call the kernel at an address with the address of its table."""

    def generate(ctx, builder, signature, arguments):
        kind = ir.FunctionType(_VOID, [_I64]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_c_function(context, function):
    """Call the C function `int (void)` at an address; returns its result."""

    def generate(ctx, builder, signature, arguments):
        kind = ir.FunctionType(_I32, []).as_pointer()
        answer = builder.call(builder.inttoptr(arguments[0], kind), [])
        return builder.sext(answer, _I64)

    return types.int64(types.int64), generate


@intrinsic
def call_on_mask(context, function, mask, words):
    """Call `int (pid_t, size_t, cpu_set_t *)`, such as `sched_setaffinity`, for the calling thread
    with a mask of so many int64; what it returns."""

    def generate(ctx, builder, signature, arguments):
        kind = ir.FunctionType(_I32, [_I32, _I64, _I64]).as_pointer()
        n_bytes = builder.mul(arguments[2], ir.Constant(_I64, 8))
        given = [ir.Constant(_I32, 0), n_bytes, arguments[1]]
        answer = builder.call(builder.inttoptr(arguments[0], kind), given)
        return builder.sext(answer, _I64)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(context):
    """Execute the CPU's pause instruction for spinning loops, if it has one."""

    def generate(ctx, builder, signature, arguments):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(_VOID, [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return ctx.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of(context, bits):
    """The float32 whose bits are the low half of an int64."""

    def generate(ctx, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], _I32), _F32)

    return types.float32(types.int64), generate


@intrinsic
def widen(context, element):
    """float32, bfloat16 or int8 as float32, exactly."""
    if element == types.float32:
        return types.float32(types.float32), lambda ctx, builder, signature, arguments: arguments[0]

    def generate(ctx, builder, signature, arguments):
        if element == types.int8:
            return builder.sitofp(arguments[0], _F32)
        bits = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    return types.float32(element), generate


@intrinsic
def narrow(context, value, like):
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
def magnitude(context, value):
    """The bits of |float32 `value`|, which order as the magnitudes do, NaN beyond infinity."""

    def generate(ctx, builder, signature, arguments):
        bits = builder.and_(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 0x7FFFFFFF))
        return builder.zext(bits, _I64)

    return types.int64(types.float32), generate


@intrinsic
def rounded_int8(context, value):
    """float32 `value`, not NaN, rounded to the nearest of -127 .. 127, ties to even."""

    def generate(ctx, builder, signature, arguments):
        kind = ir.FunctionType(_F32, [_F32])
        rint = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32")
        found = builder.call(rint, [arguments[0]])
        for sign, bound in (("<", ir.Constant(_F32, 127.0)), (">", ir.Constant(_F32, -127.0))):
            found = builder.select(builder.fcmp_ordered(sign, found, bound), found, bound)
        return builder.trunc(builder.fptosi(found, _I32), ir.IntType(8))

    return types.int8(types.float32), generate
