"""How much memory processes have."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path


class Memory:
    """Resident memory of processes, sampled while it is a context."""

    def __init__(self, processes: Mapping[str, int], every_seconds: float = 0.5) -> None:
        self._processes, self._every_seconds = dict(processes), every_seconds
        self._peak = dict.fromkeys(processes, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> dict[str, float]:
        """MiB."""
        return {name: resident_mib(pid) for name, pid in self._processes.items()}

    def peak(self) -> dict[str, float]:
        """MiB."""
        return {name: max(self._peak[name], mib) for name, mib in self.now().items()}

    def _watch(self) -> None:
        while not self._over.wait(self._every_seconds):
            self._peak = self.peak()


def resident_mib(pid: int) -> float:
    """MiB of one process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
