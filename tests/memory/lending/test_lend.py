"""Lending, both sides in one process: what each message does, and what is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError, Unavailable
from ballast.core.lease import Lease
from ballast.core.units import KiB
from ballast.memory import syscalls
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.lending.borrower import BorrowedPage, Borrower
from ballast.memory.lending.lender import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 * KiB

Kind = Callable[[int, int], Vm]
"""Makes a device of so many pages of so many bytes."""


def carried(exported: Exported) -> Exported:
    """As another process receives it: with a descriptor of its own."""
    fd = None if exported.fd is None else os.dup(exported.fd)
    return replace(exported, fd=fd)


class Device:
    """One side: a pool of 8 pages that lends and borrows, and an owner that holds pages."""

    holder = "kv"

    def __init__(self, kind: Kind, name: str) -> None:
        self.vm: Vm = kind(PAGE, 8)
        self.pool = Pool(self.vm, 8)
        self.killed: list[tuple[str, int]] = []
        self.lender = Lender(self.pool, name, lambda *result: self.killed.append(result))
        self.borrower = Borrower(self.pool, self.vm, name)
        self.own: list[int] = []
        self.borrowed: list[int] = []

    def take(self, n: int) -> Short | None:
        """Take pages of the pool."""
        pages = self.pool.allocate(self.holder, n)
        if isinstance(pages, Short):
            return pages
        self.own += pages
        return None

    def use(self, n: int) -> Short | None:
        """Take borrowed pages."""
        pages = self.borrower.take(self.holder, n)
        if isinstance(pages, Short):
            return pages
        self.borrowed += pages
        return None

    def free(self, n: int) -> None:
        """Release the borrowed pages that were taken first."""
        self.borrower.release(self.holder, self.borrowed[:n])
        del self.borrowed[:n]

    def held(self) -> tuple[BorrowedPage, ...]:
        return tuple(BorrowedPage(page, self.holder) for page in self.borrowed)

    def validate(self) -> None:
        self.pool.validate()
        self.lender.validate()
        self.borrower.validate()
        ledger = self.pool.ledger
        assert (ledger.owned(self.holder), ledger.holders.held(self.holder)) == (
            len(self.own),
            len(self.borrowed),
        )
        shown = self.vm.os_pages(self.vm.window)
        assert all(shown[page] == page for page in (*self.own, *self.borrowed))
        away = [page for page in shown if page >= self.pool.total]
        assert len(away) == ledger.borrowed.total()


def met(kind: Kind) -> tuple[Device, Device]:
    """A lends, B borrows; they have met in epoch 1."""
    a, b = Device(kind, "a"), Device(kind, "b")
    a.lender.meet("b", 1)
    b.borrower.meet("a", 1, carried(a.vm.export(())))
    return a, b


@pytest.fixture(params=[NullVm, MemfdVm, CudaVm])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Device, Device]]:
    driver = FakeDriver(devices=2)
    a, b = met(partial(CudaVm, driver, 0) if request.param is CudaVm else request.param)
    yield a, b
    for side in (a, b):
        side.validate()
        side.vm.close()
    assert driver.is_clean()


def lent(a: Device, b: Device, n: int) -> Lease:
    lease = a.lender.lend("b", n)
    assert isinstance(lease, Lease)
    assert b.borrower.accept(lease, opened(a, b, lease)) is None
    return lease


def opened(a: Device, b: Device, lease: Lease) -> list[Exported]:
    """Of a GPU the pages, in parts."""
    if not isinstance(a.vm, CudaVm):
        return []
    assert isinstance(b.vm, CudaVm)
    parts = (lease.pages[:2], lease.pages[2:])
    return [b.vm.open(a.vm.export(part)) for part in parts if part]


def test_lend_use_recall(pair: tuple[Device, Device]) -> None:
    a, b = pair
    assert b.take(2) is None
    lease = lent(a, b, 3)
    assert (a.pool.ledger.held_of(OWNER), a.pool.free, b.pool.free) == ({"b": 3}, 5, 6)
    assert (b.borrower.unused, b.pool.ledger.borrowed["a"], b.pool.ledger.owners()) == (
        3,
        3,
        {"kv": 2},
    )
    assert b.use(4) == Short(1)
    assert b.use(2) is None
    assert [page - min(b.borrowed) for page in b.borrowed] == [0, 1]
    assert min(b.borrowed) >= b.vm.n_pages

    asked = a.lender.recall(lease, due=5.0)
    assert asked == lease
    assert a.lender.recalled() == 3
    assert b.borrower.recall(asked) == b.held()
    assert b.borrower.unused == 0
    (part,) = b.borrower.settle()
    assert len(part.pages) == 1
    assert b.borrower.settle() == []
    assert a.lender.returned(part) is None
    assert (a.pool.free, a.lender.check(5.0)) == (6, 5.0)
    b.free(2)
    (rest,) = b.borrower.settle()
    assert a.lender.returned(rest) is None
    assert (a.pool.free, a.lender.leases("b"), b.pool.ledger.borrowed.total()) == (8, (), 0)
    assert (a.lender.check(99.0), a.killed) == (math.inf, [])


def test_contents_are_shared_and_survive_the_lender() -> None:
    a, b = met(MemfdVm)
    lease = lent(a, b, 2)
    assert b.use(2) is None
    place = b.vm.window.address(b.borrowed[0])
    array_at(place, (PAGE,), "uint8")[:] = 42
    other = a.vm.reserve(PAGE)
    a.vm.map(other, 0, lease.pages[:1], alias=True)
    assert (array_at(other.base, (PAGE,), "uint8") == 42).all()
    a.vm.close()
    assert b.borrower.gone("a", 1) == b.held()
    assert b.borrower.settle() == []
    assert (array_at(place, (PAGE,), "uint8") == 42).all()
    b.free(2)
    assert b.borrower.settle() == []
    with pytest.raises(BrokenPromise, match="no device is attached"):
        b.vm.detach(9)
    b.validate()
    b.vm.close()


def test_no_answer_in_time(pair: tuple[Device, Device]) -> None:
    a, b = pair
    first, second = lent(a, b, 2), lent(a, b, 3)
    assert b.use(5) is None
    a.lender.recall(first, due=10.0)
    a.lender.recall(first, due=20.0)
    assert (a.lender.check(10.0), a.killed) == (10.0, [])
    assert (a.lender.check(10.1), a.killed) == (math.inf, [("b", 1)])
    assert (a.lender.check(10.2), a.killed) == (math.inf, [("b", 1)])
    b.borrower.recall(first)
    b.free(5)
    (late,) = b.borrower.settle()
    assert a.lender.returned(late) == "epoch 1 of b is over"
    assert a.pool.free == 3
    with pytest.raises(Unavailable, match="cannot lend to b"):
        a.lender.lend("b", 1)
    assert a.lender.gone("b", 0) == 0
    assert a.lender.gone("b", 1) == 5
    assert a.lender.gone("b", 1) == 0
    assert a.pool.free == 8
    a.lender.meet("b", 2)
    again = a.lender.lend("b", 3)
    assert isinstance(again, Lease)
    assert a.lender.returned(late) == "epoch 1 of b is over"
    assert a.lender.recall(second, 1.0) is None
    assert b.borrower.accept(again) == "epoch 2 of a is not one with b"


def test_what_is_refused_changes_nothing(pair: tuple[Device, Device]) -> None:
    a, b = pair
    lease = lent(a, b, 3)
    assert b.borrower.accept(lease) == "lease 0 names pages that are lent already"
    assert b.borrower.accept(lease.part([])) == "lease 0 names pages that a has not"
    assert b.borrower.accept(lease.part([8])) == "lease 0 names pages that a has not"
    assert b.borrower.accept(lease.part([7, 7])) == "lease 0 names pages that are lent already"
    assert b.borrower.accept(replace(lease, borrower="c")) is not None
    fault = "not all of these pages are lent to b by lease 0"
    assert a.lender.returned(lease.part([*lease.pages, 7])) == fault
    assert a.lender.returned(lease.part([lease.pages[0]] * 2)) == fault
    assert a.lender.returned(replace(lease, id=9)).startswith("not all")  # type: ignore[union-attr]
    assert b.borrower.recall(replace(lease, epoch=0)) == ()
    assert (a.pool.ledger.held_of(OWNER), b.borrower.unused) == ({"b": 3}, 3)
    assert a.lender.lend("b", 6) == Short(1)
    with pytest.raises(BrokenPromise):
        a.lender.lend("b", 0)
    with pytest.raises(Unavailable):
        a.lender.lend("c", 1)
    with pytest.raises(BrokenPromise, match="is there already"):
        a.lender.meet("b", 2)
    with pytest.raises(BrokenPromise, match="twice"):
        b.borrower.meet("a", 2, a.vm.export(()))
    assert b.take(1) is None
    with pytest.raises(BrokenPromise, match="is not borrowed"):
        b.borrower.release("kv", b.own)
    with pytest.raises(BrokenPromise):
        b.borrower.take("kv", -1)
    assert (b.borrower.unused, b.borrower.in_use) == (3, 0)


def test_what_comes_with_a_lease_is_taken_over_whatever_comes_of_it() -> None:
    driver = FakeDriver(devices=3)
    a, b = met(partial(CudaVm, driver, 0))
    c = Device(partial(CudaVm, driver, 2), "c")
    lease = a.lender.lend("b", 3)
    assert isinstance(lease, Lease)
    assert c.pool.allocate("kv", 8) == tuple(range(8))
    fault = "lease 0 is of other pages than those that came"
    for other in (lease.part([0, 1]), lease.part([2, 1, 0])):
        assert b.borrower.accept(lease, opened(a, b, other)) == fault
    assert b.borrower.accept(lease, opened(c, b, lease)) == b.borrower.accept(lease) == fault
    assert b.borrower.accept(replace(lease, epoch=0), opened(a, b, lease)) is not None
    assert (b.vm.imported, driver.elsewhere()) == (0, 0)  # type: ignore[attr-defined]
    assert b.borrower.accept(lease, opened(a, b, lease)) is None
    assert (b.vm.imported, driver.elsewhere()) == (3, 3)  # type: ignore[attr-defined]
    b.borrower.gone("a", 1)
    assert b.borrower.settle() == []
    assert driver.elsewhere() == 0
    c.pool.give_back("kv", range(8))
    for side in (a, b, c):
        side.validate()
        side.vm.close()
    assert driver.is_clean()


def test_returned_unasked(pair: tuple[Device, Device]) -> None:
    a, b = pair
    lease = lent(a, b, 4)
    assert b.use(1) is None
    assert b.borrower.offer_back("a", 9) == 3
    assert b.borrower.offer_back("nobody", 1) == 0
    (part,) = b.borrower.settle()
    asked = a.lender.recall(lease, 1.0)
    assert asked is not None
    assert a.lender.returned(part) is None
    assert a.pool.free == 7
    assert b.borrower.recall(asked) == b.held()
    b.free(1)
    (rest,) = b.borrower.settle()
    assert a.lender.returned(rest) is None
    assert a.lender.recall(lease, 1.0) is None
    again = lent(a, b, 8)
    assert b.borrower.recall(asked) == ()
    assert (b.borrower.unused, b.borrower.settle()) == (8, [])
    assert set(again.pages) >= set(lease.pages)


def test_two_lenders_make_up_the_number() -> None:
    a, b, c = (Device(NullVm, name) for name in "abc")
    for lender in (a, c):
        name = "a" if lender is a else "c"
        lender.lender.meet("b", 1)
        b.borrower.meet(name, 1, lender.vm.export(()))
        got = lender.lender.lend("b", 3)
        assert isinstance(got, Lease)
        assert b.borrower.accept(got) is None
    assert b.use(5) is None
    assert b.pool.ledger.held_of("a") == {"kv": 3}
    assert b.pool.ledger.held_of("c") == {"kv": 2}
    b.validate()
    (place,) = b.borrower.recall(c.lender.leases("b")[0].part([0]))
    b.free(5)
    assert place.holder == "kv"
    (part,) = b.borrower.settle()
    assert (part.lender, part.pages, b.borrower.unused) == ("c", (0,), 5)
    b.validate()


def test_a_failing_map_leaves_the_books_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = met(MemfdVm)
    lease = a.lender.lend("b", 3)
    assert isinstance(lease, Lease)

    def fail(*_: int) -> int:
        raise OSError(12, "no more mappings")

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "mmap", fail)
        with pytest.raises(DeviceError, match="no more mappings"):
            b.borrower.accept(lease)
    assert (b.borrower.unused, b.pool.ledger.borrowed.total()) == (0, 0)
    for side in (a, b):
        side.validate()
    assert b.borrower.accept(lease) is None
    for side in (a, b):
        side.validate()
        side.vm.close()


def test_a_recalled_page_leaves_the_window_once_it_is_free(pair: tuple[Device, Device]) -> None:
    a, b = pair
    lease = lent(a, b, 3)
    assert b.use(1) is None
    b.borrower.recall(lease)
    b.borrower.settle()
    away = [page for page in b.vm.os_pages(b.vm.window) if page >= b.vm.n_pages]
    assert away == b.borrowed
    with pytest.raises(BrokenPromise, match="pages in the window"):
        b.vm.leave([b.borrowed[0] + 1])
    with pytest.raises(BrokenPromise, match="in the window already"):
        b.vm.enter(b.borrowed)
    with pytest.raises(BrokenPromise, match="own pages"):
        b.vm.enter([0])
    b.free(1)
    b.borrower.settle()
    assert not [page for page in b.vm.os_pages(b.vm.window) if page >= b.vm.n_pages]


def test_borrowed_pages_are_not_the_pools(pair: tuple[Device, Device]) -> None:
    a, b = pair
    lent(a, b, 2)
    assert b.use(2) is None
    with pytest.raises(BrokenPromise):
        b.pool.give_back("kv", b.borrowed)
    with pytest.raises(BrokenPromise, match="another device"):
        b.pool.hand_over("a", "x", b.borrowed)
    with pytest.raises(BrokenPromise):
        b.pool.give_back("a", b.borrowed[:1])
    with pytest.raises(BrokenPromise, match="is held by"):
        b.pool.return_borrowed("a", b.borrowed[:1])
    with pytest.raises(BrokenPromise, match="of our own"):
        b.pool.borrow("a", [3])
    with pytest.raises(BrokenPromise, match="with some mapped"):
        b.vm.detach(9)
    for call in (b.vm.populate, b.vm.discard, b.vm.export):
        with pytest.raises(BrokenPromise, match="outside"):
            call(b.borrowed[:1])


def test_what_cannot_be_attached() -> None:
    null, memfd = NullVm(PAGE, 4), MemfdVm(PAGE, 4)
    with pytest.raises(DeviceError, match="the device's own"):
        memfd.attach(memfd.export(()))
    with pytest.raises(DeviceError, match="bytes beside"):
        NullVm(2 * PAGE, 4).attach(null.export(()))
    with pytest.raises(DeviceError, match="without memory"):
        null.attach(memfd.export(()))
    with pytest.raises(DeviceError, match="without memory"):
        memfd.attach(null.export(()))
    memfd.close()


def test_numbers_of_attached_devices(vm: Vm, beside: Callable[[int], Vm]) -> None:
    """They never touch, and come again once detached."""
    others = [beside(n) for n in (4, 6, 3)]
    first, second = (vm.attach(carried(o.export(range(o.n_pages)))) for o in others[:2])
    assert (first, second) == (vm.n_pages + 1, vm.n_pages + 6)
    assert vm.attach(carried(others[0].export(()))) == first
    r = vm.reserve(8 * PAGE)
    vm.map(r, 1, [vm.n_pages - 1, first, first + 1, second + 5])
    shown = {1: vm.n_pages - 1, 2: first, 3: first + 1, 4: second + 5}
    assert vm.os_pages(r) == shown
    assert len(vm.os_pages(r)) == 4
    for bad in ([vm.n_pages], [first + 4], [second + 6]):
        with pytest.raises(BrokenPromise):
            vm.map(r, 6, bad, alias=True)
    vm.unmap(r, 1, 3)
    vm.detach(first)
    with pytest.raises(BrokenPromise):
        vm.map(r, 1, [first])
    assert vm.attach(carried(others[2].export(()))) == first
    assert vm.os_pages(r) == {4: second + 5}
