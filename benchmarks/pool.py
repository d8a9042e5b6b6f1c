"""What page operations cost, in microseconds a page and a MiB.

Costs: each operation on a device of 64 MiB, one page a call (`map_run`: all pages in one call), for
three page sizes in turns; medians over rounds.

`us_per_mib`: what an idle model's memory costs to become another's: its pages are given back in one
call, leased and mapped by the other in one call, and entered into the page tables so that using
them is no fault. `runs`: of a pool whose free pages are neighbours; `scattered`: no two of them
are, the worst there is. `us_per_mib_2mib`, `us_per_mib_256kib`: scattered (goals 10 and 80).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ballast.core.units import KiB, MiB, format_bytes
from ballast.memory import syscalls
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from benchmarks.common import finish, interleave, options

DEVICE_BYTES = 64 * MiB
PAGE_SIZES = (64 * KiB, 256 * KiB, 2 * MiB)


def measure_costs(page_bytes: int) -> dict[str, float]:
    """One round: microseconds a page by operation, and GB/s of touching."""
    n = DEVICE_BYTES // page_bytes
    vm = MemfdVm(page_bytes, n)
    a, b = vm.reserve(DEVICE_BYTES), vm.reserve(DEVICE_BYTES)
    # No two neighbours in a row: every page is a mapping of its own.
    scattered = [*range(0, n, 2), *range(1, n, 2)]
    bytes_of_a = array_at(a.base, (DEVICE_BYTES,), np.uint8)
    costs: dict[str, float] = {}

    def timed(name: str, call: Callable[[int], object], times: int = n) -> None:
        start = time.perf_counter()
        for i in range(times):
            call(i)
        costs[name] = (time.perf_counter() - start) / n * 1e6

    def touch(name: str) -> None:
        start = time.perf_counter()
        bytes_of_a[:] = 1
        costs[name] = DEVICE_BYTES / (time.perf_counter() - start) / 1e9

    vm.map(a, 0, scattered)
    touch("first_touch_gb_s")
    touch("reuse_gb_s")
    timed("unmap_us", lambda i: vm.unmap(a, i, 1))
    timed("map_us", lambda i: vm.map(a, i, scattered[i : i + 1]))
    touch("touch_after_map_gb_s")
    timed("alias_us", lambda i: vm.map(b, i, scattered[i : i + 1], alias=True))
    timed("unmap_untouched_us", lambda i: vm.unmap(b, i, 1))
    vm.unmap(a, 0, n)
    timed("map_prefault_us", lambda i: vm.map(a, i, scattered[i : i + 1], prefault=True))
    touch("touch_after_prefault_gb_s")
    vm.unmap(a, 0, n)
    timed("map_run_us", lambda _: vm.map(a, 0, range(n)), 1)
    vm.close()
    return costs | _owner_costs(page_bytes)


HANDED_OVER = 256 * MiB
"""Of the device whose pages are handed over at once."""


def hand_over_per_mib(page_bytes: int, *, scattered: bool) -> float:
    """Microseconds a MiB: the best of a few times there and back."""
    n = HANDED_OVER // page_bytes
    vm = MemfdVm(page_bytes, n, huge=False)
    pool = Pool(vm, n)
    pool.free_pages.populate_some(n)
    if scattered:
        pages = pool.allocate("others", n)
        assert isinstance(pages, tuple)
        pool.give_back("others", pages[::2])
        n = pool.free
    giver, taker = (BackedRange(pool, vm, name, n * page_bytes) for name in ("a", "b"))
    assert giver.back(0, n) is None
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        giver.release(0, n)
        assert taker.back(0, n) is None
        took = time.perf_counter() - start
        if not syscalls.is_present(taker.range.base, n * page_bytes):
            start = time.perf_counter()
            syscalls.prefault(taker.range.base, n * page_bytes)
            took += time.perf_counter() - start
        taken.append(took / (n * page_bytes) * MiB * 1e6)
        giver, taker = taker, giver
    vm.close()
    return min(taken[1:])  # in the first, memory that was never mapped is entered


def hand_over(rounds: int) -> dict[str, dict[str, float]]:
    """Return medians of rounds, in turns: by page size and what lies how."""
    ways = {"runs": False, "scattered": True}
    cases = [(size, way) for size in PAGE_SIZES[1:] for way in ways]
    seen: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for i in range(rounds):
        for size, way in cases[:: 1 if i % 2 == 0 else -1]:
            seen[size, way].append(hand_over_per_mib(size, scattered=ways[way]))
    return {
        format_bytes(size): {way: statistics.median(seen[size, way]) for way in ways}
        for size in PAGE_SIZES[1:]
    }


def _owner_costs(page_bytes: int) -> dict[str, float]:
    """The same through owners: pool, ledger and range included."""
    n = DEVICE_BYTES // page_bytes
    vm = MemfdVm(page_bytes, n)
    pool = Pool(vm, n)
    a = BackedRange(pool, vm, "a", DEVICE_BYTES)
    pool.free_pages.populate_some(n)
    costs: dict[str, float] = {}

    def timed(name: str, call: Callable[[int], object]) -> None:
        start = time.perf_counter()
        for i in range(n):
            call(i)
        costs[name] = (time.perf_counter() - start) / n * 1e6

    timed("back_us", lambda i: a.back(i, 1))
    array_at(a.range.base, (DEVICE_BYTES,), np.uint8)[:] = 1
    timed("release_us", lambda i: a.release(i, 1))

    def books(_: int) -> None:
        pages = pool.allocate("a", 1)
        assert isinstance(pages, tuple)
        pool.give_back("a", pages)

    timed("lease_and_give_back_us", books)
    vm.close()
    return costs


def main() -> None:
    args = options(__doc__)
    rounds = 3 if args.quick else 9

    taken: dict[int, list[dict[str, float]]] = {size: [] for size in PAGE_SIZES}

    def one(size: int) -> float:
        start = time.perf_counter()
        taken[size].append(measure_costs(size))
        return time.perf_counter() - start

    interleave({str(s): lambda s=s: one(s) for s in PAGE_SIZES}, rounds)  # type: ignore[misc]
    costs = {
        format_bytes(size): {
            key: statistics.median(run[key] for run in runs) for key in sorted(runs[0])
        }
        for size, runs in taken.items()
    }

    per_mib = hand_over(rounds)
    result: dict[str, Any] = {
        "device_bytes": DEVICE_BYTES,
        "rounds": rounds,
        "costs": costs,
        "us_per_mib": per_mib,
        "us_per_mib_2mib": per_mib[format_bytes(2 * MiB)]["scattered"],
        "us_per_mib_256kib": per_mib[format_bytes(256 * KiB)]["scattered"],
    }
    finish(args, "pool", result)


if __name__ == "__main__":
    main()
