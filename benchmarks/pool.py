"""What page operations cost, and whether the books hold: microseconds a page, OS against ledger.

Costs: each operation on a device of 64 MiB, one page a call (`map_run`: all pages in one call), for
three page sizes in turns; medians over rounds. `hand_over` moves a page with its contents from one
model's range into another's: unmap, ledger, map. Books: random operations of four models and an
arena on one pool of real memory, `validate()` after each, the operating system asked every 100.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

from ballast.core.errors import BrokenPromise
from ballast.core.units import KiB, MiB, format_bytes
from ballast.memory.arena import Arena
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Latch
from ballast.memory.vm_memfd import MemfdVm
from benchmarks.common import finish, interleave, options

DEVICE_BYTES = 64 * MiB
PAGE_SIZES = (64 * KiB, 256 * KiB, 2 * MiB)
ASK_EVERY = 100


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


def _owner_costs(page_bytes: int) -> dict[str, float]:
    """The same through owners: pool, ledger and range included."""
    n = DEVICE_BYTES // page_bytes
    vm = MemfdVm(page_bytes, n)
    pool = Pool(vm, n)
    a = BackedRange(pool, vm, "a", DEVICE_BYTES)
    b = BackedRange(pool, vm, "b", DEVICE_BYTES)
    pool.populate_some(n)
    costs: dict[str, float] = {}

    def timed(name: str, call: Callable[[int], object]) -> None:
        start = time.perf_counter()
        for i in range(n):
            call(i)
        costs[name] = (time.perf_counter() - start) / n * 1e6

    timed("back_us", lambda i: a.back(i, 1))
    array_at(a.base, (DEVICE_BYTES,), np.uint8)[:] = 1
    timed("hand_over_us", lambda i: a.hand_to(i, 1, b, n - 1 - i))
    array_at(b.base, (DEVICE_BYTES,), np.uint8)[:] = 2
    timed("release_us", lambda i: b.release(i, 1))

    def books(_: int) -> None:
        pages = pool.lease("a", 1)
        assert isinstance(pages, tuple)
        pool.give_back("a", pages)

    timed("lease_and_give_back_us", books)
    vm.close()
    return costs


class RandomRun:
    """Random operations of several models on one pool; every page carries a stamp of its place."""

    def __init__(self, seed: int, n_pages: int = 256, models: int = 4) -> None:
        self._random = random.Random(seed)
        self._vm = MemfdVm(64 * KiB, n_pages)
        self._pool = Pool(self._vm, n_pages)
        self._span = n_pages
        self._ranges = [self._new(i) for i in range(models)]
        self._backed: list[dict[int, int]] = [{} for _ in self._ranges]
        self._arena = Arena(self._pool, "arena", 16 * 64 * KiB)
        self._aliases: dict[tuple[int, int], tuple[int, int]] = {}
        """(holder, index there) -> (owner, index there)."""
        self._fences: list[Latch] = []
        self._stamp = 0
        self.violations = 0
        self.disagreement = 0.0
        self.counts: dict[str, int] = {}
        self.validate_seconds = 0.0

    def run(self, operations: int) -> None:
        kinds: list[tuple[Callable[[], object], int]] = [
            (self._back, 30),
            (self._release, 26),
            (self._hand_over, 20),
            (self._alias, 10),
            (self._unalias, 9),
            (self._end_job, 10),
            (self._promise, 5),
            (self._resize_arena, 5),
            (self._populate, 3),
            (self._start_over, 1),
        ]
        calls, weights = zip(*kinds, strict=True)
        for i in range(operations):
            call = self._random.choices(calls, weights)[0]
            name = call.__name__.strip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
            try:
                call()
                start = time.perf_counter()
                self._pool.validate()
                self.validate_seconds += time.perf_counter() - start
            except BrokenPromise as broken:
                self.violations += 1
                print(f"operation {i}, {name}: {broken}")
            if i % ASK_EVERY == 0:
                self._ask()
        self._ask()
        self._vm.close()

    def _ask(self) -> None:
        """Ledger against the operating system, per owner; and each owner's own list."""
        for r in self._ranges:
            r.validate()
            told = self._pool.owned(r.owner) + self._pool.reclaiming_of(r.owner)
            told += self._pool.held(r.owner)
            self._compare(told, r.os_backed())
        memory = self._vm.physical_bytes() // self._vm.page_bytes
        if memory > self._pool.total - self._arena.pages:
            self.violations += 1

    def _compare(self, ledger: int, system: int) -> None:
        self.disagreement = max(self.disagreement, abs(ledger - system) / max(ledger, system, 1))

    def _new(self, i: int) -> BackedRange:
        return BackedRange(self._pool, self._vm, f"model{i}", self._span * self._vm.page_bytes)

    def _write(self, which: int, at: int) -> None:
        self._stamp += 1
        array_at(self._ranges[which].address(at), (1,), np.int64)[0] = self._stamp
        self._backed[which][at] = self._stamp

    def _check(self, which: int, at: int) -> None:
        found = int(array_at(self._ranges[which].address(at), (1,), np.int64)[0])
        if found != self._backed[which][at]:
            raise BrokenPromise(f"index {at} of model{which}: another page's contents")

    def _back(self) -> None:
        which, at = self._random.randrange(len(self._ranges)), self._random.randrange(self._span)
        n = self._random.randint(1, 8)
        places = range(at, min(at + n, self._span))
        if any(i in self._backed[which] or (which, i) in self._aliases for i in places):
            return
        if self._ranges[which].back(at, len(places)) is None:
            for i in places:
                self._write(which, i)

    def _release(self) -> None:
        which = self._random.randrange(len(self._ranges))
        if not self._backed[which]:
            return
        at = self._random.choice(list(self._backed[which]))
        n = 0
        while n < 8 and at + n in self._backed[which] and not self._lent(which, at + n):
            n += 1
        for i in range(at, at + n):
            self._check(which, i)
            del self._backed[which][i]
        fence = None
        if self._random.random() < 0.4:
            fence = Latch()
            self._fences.append(fence)
        self._ranges[which].release(at, n, fence)

    def _hand_over(self) -> None:
        which, heir = self._random.sample(range(len(self._ranges)), 2)
        to = self._random.randrange(self._span)
        target = self._ranges[heir]
        if not self._backed[which] or not self._empty(heir, to):
            return
        at = self._random.choice(list(self._backed[which]))
        if self._lent(which, at):
            return
        self._ranges[which].hand_to(at, 1, target, to)
        self._backed[heir][to] = self._backed[which].pop(at)
        self._check(heir, to)

    def _alias(self) -> None:
        which, heir = self._random.sample(range(len(self._ranges)), 2)
        to = self._random.randrange(self._span)
        if not self._backed[which] or not self._empty(heir, to):
            return
        at = self._random.choice(list(self._backed[which]))
        lender = self._ranges[which]
        self._ranges[heir].alias(to, lender.pages(at, 1), lender.owner)
        self._aliases[heir, to] = (which, at)

    def _unalias(self) -> None:
        if self._aliases:
            self._end_alias(self._random.choice(list(self._aliases)))

    def _end_alias(self, place: tuple[int, int]) -> None:
        (heir, to), (which, at) = place, self._aliases.pop(place)
        found = int(array_at(self._ranges[heir].address(to), (1,), np.int64)[0])
        if found != self._backed[which][at]:
            raise BrokenPromise(f"index {to} of model{heir}: not its lender's contents")
        self._ranges[heir].unalias(to, 1, self._ranges[which].owner)

    def _empty(self, which: int, at: int) -> bool:
        here = at in self._backed[which] or (which, at) in self._aliases
        return not here and not self._ranges[which].is_leaving(at)

    def _lent(self, which: int, at: int) -> bool:
        return (which, at) in self._aliases.values()

    def _end_job(self) -> None:
        for fence in self._fences:
            fence.set()
        self._fences.clear()
        self._pool.reap()

    def _promise(self) -> None:
        if self._pool.promise("arena", self._random.randint(1, 4)) is not None:
            self._pool.withdraw("arena")

    def _resize_arena(self) -> None:
        self._arena.resize(self._random.randint(0, 16) * self._vm.page_bytes)

    def _populate(self) -> None:
        self._pool.populate_some(self._random.randint(1, 8))

    def _start_over(self) -> None:
        """A model is gone, and comes back later."""
        which = self._random.randrange(len(self._ranges))
        for place, source in list(self._aliases.items()):
            if which in (place[0], source[0]):
                self._end_alias(place)
        self._ranges[which].close()
        self._end_job()
        self._ranges[which] = self._new(which)
        self._backed[which] = {}


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--operations", type=int, default=None)
        parser.add_argument("--seed", type=int, default=0)

    args = options(__doc__, extra=extra)
    rounds = 3 if args.quick else 9
    operations = args.operations or (10_000 if args.quick else 100_000)

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

    books = RandomRun(args.seed)
    start = time.perf_counter()
    books.run(operations)
    seconds = time.perf_counter() - start

    result: dict[str, Any] = {
        "device_bytes": DEVICE_BYTES,
        "rounds": rounds,
        "costs": costs,
        "operations": operations,
        "violations": books.violations,
        "os_agreement": books.disagreement,
        "os_asked_every": ASK_EVERY,
        "operation_counts": dict(sorted(books.counts.items())),
        "operations_seconds": seconds,
        "validate_us": books.validate_seconds / operations * 1e6,
        "seed": args.seed,
    }
    table = Table("", *costs, title="page operations (us a page; GB/s)")
    for key in next(iter(costs.values())):
        table.add_row(key, *(f"{column[key]:.1f}" for column in costs.values()))
    for key in ("operations", "violations", "os_agreement", "validate_us"):
        table.add_row(key, f"{result[key]:g}")
    finish(args, "pool", result, table)


if __name__ == "__main__":
    main()
