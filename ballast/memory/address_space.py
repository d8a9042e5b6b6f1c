"""Reserve addresses of this process, and map shared memory beneath them a second time.

Used by `vm_memfd` and `memfd_pages`; Linux only.
"""

from __future__ import annotations

import contextlib
from mmap import PAGESIZE

from ballast.core.errors import DeviceError
from ballast.core.units import MiB, ceil_div
from ballast.memory import syscalls as sys

TABLE_BYTES = 2 * MiB
"""What a page table maps: between addresses that begin with one, page tables move whole."""

_RECOUNT_AFTER = 4096
"""Checks after which mappings are counted anew even if the bound still looks good."""


def reserve_aligned(n_bytes: int, alignment: int) -> int:
    """Reserve addresses that begin at a multiple of `alignment`; returns the first. Raises
    OSError."""
    flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE
    found = sys.mmap(0, n_bytes + alignment, sys.PROT_NONE, flags)
    base = ceil_div(found, alignment) * alignment
    if base > found:
        sys.munmap(found, base - found)
    if tail := found + alignment - base:
        sys.munmap(base + n_bytes, tail)
    return base


def map_aligned(fd: int, n_bytes: int) -> int:
    """Map a file read only, populated, from the begin of a page table on, so that its page tables
    can move by whole tables (`share`); returns the address. Raises OSError."""
    address = reserve_aligned(_whole(n_bytes), TABLE_BYTES)
    flags = sys.MAP_SHARED | sys.MAP_POPULATE | sys.MAP_FIXED
    try:
        return sys.mmap(address, n_bytes, sys.PROT_READ, flags, fd)
    except OSError:
        sys.munmap(address, _whole(n_bytes))
        raise


def unback(address: int, n_bytes: int) -> None:
    """Replace mappings by reserved addresses in one step, so that the addresses are never free.
    Raises OSError."""
    if n_bytes:
        flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE | sys.MAP_FIXED
        sys.mmap(address, n_bytes, sys.PROT_NONE, flags)


def share(source: int, address: int, n_bytes: int, *, moves: bool) -> None:
    """Map at `address` too what is mapped at `source`, as it may be used there; `moves`: with the
    page tables, of which `source` then has none, and finds its memory by faults.

    Raises OSError: EINVAL where `source` is memory that no second mapping can share.
    """
    n_bytes = _whole(n_bytes)
    sys.map_again(source, address, n_bytes)
    if not moves:
        return
    try:
        sys.move_page_tables(source, address, n_bytes)
    except OSError:
        sys.map_again(source, address, n_bytes)


def end_share(source: int, address: int, n_bytes: int, *, moves: bool) -> None:
    """Take back to `source` the page tables that `share` has moved, in one step for all threads:
    who reads from `source` meanwhile finds it mapped. `address` stays mapped. Raises OSError."""
    n_bytes = _whole(n_bytes)
    if moves:
        try:
            sys.move_page_tables(address, source, n_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                sys.map_again(address, source, n_bytes)
            raise


def _whole(n_bytes: int) -> int:
    return ceil_div(n_bytes, PAGESIZE) * PAGESIZE


def count_mappings() -> int:
    """Return the number of mappings that this process has; Linux limits it."""
    return sys.maps().count(b"\n")


class MappingLimit:
    """Keeps the process below half of the mappings that Linux allows it.

    Counts an upper bound, as far as its user's calls go: a fixed map adds at most 2.
    """

    def __init__(self) -> None:
        self._most = sys.max_map_count() // 2
        self._bound = count_mappings() + 1
        self._checks = 0

    def add(self, n: int) -> None:
        """Count `n` mappings that a call may add."""
        self._bound += n

    def check(self, n: int) -> None:
        """Count `n` mappings that a call may add; raises DeviceError if they would be too many."""
        self._checks += 1
        self._bound += n
        if self._bound <= self._most and self._checks < _RECOUNT_AFTER:
            return
        self._checks = 0
        self._bound = count_mappings() + n
        if self._bound > self._most:
            raise DeviceError(
                "mmap",
                f"{self._bound} mappings would pass half of vm.max_map_count; raise it "
                f"(sysctl -w vm.max_map_count={8 * self._most}) or use larger pages",
            )
