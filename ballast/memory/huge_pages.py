"""Check for and request transparent huge pages of shared memory, for a CPU device's memory.

Linux decides by `/sys/kernel/mm/transparent_hugepage/shmem_enabled`. Under `advise` mappings that
ask by `MADV_HUGEPAGE` get them, under `always` and `within_size` all do. One page-table entry then
covers 2 MiB instead of 4 KiB: mapping memory anew takes a hundredth of the time, and reading it
misses the TLB less often. A huge page is one piece of memory, so only devices whose own pages
consist of whole huge ones ask: else a populated page would bring its unpopulated neighbours along,
beyond the budget.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from ballast.core.units import MiB
from ballast.memory import syscalls

_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
ADVISE = "advise"
CURE = f"`echo {ADVISE} > {_FOLDER / 'shmem_enabled'}`"
"""Command that allows them, until the next boot."""
_ALLOWING = (ADVISE, "within_size", "always", "force")


@functools.cache
def huge_page_bytes(folder: Path = _FOLDER) -> int:
    """Size of a huge page."""
    try:
        return int((folder / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 * MiB


def shmem_policy(folder: Path = _FOLDER) -> str | None:
    """The policy for shared memory; None: this Linux has no such thing."""
    try:
        words = (folder / "shmem_enabled").read_text().split()
    except OSError:
        return None
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def fits(page_bytes: int, folder: Path = _FOLDER) -> bool:
    """Whether pages of `page_bytes` consist of whole huge pages."""
    return page_bytes % huge_page_bytes(folder) == 0


def are_allowed(folder: Path = _FOLDER) -> bool:
    """Whether Linux gives shared memory huge pages where it is asked to."""
    return shmem_policy(folder) in _ALLOWING


def advise(address: int, n_bytes: int) -> None:
    """Ask for huge pages beneath a mapping, from its next fault or populating on. Nothing where
    this Linux has none."""
    with contextlib.suppress(OSError):
        syscalls.madvise(address, n_bytes, syscalls.MADV_HUGEPAGE)
