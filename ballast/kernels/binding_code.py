"""Pin each thread of a team to one CPU: the compiled part of `team.bind`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from ballast.kernels.intrinsics import call_c_function, call_on_mask, compiled, int64_at

# Fields of the table.
NUMBER = 0
"""Address of a C function `int (void)`: the calling thread's number in the team."""
ALLOW = 1
"""Address of `sched_setaffinity`."""
MASKS = 2
"""Address of int64 (threads, WORDS): the CPUs that each is allowed."""
N_FIELDS = 3

WORDS = 16
"""Words of a mask: 1024 CPUs, as in the C library's `cpu_set_t`."""


def _bind(address):
    table = int64_at(address)
    mask = table[MASKS] + 8 * WORDS * call_c_function(table[NUMBER])
    call_on_mask(table[ALLOW], mask, WORDS)  # refused where the CPU is gone: it stays where it was


def address() -> int:
    """Address of the compiled `void (int64 *table)`; see `intrinsics.compiled`."""
    return compiled(_bind)
