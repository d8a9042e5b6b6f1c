"""Two devices that lend to each other, messages that take their time, processes that end at any
moment: no page is lost, none is used twice, no message of another epoch does anything. Of GPUs, no
page changes hands, on one side or the other, while the driver knows that two processes have it."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.core.actions import Short
from ballast.core.errors import DeviceError, Unavailable
from ballast.core.lease import Lease
from ballast.core.units import KiB
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.lending.borrower import Borrower
from ballast.memory.lending.lender import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported, Latch, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.memory.fake_cuda import FakeDriver
from tests.memory.seen_once import system_seen_once

PAGE = 64 * KiB
N_PAGES = 10
SPAN = 16
NAMES = ("a", "b")

names = st.sampled_from(NAMES)
picks = st.integers(0, 9)
sizes = st.integers(1, 5)


class Process:
    """A worker: its pool, its range, and what is in it: index -> (borrowed, stamp)."""

    def __init__(self, name: str, kind: type[Vm]) -> None:
        self.driver = FakeDriver(devices=2, exclusive=True)
        self.vm: Vm
        if kind is CudaVm:
            self.vm = CudaVm(self.driver, NAMES.index(name), PAGE, N_PAGES)
        else:
            self.vm = MemfdVm(PAGE, N_PAGES) if kind is MemfdVm else NullVm(PAGE, N_PAGES)
        self.pool = Pool(self.vm, N_PAGES)
        self.condemned: list[str] = []
        self.lender = Lender(self.pool, name, lambda peer, _: self.condemned.append(peer))
        self.borrower = Borrower(self.pool, self.vm, name)
        self.range = BackedRange(self.pool, self.vm, f"kv:{name}", SPAN * PAGE)
        self.held: dict[int, tuple[bool, int]] = {}
        self.leaving: list[tuple[set[int], Latch]] = []

    def end(self) -> None:
        """Whatever others have of it they keep."""
        self.driver.exclusive = False
        self.vm.close()
        assert self.driver.is_clean()

    def gap(self, n: int) -> int | None:
        """The first of `n` empty indices."""
        taken = set(self.held).union(*(indices for indices, _ in self.leaving))
        found = (at for at in range(SPAN - n + 1) if not taken & set(range(at, at + n)))
        return next(found, None)

    def stretch(self, which: int, n: int, borrowed: bool) -> range:
        """Up to `n` indices from the `which`-th on whose page is borrowed, or is not."""
        there = [at for at, (kind, _) in sorted(self.held.items()) if kind is borrowed]
        if not there:
            return range(0)
        start = stop = there[which % len(there)]
        while stop - start < n and stop in there:
            stop += 1
        return range(start, stop)


class Lending(RuleBasedStateMachine):
    kind: ClassVar[type[Vm]] = NullVm

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, Process] = {name: Process(name, self.kind) for name in NAMES}
        self.epoch = 0
        self.now = 0.0
        self.stamp = 0
        self.wire: dict[str, deque[tuple[str, Lease]]] = {name: deque() for name in NAMES}
        """By receiver."""
        self._meet()

    def teardown(self) -> None:
        for process in self.at.values():
            process.end()

    def _meet(self) -> None:
        self.epoch += 1
        for name, other in (NAMES, NAMES[::-1]):
            me, peer = self.at[name], self.at[other]
            exported = peer.vm.export(())
            if exported.fd is not None:
                exported = replace(exported, fd=os.dup(exported.fd))
            me.lender.meet(other, self.epoch)
            me.borrower.meet(other, self.epoch, exported)

    def _end(self, name: str) -> None:
        """The process ends; the other is told; another starts."""
        (other,) = set(NAMES) - {name}
        self.at[name].end()
        survivor = self.at[other]
        lent = survivor.pool.ledger.owned(OWNER)
        assert survivor.lender.gone(name, self.epoch) == lent
        assert survivor.pool.ledger.owned(OWNER) == 0
        used = sum(borrowed for borrowed, _ in survivor.held.values())
        result = survivor.borrower.gone(name, self.epoch)
        assert len(result) <= used
        survivor.condemned.clear()
        self.at[name] = Process(name, self.kind)
        self._meet()

    def _fill(self, process: Process, at: int, n: int, borrowed: bool) -> None:
        for i in range(at, at + n):
            self.stamp += 1
            process.held[i] = (borrowed, self.stamp)
            if self.kind is not NullVm:
                array_at(process.range.address(i), (PAGE // 8,), "int64")[::64] = self.stamp

    @rule(name=names, n=sizes)
    def back(self, name: str, n: int) -> None:
        me = self.at[name]
        at = me.gap(n)
        if at is not None:
            short = max(0, n - me.pool.free)
            assert me.range.back(at, n) == (Short(short) if short else None)
            if not short:
                self._fill(me, at, n, borrowed=False)

    @precondition(lambda self: any(me.range.backed for me in self.at.values()))
    @rule(name=names, which=picks, n=sizes)
    def release(self, name: str, which: int, n: int) -> None:
        me = self.at[name]
        indices = me.stretch(which, n, borrowed=False)
        me.range.release(indices.start, len(indices))
        for i in indices:
            del me.held[i]

    @rule(name=names, n=sizes, at_once=st.booleans())
    def lend(self, name: str, n: int, at_once: bool) -> None:
        me, (other,) = self.at[name], set(NAMES) - {name}
        free = me.pool.free
        try:
            got = me.lender.lend(other, n)
        except Unavailable:
            assert other in me.condemned
            return
        if isinstance(got, Short):
            assert got == Short(n - free)
            return
        assert len(got.pages) == n <= free
        self.wire[other].append(("lend", got))
        if at_once:
            self._deliver_all(other)
            self.use(other, n)

    @precondition(lambda self: any(me.borrower.unused for me in self.at.values()))
    @rule(name=names, n=sizes)
    def use(self, name: str, n: int) -> None:
        me = self.at[name]
        n = min(n, me.borrower.unused + 1)
        at = me.gap(n)
        if at is not None:
            short = max(0, n - me.borrower.unused)
            assert me.borrower.back(me.range, at, n) == (Short(short) if short else None)
            if not short:
                self._fill(me, at, n, borrowed=True)

    @precondition(lambda self: any(me.range.aliased for me in self.at.values()))
    @rule(name=names, which=picks, n=sizes, wait=st.booleans())
    def vacate(self, name: str, which: int, n: int, wait: bool) -> None:
        me = self.at[name]
        indices = me.stretch(which, n, borrowed=True)
        if indices:
            fence = Latch(done=not wait)
            me.borrower.release(me.range, indices.start, len(indices), fence)
            for i in indices:
                del me.held[i]
            if wait:
                me.leaving.append((set(indices), fence))

    @precondition(lambda self: any(me.pool.ledger.owned(OWNER) for me in self.at.values()))
    @rule(name=names, which=picks, first=sizes, n=sizes, wait=sizes, at_once=st.booleans())
    def recall(self, name: str, which: int, first: int, n: int, wait: int, at_once: bool) -> None:
        me, (other,) = self.at[name], set(NAMES) - {name}
        leases = me.lender.leases(other)
        if leases:
            lease = leases[which % len(leases)]
            part = me.lender.recall(lease.part(lease.pages[first - 1 :][:n]), self.now + wait)
            if part is not None:
                self.wire[other].append(("recall", part))
            if at_once:
                self._deliver_all(other)

    @precondition(lambda self: any(self.wire.values()))
    @rule(name=names, n=sizes)
    def deliver(self, name: str, n: int) -> None:
        for _ in range(min(n, len(self.wire[name]))):
            self._deliver(name)

    def _deliver_all(self, name: str) -> None:
        while self.wire[name]:
            self._deliver(name)

    def _deliver(self, name: str) -> None:
        kind, lease = self.wire[name].popleft()
        me, void = self.at[name], lease.epoch != self.epoch
        before = (me.pool.free, me.pool.ledger.borrowed(), me.borrower.unused)
        if kind == "lend":
            opened = None if void else self._fetch(lease)
            if opened is None and not void:
                self.wire[lease.lender].append(("return", lease))
                return
            assert (me.borrower.accept(lease, opened or ()) is None) is not void
        elif kind == "recall":
            for place in me.borrower.recall(lease):
                assert me.held[place.at][0]
        else:
            refused = void or lease.borrower in me.condemned
            assert (me.lender.returned(lease) is None) is not refused
        if void:
            assert before == (me.pool.free, me.pool.ledger.borrowed(), me.borrower.unused)

    def _fetch(self, lease: Lease) -> list[Exported] | None:
        """Of a GPU its pages; None: they cannot be imported."""
        lender, borrower = self.at[lease.lender].vm, self.at[lease.borrower].vm
        if not isinstance(borrower, CudaVm):
            return []
        exported = lender.export(lease.pages)
        try:
            return [borrower.open(exported)]
        except DeviceError:
            exported.close()
            return None

    @rule(name=names)
    def settle(self, name: str) -> None:
        for part in self.at[name].borrower.settle():
            self.wire[part.lender].append(("return", part))
        self.at[name].leaving = [x for x in self.at[name].leaving if not x[1].done()]

    @precondition(lambda self: any(me.borrower.unused for me in self.at.values()))
    @rule(name=names, n=sizes)
    def offer_back(self, name: str, n: int) -> None:
        (other,) = set(NAMES) - {name}
        me = self.at[name]
        unused = me.borrower.unused
        assert unused - me.borrower.offer_back(other, n) == me.borrower.unused

    @precondition(lambda self: any(me.leaving for me in self.at.values()))
    @rule(name=names)
    def jobs_end(self, name: str) -> None:
        for _, fence in self.at[name].leaving:
            fence.set()

    @precondition(lambda self: any(me.lender.recalled() for me in self.at.values()))
    @rule(wait=st.integers(0, 6))
    def time_passes(self, wait: int) -> None:
        self.now += wait
        for me in self.at.values():
            soonest = me.lender.check(self.now)
            assert soonest >= self.now or me.condemned

    @precondition(lambda self: any(me.condemned for me in self.at.values()))
    @rule()
    def supervise(self) -> None:
        for name in NAMES:
            if self.at[name].condemned:
                self._end(self.at[name].condemned[0])
                return

    @precondition(lambda self: self.kind is CudaVm)
    @rule(name=names, after=sizes)
    def fail_to_import(self, name: str, after: int) -> None:
        self.at[name].driver.fail("import_fd", after=after)

    @rule(name=names, really=st.integers(0, 7))
    def die(self, name: str, really: int) -> None:
        if not really:
            self._end(name)

    @invariant()
    def books_add_up(self) -> None:
        for name, me in self.at.items():
            me.pool.validate()
            me.lender.validate()
            me.borrower.validate()
            me.range.validate()
            own = sum(not borrowed for borrowed, _ in me.held.values())
            assert me.pool.free + own + me.pool.ledger.owned(OWNER) == N_PAGES
            (other,) = set(NAMES) - {name}
            # A page lent is with the borrower, or in a message of this epoch.
            result = [page for lease in me.lender.leases(other) for page in lease.pages]
            travelling = [
                page
                for to, kinds in ((other, ("lend",)), (name, ("return",)))
                for kind, lease in self.wire[to]
                if kind in kinds and lease.lender == name and lease.epoch == self.epoch
                for page in lease.pages
            ]
            assert len(set(result)) == len(result)
            assert set(travelling) <= set(result)
            away = len(result) - len(travelling)
            assert away >= 0
            # What a condemned borrower returns is refused, and counts as lent until it is gone.
            assert away <= self.at[other].pool.ledger.borrowed(name) or other in me.condemned

    @invariant()
    def the_system_agrees(self) -> None:
        with system_seen_once():
            mapped = {name: me.vm.os_pages(me.range.range) for name, me in self.at.items()}
        for name, me in self.at.items():
            result = me.pool.ledger.owned(me.range.owner) + me.pool.ledger.held(me.range.owner)
            shown = mapped[name]
            indices = set(me.held).union(*(left for left, _ in me.leaving))
            assert (len(shown), set(shown)) == (result, indices)
            for at, page in shown.items():
                assert me.range.pages(at, 1) == (page,)
                # What is lent is not mapped here.
                assert me.pool.ledger.owner_of(page) != OWNER
            assert me.borrower.in_use == me.range.aliased

    @invariant()
    def the_driver_agrees(self) -> None:
        for name, me in self.at.items():
            if isinstance(me.vm, CudaVm):
                (other,) = set(NAMES) - {name}
                assert me.vm.imported == me.pool.ledger.borrowed()
                assert me.driver.elsewhere() <= self.at[other].pool.ledger.borrowed(name)
                assert me.driver.elsewhere() <= me.pool.ledger.owned(OWNER)
                assert me.driver.used[NAMES.index(name)] == me.vm.physical_bytes()

    @invariant()
    def contents_stay(self) -> None:
        if self.kind is not NullVm:
            for me in self.at.values():
                for at, (_, stamp) in me.held.items():
                    view = array_at(me.range.address(at), (PAGE // 8,), "int64")
                    assert (view[::64] == stamp).all()


class RealLending(Lending):
    kind = MemfdVm


class CudaLending(Lending):
    kind = CudaVm


TestNull = Lending.TestCase
TestNull.settings = settings(max_examples=40, stateful_step_count=50)
TestReal = RealLending.TestCase
TestReal.settings = settings(max_examples=15, stateful_step_count=50)
TestCuda = CudaLending.TestCase
TestCuda.settings = settings(max_examples=12, stateful_step_count=50)
