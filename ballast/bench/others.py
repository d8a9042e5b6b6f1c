"""What else ran on this machine while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

DISTURBED = 0.1
"""Cores; what others may take without being noticed in a measurement."""


class Others:
    """`cores` that other processes and the hypervisor took, on average, while it was a context."""

    cores = 0.0

    def __enter__(self) -> Self:
        self._began, self._taken = time.monotonic(), _taken()
        return self

    def __exit__(self, *_: object) -> None:
        self.cores = max(0.0, (_taken() - self._taken) / (time.monotonic() - self._began))


def _taken() -> float:
    """Seconds of all cores since boot that were not idle and not this process's."""
    line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
