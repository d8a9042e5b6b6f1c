"""The few Linux calls the memory needs that Python does not offer. ctypes drops the GIL in each."""

from __future__ import annotations

import ctypes
import functools
import os
from mmap import PAGESIZE as PAGESIZE

from ballast.core.errors import DeviceError

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x1, 0x2, 0x10, 0x20
MAP_NORESERVE, MAP_POPULATE = 0x4000, 0x8000
MADV_DONTNEED, MADV_DONTDUMP, MADV_POPULATE_WRITE = 4, 16, 23
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8

_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value

_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mprotect = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def mmap(address: int, n_bytes: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """The address mapped. Raises OSError."""
    found = _mmap(address or None, n_bytes, prot, flags, fd, offset)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def munmap(address: int, n_bytes: int) -> None:
    """Raises OSError."""
    if _munmap(address, n_bytes):
        raise _error()


def mprotect(address: int, n_bytes: int, prot: int) -> None:
    """Raises OSError: EACCES where the file behind it may not be written."""
    if _mprotect(address, n_bytes, prot):
        raise _error()


def madvise(address: int, n_bytes: int, advice: int) -> None:
    """Raises OSError."""
    if _madvise(address, n_bytes, advice):
        raise _error()


def prefault(address: int, n_bytes: int) -> None:
    """Enter mapped, writable memory into the page tables, so that writing to it is no fault.

    Raises OSError: ENOMEM where nothing is mapped or no memory is left, EINVAL where it may not be
    written, EFAULT where touching it would be a fatal signal. Does nothing before Linux 5.14.
    """
    if can_populate():
        start = address - address % PAGESIZE
        size = -(-(address + n_bytes - start) // PAGESIZE) * PAGESIZE
        madvise(start, size, MADV_POPULATE_WRITE)


@functools.cache
def can_populate() -> bool:
    """Whether this Linux knows MADV_POPULATE_WRITE. Asked of a page of our own: on other memory
    the answer "unknown" (EINVAL) also means "may not be written"."""
    page = mmap(0, PAGESIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS)
    try:
        madvise(page, PAGESIZE, MADV_POPULATE_WRITE)
    except OSError:
        return False
    finally:
        munmap(page, PAGESIZE)
    return True


def fallocate(fd: int, mode: int, offset: int, n_bytes: int) -> None:
    """Raises OSError."""
    if _fallocate(fd, mode, offset, n_bytes):
        raise _error()


def mallopt(parameter: int, value: int) -> None:
    """glibc only. Raises DeviceError where the C library has no mallopt or refuses the value."""
    call = getattr(_libc, "mallopt", None)
    if call is None:
        raise DeviceError("mallopt", "this C library has none; run on glibc")
    if not call(ctypes.c_int(parameter), ctypes.c_int(value)):
        raise DeviceError("mallopt", f"refused parameter {parameter} = {value}")


def malloc_trim() -> None:
    """Give free memory of the C allocator back to the machine; nothing where it cannot."""
    call = getattr(_libc, "malloc_trim", None)
    if call is not None:
        call(ctypes.c_size_t(0))


def max_map_count() -> int:
    """Mappings Linux allows this process (65,530 unless the administrator said otherwise)."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read())
    except OSError:
        return 65_530


def maps() -> bytes:
    """/proc/self/maps, one mapping a line."""
    with open("/proc/self/maps", "rb", buffering=0) as file:
        parts = []
        while part := file.read(1 << 20):
            parts.append(part)
    return b"".join(parts)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
