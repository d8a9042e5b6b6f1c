"""Wait at a barrier of processes that share memory: the compiled part of `meeting`.

Every rank, with one thread, counts the barriers it has reached, in memory that all ranks map.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from ballast.kernels.intrinsics import (
    call_c_function,
    compiled,
    fetch_add,
    int64_at,
    load_acquire,
    pause,
)

# Fields of a rank's table.
COUNTERS = 0
"""Address of the first rank's counter."""
RANK = 1
RANKS = 2
YIELD = 3
"""Address of a C function `int (void)` that lets another thread have the core."""
N_FIELDS = 4

COUNTER_BYTES = 128
"""From a counter to the next: no two share a cache line, or a pair of lines fetched together."""
SPINS = 2000
"""Polls of a counter before the core is yielded to others."""


def _meet(address):
    table = int64_at(address)
    first = table[COUNTERS]
    due = fetch_add(int64_at(first + table[RANK] * COUNTER_BYTES), 0, 1) + 1
    for rank in range(table[RANKS]):
        counter = int64_at(first + rank * COUNTER_BYTES)
        spins = 0
        while load_acquire(counter) < due:
            pause()
            spins += 1
            if spins > SPINS:
                call_c_function(table[YIELD])


def address() -> int:
    """Address of the compiled `void (int64 *table)`; see `intrinsics.compiled`."""
    return compiled(_meet)
