"""Check huge pages for `ballast doctor`: availability, measured benefit, and how to allow them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ballast.bench.doctor_finding import Finding, Verdict, judged
from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.units import GiB, MiB, ceil_div, format_bytes
from ballast.memory import huge_pages, syscalls
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm

_BYTES = 64 * MiB
_READS = 200_000
CHECK = "huge pages"


def check(page_bytes: int, clock: Clock) -> Finding:
    """Whether pages of `page_bytes` lie in huge ones; takes `_BYTES` of memory for a moment."""
    if not huge_pages.fits(page_bytes):
        huge = format_bytes(huge_pages.huge_page_bytes())
        found = f"not asked for: pages of {format_bytes(page_bytes)} are not whole ones of {huge}"
        return Finding(CHECK, Verdict.OK, found)
    policy = huge_pages.shmem_policy()
    if not huge_pages.are_allowed():
        small, large = (_private_read_ns(huge, clock) for huge in (False, True))
        return judged(
            CHECK,
            f"none for shared memory (shmem_enabled: {policy}); in private memory a random read "
            f"takes {small:.3g} ns in small pages, {large:.3g} in huge ones",
            f"{huge_pages.CURE}; devices then map a GiB anew in about a millisecond",
            warn=policy is not None,
        )
    try:
        (small_map, small), (large_map, large) = (
            _device_costs(page_bytes, huge, clock) for huge in (False, True)
        )
    except DeviceError as error:
        return judged(CHECK, str(error), "see the memory checks above", fail=True)
    return Finding(
        CHECK,
        Verdict.OK,
        f"used (shmem_enabled: {policy}): mapping a GiB anew takes {large_map:.3g} ms instead of "
        f"{small_map:.3g}, a random read {large:.3g} ns instead of {small:.3g}",
    )


def _device_costs(page_bytes: int, huge: bool, clock: Clock) -> tuple[float, float]:
    """(milliseconds to make the page tables of a GiB, nanoseconds of a random read)."""
    n = ceil_div(_BYTES, page_bytes)
    vm = MemfdVm(page_bytes, n, moves=False, huge=huge)
    try:
        if vm.populate(range(n)) is not None:
            raise DeviceError("populate", f"{format_bytes(_BYTES)} could not be had")
        where = vm.reserve(n * page_bytes)
        began = clock.now()
        vm.map(where, 0, range(n), prefault=True)
        mapping = (clock.now() - began) / where.n_bytes * GiB * 1e3
        return mapping, _read_ns(where.base, where.n_bytes, clock)
    finally:
        vm.close()


def _private_read_ns(huge: bool, clock: Clock) -> float:
    """Nanoseconds of a random read of private memory in huge pages, where Linux gives any."""
    align = huge_pages.huge_page_bytes()
    flags = syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS
    size = _BYTES + align
    found = syscalls.mmap(0, size, syscalls.PROT_READ | syscalls.PROT_WRITE, flags)
    try:
        advice = syscalls.MADV_HUGEPAGE if huge else syscalls.MADV_NOHUGEPAGE
        base = ceil_div(found, align) * align
        with contextlib.suppress(OSError):  # a Linux without huge pages
            syscalls.madvise(base, _BYTES, advice)
        array_at(base, (_BYTES,), np.uint8)[:] = 1
        return _read_ns(base, _BYTES, clock)
    finally:
        syscalls.munmap(found, size)


def _read_ns(address: int, n_bytes: int, clock: Clock) -> float:
    values = array_at(address, (n_bytes // 8,), np.int64)
    order: np.ndarray[Any, Any] = np.random.default_rng(0).integers(0, len(values), _READS)
    began = clock.now()
    values[order].sum()
    return (clock.now() - began) / _READS * 1e9
