"""Run a program of CPU kernels: operations one after the other, each shared by a team's threads.

Compiled part of `team.Program`, also used by `models.fused.experts`.
A *program* is a list of operations, each the address of a kernel and that of its table (see
`attention_code.py`). An operation may read what the one before it wrote: it begins when all threads
that entered the one before have left it, of which the first to leave found no work in it that was
not taken.

A thread from which the scheduler has taken its CPU is waited for only if it is within an operation:
others pass it, and it goes on with the operation at hand. With a barrier of all threads behind each
operation, beside processes that want the CPUs too, each of hundreds of operations waited for a turn
of the scheduler, and a decode step of 1 ms took up to 230 ms.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from ballast.kernels.intrinsics import (
    call_c_function,
    call_kernel,
    compiled,
    fetch_add,
    int64_at,
    load_acquire,
    pause,
    replace_if_equal,
)

# Fields of the program's table.
PROGRESS = 0
"""Operations that are done << 32 | threads that entered the next << 16 | those that left it; 0
before each run. Alone in its cache line."""
OPERATIONS = 8
"""Address of int64 (operations, 2): kernel, table."""
N_OPERATIONS = 9
YIELD = 10
"""Address of a C function `int (void)` that lets another thread have the core."""
N_FIELDS = 16

ENTERED, LEFT = 1 << 16, 1
_COUNT = ENTERED - 1

SPINS = 2000
"""Polls of an operation before the core is yielded to others: 20 to 100 us, longer than most
operations of a decode step, shorter than the scheduler would take the core away for."""


def _run(address):
    table = int64_at(address)
    operations, n = int64_at(table[OPERATIONS]), table[N_OPERATIONS]
    i = load_acquire(table) >> 32
    while i < n:
        i = fetch_add(table, PROGRESS, ENTERED) >> 32
        if i >= n:
            break
        call_kernel(operations[2 * i], operations[2 * i + 1])
        now = fetch_add(table, PROGRESS, LEFT) + LEFT
        spins = 0
        while now >> 32 == i:
            if (now >> 16) & _COUNT == now & _COUNT:
                replace_if_equal(table, now, (i + 1) << 32)
            else:
                pause()
                spins += 1
                if spins > SPINS:
                    call_c_function(table[YIELD])
            now = load_acquire(table)
        i = now >> 32


def address() -> int:
    """Address of the compiled `void (int64 *table)`; see `intrinsics.compiled`."""
    return compiled(_run)
