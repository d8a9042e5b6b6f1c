"""Reserve a lane's activation buffer at stable addresses, with memory only as far as it was used.

Built by devices (one per lane) and further ranks, and for profile runs. Models that run in turns on
a lane use the same one.
"""

from __future__ import annotations

import mmap

import numpy as np


class Workspace:
    """`n_bytes` of anonymous memory at one address, for one job at a time.

    The operating system gives memory where it is first written; it stays with the process and
    counts as the lane's activations (`ballast.memory.arena`).
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE), flags=flags)
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    def forget(self) -> None:
        """Return the memory to the operating system; addresses stay, contents are lost. No job may
        be running."""
        self._memory.madvise(mmap.MADV_DONTNEED)
