"""Random operations on one pool of real memory, each of them checked.

Models back, release, alias and hand over pages; there are an arena, promises, and another device
that borrows.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.lease import Lease
from ballast.core.units import KiB
from ballast.memory.arena import Arena
from ballast.memory.lending.borrower import Borrower
from ballast.memory.lending.lender import Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Latch
from ballast.memory.vm_memfd import MemfdVm

ASK_EVERY = 100
"""Operations after which the operating system is asked, too."""
PAGE = 64 * KiB


class PeerDevice:
    """Another device that borrows pages of `pool` and writes on them, in this process."""

    def __init__(self, vm: MemfdVm, pool: Pool, n_pages: int) -> None:
        self.vm = MemfdVm(PAGE, 1)
        self.pool = Pool(self.vm, 1)
        self.lender = Lender(pool, "here", lambda *_: None)
        self.lender.meet("peer", 0)
        self.borrower = Borrower(self.pool, self.vm, "peer")
        exported = vm.export(range(n_pages))
        assert exported.fd is not None
        self.borrower.meet("here", 0, replace(exported, fd=os.dup(exported.fd)))
        self.leases: dict[int, tuple[Lease, tuple[int, ...], int]] = {}
        """By a number that the caller gives: a lease, its pages here, and the stamp on the first
        of them."""

    def borrow(self, at: int, n: int, stamp: int) -> None:
        """Borrow `n` pages under the number `at`, if it is free and that many can be lent."""
        if at in self.leases:
            return
        lease = self.lender.lend("peer", n)
        if isinstance(lease, Short):
            return
        if (refused := self.borrower.accept(lease)) is not None:
            raise BrokenPromise(refused)
        pages = self.borrower.take("kv", n)
        if isinstance(pages, Short):
            raise BrokenPromise("pages that were lent cannot be used")
        self._stamp_of(pages)[0] = stamp
        self.leases[at] = (lease, pages, stamp)

    def give_back(self, at: int) -> None:
        """Return the lease of that number."""
        lease, pages, stamp = self.leases.pop(at)
        if int(self._stamp_of(pages)[0]) != stamp:
            raise BrokenPromise(f"lease {at} of the peer: another page's contents")
        self.borrower.recall(lease)
        self.borrower.release("kv", pages)
        for part in self.borrower.settle():
            if (refused := self.lender.returned(part)) is not None:
                raise BrokenPromise(refused)

    def _stamp_of(self, pages: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
        return array_at(self.vm.window.address(pages[0]), (1,), np.int64)

    def validate(self) -> None:
        self.pool.validate()
        self.borrower.validate()
        self.lender.validate()
        shown = self.vm.os_pages(self.vm.window)
        here = [page for _, pages, _ in self.leases.values() for page in pages]
        if any(shown.get(page) != page for page in here):
            raise BrokenPromise("the system does not show borrowed pages where they are used")

    def close(self) -> None:
        self.vm.close()


class RandomRun:
    """Random operations of several models on one pool; every page carries a stamp of its place."""

    def __init__(self, seed: int, n_pages: int = 256, models: int = 4) -> None:
        self._random = random.Random(seed)
        self._vm = MemfdVm(PAGE, n_pages)
        self._pool = Pool(self._vm, n_pages)
        self._span = n_pages
        self._ranges = [self._new(i) for i in range(models)]
        self._backed: list[dict[int, int]] = [{} for _ in self._ranges]
        self._arena = Arena(self._pool, "arena", 16 * PAGE)
        self._peer = PeerDevice(self._vm, self._pool, n_pages)
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
            (self._lend, 6),
            (self._end_lease, 6),
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
        self._peer.close()
        self._vm.close()

    def _ask(self) -> None:
        """Ledger against the operating system, per owner; and each owner's own list."""
        for r in self._ranges:
            r.validate()
            result = self._pool.ledger.owned(r.owner) + self._pool.ledger.reclaiming_of(r.owner)
            result += self._pool.ledger.holders.held(r.owner)
            self._compare(result, r.os_backed())
        try:
            self._peer.validate()
        except BrokenPromise as broken:
            self.violations += 1
            print(f"the peer: {broken}")
        memory = self._vm.physical_bytes() // self._vm.page_bytes
        if memory > self._pool.total - self._arena.pages:
            self.violations += 1

    def _compare(self, ledger: int, system: int) -> None:
        self.disagreement = max(self.disagreement, abs(ledger - system) / max(ledger, system, 1))

    def _new(self, i: int) -> BackedRange:
        return BackedRange(self._pool, self._vm, f"model{i}", self._span * self._vm.page_bytes)

    def _write(self, which: int, at: int) -> None:
        self._stamp += 1
        array_at(self._ranges[which].range.address(at), (1,), np.int64)[0] = self._stamp
        self._backed[which][at] = self._stamp

    def _check(self, which: int, at: int) -> None:
        found = int(array_at(self._ranges[which].range.address(at), (1,), np.int64)[0])
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
        found = int(array_at(self._ranges[heir].range.address(to), (1,), np.int64)[0])
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
            self._pool.cancel_promise("arena")

    def _resize_arena(self) -> None:
        self._arena.resize(self._random.randint(0, 16) * self._vm.page_bytes)

    def _populate(self) -> None:
        self._pool.free_pages.populate_some(self._random.randint(1, 8))

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

    def _lend(self) -> None:
        n = self._random.randint(1, 4)
        self._stamp += 1
        self._peer.borrow(self._random.randrange(self._span - n), n, self._stamp)

    def _end_lease(self) -> None:
        if self._peer.leases:
            self._peer.give_back(self._random.choice(list(self._peer.leases)))
