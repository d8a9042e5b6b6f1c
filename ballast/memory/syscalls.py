"""Call Linux memory functions that Python lacks (mmap, madvise, ...), by ctypes.

ctypes releases the GIL in each call. Functions raise OSError; `checked` turns it into DeviceError.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from mmap import PAGESIZE as PAGESIZE
from typing import TypeVar

from ballast.core.errors import DeviceError

_T = TypeVar("_T")

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x1, 0x2, 0x10, 0x20
MAP_NORESERVE, MAP_POPULATE = 0x4000, 0x8000
MADV_DONTNEED, MADV_DONTDUMP, MADV_POPULATE_WRITE = 4, 16, 23
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4
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
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
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


def map_again(source: int, target: int, n_bytes: int) -> None:
    """Map at `target` as well what one shared mapping has at `source`, with its protection. What
    was mapped at `target` is replaced. Raises OSError: EINVAL for private memory."""
    found = _mremap(source, 0, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target)
    if found is None or found == _FAILED:
        raise _error()


def move_page_tables(source: int, target: int, n_bytes: int) -> None:
    """Map at `target` what one mapping has at `source`, and take its page tables along.

    `source` stays mapped with its page tables empty: touching it is a fault that finds the same
    memory. What was mapped at `target` is replaced. Stretches that both begin and end at multiples
    of 2 MiB move by a pointer each. Raises OSError; then `target` may be mapped to nothing at all.
    """
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
    found = _mremap(source, n_bytes, n_bytes, flags, target)
    if found is None or found == _FAILED:
        raise _error()


@functools.cache
def can_move_page_tables() -> bool:
    """Whether this Linux moves the page tables of shared memory (5.13 and later)."""
    try:
        fd = os.memfd_create("ballast-probe", os.MFD_CLOEXEC)
    except OSError:
        return False
    try:
        os.ftruncate(fd, PAGESIZE)
        source = mmap(0, PAGESIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd)
        target = mmap(0, PAGESIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS)
        try:
            move_page_tables(source, target, PAGESIZE)
        except OSError:
            return False
        finally:
            munmap(source, PAGESIZE)
            munmap(target, PAGESIZE)
    finally:
        os.close(fd)
    return True


def is_present(address: int, n_bytes: int) -> bool:
    """Return whether all of `[address, address + n_bytes)` is in the page tables, so that touching
    it causes no fault. Takes 1 us and some 5 ns for each OS page. False if it is unknown."""
    first, end = address // PAGESIZE, -(-(address + n_bytes) // PAGESIZE)
    try:
        entries = os.pread(_pagemap(os.getpid()), 8 * (end - first), 8 * first)
    except OSError:
        return False
    # An entry has 64 bits, the least byte first; the highest of them says "present".
    if len(entries) < 8 * (end - first):
        return False
    return not entries[7::8].translate(None, delete=_PRESENT)


_PRESENT = bytes(range(128, 256))


@functools.cache
def _pagemap(pid: int) -> int:
    """Descriptor of the pagemap of this process, open as long as it lives."""
    return os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def usable_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(os.getpid()))  # of the main thread, which is not bound
    return os.cpu_count() or 1


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
    """Return whether this Linux has MADV_POPULATE_WRITE. Tried on a new page, since on other memory
    EINVAL can also mean that it may not be written."""
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
    """Return free memory of the C allocator to the machine, if the C library can."""
    call = getattr(_libc, "malloc_trim", None)
    if call is not None:
        call(ctypes.c_size_t(0))


def max_map_count() -> int:
    """Return the most mappings that Linux allows a process (65,530 by default)."""
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


def failed(name: str, error: OSError) -> DeviceError:
    """Return the error of a device whose system call `name` has failed."""
    return DeviceError(name, error.strerror or str(error))


def checked(name: str, call: Callable[[], _T]) -> _T:
    """Return what `call` returns; raises DeviceError where it raises OSError."""
    try:
        return call()
    except OSError as error:
        raise failed(name, error) from error


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
