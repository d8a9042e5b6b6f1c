"""Check memory for `ballast doctor`: amount, limit of mappings, speed of touching and mapping."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from ballast.bench.doctor_finding import Finding, judged
from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.units import MiB, ceil_div, format_bytes
from ballast.memory import syscalls
from ballast.memory.host_memory import available, installed
from ballast.memory.vm import Range
from ballast.memory.vm_memfd import MemfdVm

_TOUCHED = 64 * MiB
"""Memory that the speed checks take for a moment."""
_TIGHT = 0.8
"""Share of the available memory above which a need is called tight."""
_SLOW_TOUCH = 0.2e9
_SLOW_REUSE = 2e9
_SLOW_MAP = 200e-6


def room(wanted: int, what: str, *, surely: bool = True) -> Finding:
    """Whether `wanted` more bytes can be had: machine and control group.

    A server does not start where it could never have as much, and warns where it could not now.
    `surely`: whether the server allocates these bytes when it starts.
    """
    left, who = available()
    most, _ = installed()
    return judged(
        "memory",
        f"{format_bytes(left)} of {format_bytes(most)} available ({who}), {what} wants "
        f"{format_bytes(wanted)}",
        "lower `devices[0].budget`, or serve fewer models",
        fail=surely and wanted > most,
        warn=wanted > _TIGHT * left,
    )


def mappings(budget: int, page_bytes: int) -> Finding:
    """Linux bounds the mappings of a process; in the worst case no two pages are adjacent."""
    allowed = syscalls.max_map_count()
    needed = 2 * ceil_div(budget, page_bytes)
    return judged(
        "mappings",
        f"vm.max_map_count = {allowed}; the pool stays below half of it, and may need {needed}",
        f"`sysctl -w vm.max_map_count={_rounded(4 * needed)}`, or a larger `devices[0].page`",
        warn=needed > allowed // 2,
    )


def pages(page_bytes: int, clock: Clock) -> Iterator[Finding]:
    """Take `_TOUCHED` bytes of device memory through the pool's own calls, and time them."""
    n = ceil_div(_TOUCHED, page_bytes)
    try:
        vm = MemfdVm(page_bytes, n)
    except DeviceError as error:
        cure = "the kernel or the container forbids memfd_create: lift that"
        yield judged("pages", str(error), cure, fail=True)
        return
    try:
        where = vm.reserve(n * page_bytes)
        yield from _timed(vm, where, n, clock)
        vm.release(where)
    except DeviceError as error:
        yield judged("pages", str(error), "see the memory checks above", fail=True)
    finally:
        vm.close()


def _timed(vm: MemfdVm, where: Range, n: int, clock: Clock) -> Iterator[Finding]:
    # Backwards, so that no two pages are merged into one mapping.
    ids = list(range(n))[::-1]
    short = None

    def populate() -> None:
        nonlocal short
        short = vm.populate(list(range(n)))

    touch = n * vm.page_bytes / _seconds(clock, populate)
    if short is not None:
        found = f"{short.pages} of {n} pages could not be had"
        yield judged("pages", found, "free memory, or lower the budget", fail=True)
        return
    put = _seconds(clock, lambda: vm.map(where, 0, ids, prefault=True)) / n
    probe = b"ballast"
    ctypes.memmove(where.address(n - 1), probe, len(probe))
    ctypes.memset(where.base, 0, (n - 1) * vm.page_bytes)
    reuse = (
        (n - 1)
        * vm.page_bytes
        / _seconds(clock, lambda: ctypes.memset(where.base, 1, (n - 1) * vm.page_bytes))
    )
    agree = len(vm.os_pages(where)) == n
    take = _seconds(clock, lambda: vm.unmap(where, 0, n)) / n
    vm.map(where, 0, ids[-1:])
    kept = ctypes.string_at(where.base, len(probe)) == probe and agree
    vm.unmap(where, 0, 1)
    yield judged(
        "pages",
        f"{n} of {format_bytes(vm.page_bytes)}: contents "
        f"{'survive' if kept else 'DO NOT survive'} being mapped elsewhere",
        "this kernel does not behave as Linux should; is it a compatibility layer?",
        fail=not kept,
    )
    yield judged(
        "memory speed",
        f"first touch {touch / 1e9:.2g} GB/s, re-use {reuse / 1e9:.3g} GB/s",
        "other processes are busy, or the machine is overcommitted: timings will be noisy",
        warn=touch < _SLOW_TOUCH or reuse < _SLOW_REUSE,
    )
    yield judged(
        "page cost",
        f"map {put * 1e6:.3g} us, unmap {take * 1e6:.3g} us a page",
        "take a larger `devices[0].page`, so that fewer pages change hands",
        warn=put > _SLOW_MAP or take > _SLOW_MAP,
    )


def _seconds(clock: Clock, call: Callable[[], object]) -> float:
    start = clock.now()
    call()
    return max(clock.now() - start, 1e-9)


def _rounded(n: int) -> int:
    """Up to two leading digits, as an administrator would write it."""
    scale: int = 10 ** max(0, len(str(n)) - 2)
    return ceil_div(n, scale) * scale
