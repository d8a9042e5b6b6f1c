"""Run a program of CPU kernels: all threads run each operation, with barriers between.

Compiled part of `team.Program`, also used by `models.fused.experts`.
A *program* is a list of operations, each the address of a kernel and that of its table (see
`attention_code.py`). All threads of a team call every kernel in order; a barrier stands behind
each, so that an operation may read what the one before it wrote.
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
)

# Fields of the program's table.
ARRIVED = 0
"""Arrivals at barriers so far, of all threads; 0 before each run. Alone in its cache line."""
OPERATIONS = 8
"""Address of int64 (operations, 2): kernel, table."""
N_OPERATIONS = 9
TEAM_SIZE = 10
"""Address of a C function `int (void)`: threads of this team."""
YIELD = 11
"""Address of a C function `int (void)` that lets another thread have the core."""
N_FIELDS = 16

SPINS = 2000
"""Polls of a barrier before the core is yielded to others: 20 to 100 us, longer than most
operations of a decode step, shorter than the scheduler would take the core away for."""


def _run(address):
    table = int64_at(address)
    team = call_c_function(table[TEAM_SIZE])
    operations = int64_at(table[OPERATIONS])
    for i in range(table[N_OPERATIONS]):
        call_kernel(operations[2 * i], operations[2 * i + 1])
        if team > 1:
            fetch_add(table, ARRIVED, 1)
            due = team * (i + 1)
            spins = 0
            while load_acquire(table) < due:
                pause()
                spins += 1
                if spins > SPINS:
                    call_c_function(table[YIELD])


def address() -> int:
    """Address of the compiled `void (int64 *table)`; see `intrinsics.compiled`."""
    return compiled(_run)
