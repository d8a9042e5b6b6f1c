"""Limit the memory, processor time and wall-clock time of a child process.

The children of a `zygote` apply them to themselves.
"""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from ballast.core.units import GiB, KiB, format_bytes

_GRACE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one child process.

    `memory_bytes`: private memory beyond that of the process when it is limited; `cpu_seconds`:
    processor time of all its threads; `seconds`: wall-clock time, for work that waits instead of
    computing.
    """

    memory_bytes: int = 3 * GiB
    cpu_seconds: int = 60
    seconds: float = 300.0

    def apply(self) -> None:
        """Limit this process; its parent must watch the wall-clock time.

        The kernel ends this process before others where memory runs out, and writes no core dump.
        """
        _lower(resource.RLIMIT_DATA, _data_bytes() + self.memory_bytes)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        # At the soft limit the kernel sends SIGXCPU, which shows the cause; at the hard, SIGKILL.
        _lower(resource.RLIMIT_CPU, used + self.cpu_seconds, _GRACE_SECONDS)
        _lower(resource.RLIMIT_CORE, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")

    def exceeded(self, ended_by: signal.Signals) -> str:
        """Describe why the kernel ended a process under these limits with this signal."""
        if ended_by == signal.SIGXCPU:
            return f"it took more than {self.cpu_seconds} s of processor time"
        return f"its process was ended by {ended_by.name}, as when memory runs out"

    @property
    def no_memory(self) -> str:
        """Message for a process under these limits whose allocation failed."""
        return f"it took more than {format_bytes(self.memory_bytes)} of memory"


def _lower(which: int, value: int, grace: int = 0) -> None:
    """Lower a soft limit to `value`, and the hard one to `grace` above it; neither is raised."""
    soft, hard = (
        wanted if present == resource.RLIM_INFINITY else min(wanted, present)
        for wanted, present in zip((value, value + grace), resource.getrlimit(which), strict=True)
    )
    resource.setrlimit(which, (soft, hard))


def _data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * KiB
    raise AssertionError("the kernel lists VmData")
