"""Compile the costliest kernels in a process beside a worker's, at the first start of its sources.

Numba compiles on one core, with Python's lock held. So a worker compiles while it should load, on
one of its cores. A second process compiles what takes longest; the worker waits for a kernel that
is being compiled there (`compiled` locks each), and takes its code from the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from ballast.isolation.environment import child_environment
from ballast.kernels.compiled import was_empty

KERNELS = ("attend_float32_over_bfloat16", "attend_float32_over_float32")
"""Of `attention_code`: over half of what a start compiles."""


_begun: list[subprocess.Popen[bytes]] = []
"""Kept: a process ends once its pipe is closed."""


def begin(kernels: Sequence[str] = KERNELS) -> bool:
    """Start a process that compiles `kernels`; it ends with them, or with this process. Returns
    whether it was started: not if code is kept already, or never, or there is one core alone."""
    if not was_empty() or len(os.sched_getaffinity(0)) < 2:
        return False
    command = [sys.executable, "-m", "ballast.kernels.compile_beside", *kernels]
    nothing = subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, env=child_environment()
        )
    except OSError:  # no process or memory for it: this one compiles all
        return False
    _begun.append(child)
    return True


def _end_with_parent() -> None:
    """Wait for the end of standard input: its other end is open while the parent lives."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    from ballast.kernels.attention_code import address_of

    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in sys.argv[1:]:
        address_of(name)
    os._exit(0)
