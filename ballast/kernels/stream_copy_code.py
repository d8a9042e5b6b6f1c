"""Copy memory by non-temporal stores, which bypass the caches: compiled part of `stream_copy`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ballast.kernels.intrinsics import compiled, int64_at

# Fields of the table.
TARGET = 0
"""Address that is a multiple of LINE."""
SOURCE = 1
N_BYTES = 2
"""A multiple of LINE."""
N_FIELDS = 3

LINE = 64

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic
def _stream_lines(context, target, source, n_bytes):
    """Copy whole lines, and make them visible to threads that are notified afterwards."""

    def generate(ctx, builder, signature, arguments):
        target, source, n_bytes = arguments
        line = ir.VectorType(_I32, LINE // 4)
        once = builder.module.add_metadata([ir.Constant(_I32, 1)])
        with cgutils.for_range(builder, builder.udiv(n_bytes, ir.Constant(_I64, LINE))) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, LINE))
            read = builder.inttoptr(builder.add(source, at), line.as_pointer())
            write = builder.inttoptr(builder.add(target, at), line.as_pointer())
            stored = builder.store(builder.load(read, align=1), write, align=LINE)
            stored.set_metadata("nontemporal", once)
        builder.fence("seq_cst")
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _stream_copy(address):
    table = int64_at(address)
    _stream_lines(table[TARGET], table[SOURCE], table[N_BYTES])


def address() -> int:
    """Address of the compiled `void (int64 *table)`; see `intrinsics.compiled`."""
    return compiled(_stream_copy)
