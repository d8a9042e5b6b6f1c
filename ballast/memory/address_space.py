"""Reserve addresses of this process, and map shared memory beneath them a second time.

Used by `vm_memfd`; Linux only.
"""

from __future__ import annotations

import contextlib
from mmap import PAGESIZE

from ballast.core.units import MiB, ceil_div
from ballast.memory import syscalls as sys

TABLE_BYTES = 2 * MiB
"""What a page table maps: between addresses that begin with one, page tables move whole."""


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
