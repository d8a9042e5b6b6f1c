"""Two devices that lend to each other, messages that take their time, processes that end at any
moment: no page is lost, none is used twice, no message of another epoch does anything. Of GPUs, no
page changes hands, on one side or the other, while the driver knows that two processes have it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
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
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.effort import tries
from tests.memory.fake_cuda import FakeDriver
from tests.memory.seen_once import system_seen_once

PAGE = 64 * KiB
N_PAGES = 10
NAMES = ("a", "b")

names = st.sampled_from(NAMES)
picks = st.integers(0, 9)
sizes = st.integers(1, 5)


class Process:
    """A worker: its pool, and what its KV has: page -> stamp; borrowed pages come after its own."""

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
        self.owner = f"kv:{name}"
        self.held: dict[int, int] = {}

    def end(self) -> None:
        """Whatever others have of it they keep."""
        self.driver.exclusive = False
        self.vm.close()
        assert self.driver.is_clean()

    def pages(self, which: int, n: int, borrowed: bool) -> list[int]:
        """Up to `n` pages from the `which`-th on that are borrowed, or are not."""
        there = [page for page in sorted(self.held) if (page >= N_PAGES) is borrowed]
        start = which % len(there) if there else 0
        return there[start : start + n]


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
        used = sum(page >= N_PAGES for page in survivor.held)
        result = survivor.borrower.gone(name, self.epoch)
        assert len(result) <= used
        survivor.condemned.clear()
        self.at[name] = Process(name, self.kind)
        self._meet()

    def _fill(self, process: Process, pages: Iterable[int]) -> None:
        for page in pages:
            assert page not in process.held
            self.stamp += 1
            process.held[page] = self.stamp
            if self.kind is not NullVm:
                place = process.vm.window.address(page)
                array_at(place, (PAGE // 8,), "int64")[::64] = self.stamp

    @rule(name=names, n=sizes)
    def back(self, name: str, n: int) -> None:
        me = self.at[name]
        short = max(0, n - me.pool.free)
        pages = me.pool.allocate(me.owner, n)
        if isinstance(pages, Short):
            assert pages == Short(short) != Short(0)
        else:
            assert not short
            self._fill(me, pages)

    @rule(name=names, which=picks, n=sizes)
    def release(self, name: str, which: int, n: int) -> None:
        me = self.at[name]
        pages = me.pages(which, n, borrowed=False)
        me.pool.give_back(me.owner, pages)
        for page in pages:
            del me.held[page]

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
        short = max(0, n - me.borrower.unused)
        pages = me.borrower.take(me.owner, n)
        if isinstance(pages, Short):
            assert pages == Short(short) != Short(0)
        else:
            assert not short
            self._fill(me, pages)

    @precondition(lambda self: any(me.borrower.in_use for me in self.at.values()))
    @rule(name=names, which=picks, n=sizes)
    def vacate(self, name: str, which: int, n: int) -> None:
        me = self.at[name]
        pages = me.pages(which, n, borrowed=True)
        me.borrower.release(me.owner, pages)
        for page in pages:
            del me.held[page]

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
        before = (me.pool.free, me.pool.ledger.borrowed.total(), me.borrower.unused)
        if kind == "lend":
            opened = None if void else self._fetch(lease)
            if opened is None and not void:
                self.wire[lease.lender].append(("return", lease))
                return
            assert (me.borrower.accept(lease, opened or ()) is None) is not void
        elif kind == "recall":
            for used in me.borrower.recall(lease):
                assert used.holder == me.owner
                assert used.page in me.held
        else:
            refused = void or lease.borrower in me.condemned
            assert (me.lender.returned(lease) is None) is not refused
        if void:
            assert before == (me.pool.free, me.pool.ledger.borrowed.total(), me.borrower.unused)

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

    @precondition(lambda self: any(me.borrower.unused for me in self.at.values()))
    @rule(name=names, n=sizes)
    def offer_back(self, name: str, n: int) -> None:
        (other,) = set(NAMES) - {name}
        me = self.at[name]
        unused = me.borrower.unused
        assert unused - me.borrower.offer_back(other, n) == me.borrower.unused

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
            own = sum(page < N_PAGES for page in me.held)
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
            assert away <= self.at[other].pool.ledger.borrowed[name] or other in me.condemned

    @invariant()
    def the_system_agrees(self) -> None:
        with system_seen_once():
            shown = {name: me.vm.os_pages(me.vm.window) for name, me in self.at.items()}
        for name, me in self.at.items():
            ledger = me.pool.ledger
            assert ledger.owned(me.owner) + ledger.holders.held(me.owner) == len(me.held)
            assert all(shown[name].get(page) == page for page in me.held)
            away = [page for page in shown[name] if page >= N_PAGES]
            assert len(away) == ledger.borrowed.total()
            assert me.borrower.in_use == sum(page >= N_PAGES for page in me.held)

    @invariant()
    def the_driver_agrees(self) -> None:
        for name, me in self.at.items():
            if isinstance(me.vm, CudaVm):
                (other,) = set(NAMES) - {name}
                assert me.vm.imported == me.pool.ledger.borrowed.total()
                assert me.driver.elsewhere() <= self.at[other].pool.ledger.borrowed[name]
                assert me.driver.elsewhere() <= me.pool.ledger.owned(OWNER)
                assert me.driver.used[NAMES.index(name)] == me.vm.physical_bytes()

    @invariant()
    def contents_stay(self) -> None:
        if self.kind is not NullVm:
            for me in self.at.values():
                for page, stamp in me.held.items():
                    view = array_at(me.vm.window.address(page), (PAGE // 8,), "int64")
                    assert (view[::64] == stamp).all()


class RealLending(Lending):
    kind = MemfdVm


class CudaLending(Lending):
    kind = CudaVm


TestNull = Lending.TestCase
TestNull.settings = settings(max_examples=tries(8, all=20), stateful_step_count=50)
TestReal = RealLending.TestCase
TestReal.settings = settings(max_examples=tries(4, all=8), stateful_step_count=50)
TestCuda = CudaLending.TestCase
TestCuda.settings = settings(max_examples=tries(5, all=12), stateful_step_count=50)
