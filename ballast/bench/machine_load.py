"""Measure the CPU use of other processes during a measurement, and warn where it is too high."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

DISTURBED = 0.1
"""Cores that other processes may use before a measurement counts as disturbed."""


def disturbance(others: OtherLoad) -> str | None:
    """Warning about a measurement that others disturbed; None: they took too little to show."""
    if others.cores <= DISTURBED:
        return None
    return f"other processes took {others.cores:.1f} cores meanwhile: measure again when idle"


class OtherLoad:
    """`cores` that other processes and the hypervisor took, on average, while it was a context.

    `children`: whether child processes are others, too; those that are not count as this process
    does once it has waited for them.
    """

    cores = 0.0

    def __init__(self, *, children: bool = True) -> None:
        self._children = children

    def __enter__(self) -> Self:
        self._began, self._taken = time.monotonic(), self._seconds()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began
        self.cores = max(0.0, (self._seconds() - self._taken) / seconds)

    def _seconds(self) -> float:
        """Seconds of all cores since boot that were neither idle nor ours."""
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        busy = user + nice + system + irq + softirq + steal
        times = os.times()
        ours = times.user + times.system
        if not self._children:
            ours += times.children_user + times.children_system
        return busy / os.sysconf("SC_CLK_TCK") - ours
