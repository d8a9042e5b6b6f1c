"""Leases, promises, fences: what the pool adds to the book."""

from __future__ import annotations

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB
from ballast.memory.pool import Pool
from ballast.memory.vm import Latch, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm

PAGE = 64 * KiB


def _lease(pool: Pool, owner: str, n: int, **options: bool) -> tuple[int, ...]:
    leased = pool.allocate(owner, n, **options)
    assert isinstance(leased, tuple)
    return leased


def _counts(pool: Pool) -> object:
    return (
        pool.free,
        pool.ledger.reclaiming,
        pool.ledger.reservations.promised,
        pool.ledger.owners(),
    )


def test_all_or_nothing(vm: Vm) -> None:
    pool = Pool(vm, 10)
    got = _lease(pool, "a", 7)
    before = _counts(pool)
    assert pool.allocate("b", 5) == Short(2)
    assert _counts(pool) == before
    assert pool.allocate("b", 0) == ()
    pool.give_back("a", got)
    assert (pool.free, pool.ledger.owners()) == (10, {})
    pool.validate()


def test_a_lease_comes_in_one_run_where_there_is_one(vm: Vm) -> None:
    pool = Pool(vm, 32)
    _lease(pool, "a", 3)
    middle = _lease(pool, "b", 5)
    _lease(pool, "c", 2)
    pool.give_back("b", middle)
    assert sorted(_lease(pool, "d", 5)) == sorted(middle)


def test_reclaiming_until_the_fence_is_done(vm: Vm) -> None:
    pool = Pool(vm, 4)
    pages = _lease(pool, "a", 3)
    fence, result = Latch(), []
    pool.give_back("a", pages[:2], fence, lambda: result.append("released"))
    assert _counts(pool) == (1, 2, 0, {"a": 1})
    assert pool.allocate("b", 2) == Short(1)
    assert pool.reap() == 0
    assert result == []
    fence.set()
    assert pool.ledger.reclaiming == 2
    assert pool.reap() == 2
    assert result == ["released"]
    assert _counts(pool) == (3, 0, 0, {"a": 1})
    pool.give_back("a", pages[2:], fence)
    assert pool.free == 4
    pool.validate()


def test_reap_frees_what_is_done_and_leaves_the_rest(vm: Vm) -> None:
    pool = Pool(vm, 6)
    first, second = Latch(), Latch()
    pool.give_back("a", _lease(pool, "a", 2), first)
    pool.give_back("b", _lease(pool, "b", 3), second)
    second.set()
    assert pool.reap() == 3
    assert (pool.ledger.reclaiming_of("a"), pool.ledger.reclaiming_of("b")) == (2, 0)
    first.set()
    assert pool.reap() == 2
    pool.validate()


def test_a_failing_release_is_tried_again(vm: Vm) -> None:
    pool = Pool(vm, 4)
    pages = _lease(pool, "a", 2)
    faults = [DeviceError("mmap", "no more mappings")]

    def release() -> None:
        if faults:
            raise faults.pop()

    with pytest.raises(DeviceError):
        pool.give_back("a", pages, None, release)
    assert (pool.ledger.reclaiming, pool.free) == (2, 2)
    pool.validate()
    assert pool.reap() == 2
    assert pool.free == 4


def test_promises(vm: Vm) -> None:
    pool = Pool(vm, 8)
    pages = _lease(pool, "a", 6)
    fence = Latch()
    pool.give_back("a", pages[:4], fence)
    assert pool.promise("arena", 5) is None
    assert pool.promise("b", 2) == Short(1)
    assert pool.allocate("b", 1) == Short(1)
    assert len(_lease(pool, "arena", 2)) == 2
    assert pool.allocate("arena", 1) == Short(1)
    fence.set()
    pool.reap()
    assert (pool.available("b"), pool.available("arena")) == (1, 4)
    assert len(_lease(pool, "arena", 3)) == 3
    assert pool.ledger.reservations.promised == 0
    assert pool.cancel_promise("arena") == 0
    pool.validate()


def test_hand_over_and_loans(vm: Vm) -> None:
    pool = Pool(vm, 8)
    pages = _lease(pool, "a", 4)
    pool.hand_over("a", "b", pages[:1])
    assert pool.ledger.owners() == {"a": 3, "b": 1}
    pool.add_holder("a", pages[2:], "peer")
    holders = pool.ledger.holders
    assert (pool.ledger.held_of("a"), holders.held("peer")) == ({"peer": 2}, 2)
    assert pool.ledger.owner_of(pages[2]) == "a"
    assert (holders.of(pages[2]), holders.of(pages[1])) == (("peer",), ())
    with pytest.raises(BrokenPromise, match="is held by peer"):
        pool.give_back("a", pages[2:])
    pool.remove_holder("a", pages[2:], "peer")
    pool.give_back("a", pages[1:])
    pool.validate()


def test_leased_pages_have_memory_and_bare_ones_have_none(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 16)
    pages = _lease(pool, "a", 6)
    assert memfd.physical_bytes() == 6 * PAGE
    arena = _lease(pool, "arena", 8, bare=True)
    assert memfd.physical_bytes() == 6 * PAGE
    pool.give_back("a", pages)
    assert pool.free_pages.populated == 6
    more = _lease(pool, "arena2", 5, bare=True)
    assert memfd.physical_bytes() == 3 * PAGE, "two were bare, three gave their memory up"
    with pytest.raises(BrokenPromise, match="is bare"):
        pool.hand_over("arena", "a", arena[:1])
    pool.give_back("arena", arena)
    assert pool.free_pages.populated == 3
    assert len(set(_lease(pool, "a", 3)) & set(pages) - set(more)) == 3, "populated ones first"
    pool.validate()


def test_no_memory_for_a_lease_is_short_and_undone(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(memfd, 8)
    assert pool.promise("a", 3) is None
    before = _counts(pool)
    monkeypatch.setattr(memfd, "populate", lambda pages: Short(len(pages)))
    assert pool.allocate("a", 4) == Short(4)
    assert _counts(pool) == before
    assert pool.free_pages.populate_some(2) == Short(2)
    pool.validate()

    def fail(_: object) -> None:
        raise DeviceError("madvise", "broken")

    monkeypatch.setattr(memfd, "populate", fail)
    with pytest.raises(DeviceError):
        pool.allocate("a", 4)
    with pytest.raises(DeviceError):
        pool.free_pages.populate_some(2)
    assert _counts(pool) == before
    monkeypatch.undo()
    assert len(_lease(pool, "a", 8)) == 8
    pool.validate()


def test_a_pool_no_larger_than_its_device() -> None:
    with pytest.raises(BrokenPromise):
        Pool(NullVm(PAGE, 4), 5)


def test_the_same_calls_lease_the_same_pages() -> None:
    def run() -> list[object]:
        pool = Pool(NullVm(PAGE, 64), 64)
        result: list[object] = []
        for i in range(40):
            pages = pool.allocate(f"m{i % 3}", i % 7)
            result.append(pages)
            if i % 2 and isinstance(pages, tuple):
                pool.give_back(f"m{i % 3}", pages[::2])
        return result

    assert run() == run()
