"""Ranges: wholly or not at all, contents kept, addresses fixed."""

from __future__ import annotations

import errno

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB
from ballast.memory import syscalls
from ballast.memory.address_space import count_mappings
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Latch, Vm
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB


def test_back_and_release(vm: Vm) -> None:
    pool = Pool(vm, 8)
    r = BackedRange(pool, vm, "a", 20 * PAGE)
    base = r.range.base
    assert r.back(3, 4) is None
    assert (r.backed, r.os_backed(), pool.ledger.owned("a"), r.is_backed(3), r.is_backed(2)) == (
        4,
        4,
        4,
        True,
        False,
    )
    r.release(4, 2)
    assert (r.backed, r.os_backed(), pool.free, r.range.base) == (2, 2, 6, base)
    with pytest.raises(BrokenPromise):
        r.pages(3, 2)
    r.validate()
    r.close()
    r.close()
    assert (pool.free, r.os_backed()) == (8, 0)
    with pytest.raises(BrokenPromise, match="closed"):
        r.back(0, 1)


def test_short_leaves_everything_as_it_was(vm: Vm) -> None:
    pool = Pool(vm, 8)
    r = BackedRange(pool, vm, "a", 20 * PAGE)
    assert r.back_many([(0, 2), (10, 2)]) is None
    pages = r.pages(0, 2), r.pages(10, 2)
    assert r.back_many([(2, 3), (15, 3)]) == Short(2)
    assert (r.pages(0, 2), r.pages(10, 2)) == pages
    assert (r.backed, r.os_backed(), pool.free) == (4, 4, 4)
    assert r.back_many([]) is None
    pool.validate()


@pytest.mark.parametrize(
    "where", [[(1, 1)], [(3, 1), (3, 1)], [(3, 2), (4, 1)], [(20, 1)], [(-1, 1)]]
)
def test_senseless_requests(vm: Vm, where: list[tuple[int, int]]) -> None:
    pool = Pool(vm, 8)
    r = BackedRange(pool, vm, "a", 20 * PAGE)
    assert r.back(0, 2) is None
    with pytest.raises(BrokenPromise):
        r.back_many(where)
    assert (r.backed, pool.free) == (2, 6)


def test_a_fence_keeps_pages_mapped(vm: Vm) -> None:
    pool = Pool(vm, 4)
    r = BackedRange(pool, vm, "a", 4 * PAGE)
    assert r.back(0, 3) is None
    fence = Latch()
    r.release(0, 2, fence)
    assert (r.backed, r.leaving, r.os_backed(), pool.ledger.owned("a"), pool.ledger.reclaiming) == (
        1,
        2,
        3,
        1,
        2,
    )
    assert r.back(1, 1) == Short(1), "the address is still in use"
    r.close(fence)
    assert r.os_backed() == 3
    fence.set()
    pool.reap()
    assert (r.os_backed(), pool.free) == (0, 4)
    pool.validate()


def test_a_lent_page_cannot_leave(vm: Vm) -> None:
    pool = Pool(vm, 4)
    r = BackedRange(pool, vm, "a", 4 * PAGE)
    assert r.back(0, 2) is None
    pool.add_holder("a", r.pages(0, 1), "peer")
    with pytest.raises(BrokenPromise, match="held by"):
        r.release(0, 2)
    assert (r.backed, r.leaving, r.os_backed()) == (2, 0, 2)
    pool.remove_holder("a", r.pages(0, 1), "peer")
    r.close()


def test_an_alias_shows_the_lenders_page_until_it_goes(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 4)
    a = BackedRange(pool, memfd, "a", 4 * PAGE)
    b = BackedRange(pool, memfd, "b", 4 * PAGE)
    assert a.back(0, 2) is None
    assert b.back(0, 1) is None
    array_at(a.range.base, (2 * PAGE,), "uint8")[:] = 7
    b.alias(1, a.pages(0, 2), "a")
    b.alias(3, a.pages(0, 1), "a")
    assert (array_at(b.range.address(1), (3 * PAGE,), "uint8") == 7).all()
    assert (b.backed, b.aliased, b.os_backed(), pool.ledger.holders.held("b")) == (1, 3, 4, 3)
    for attempt in (
        lambda: a.release(0, 2),
        lambda: b.release(1, 1),
        lambda: b.alias(1, a.pages(0, 1), "a"),
        lambda: b.unalias(0, 1, "a"),
        lambda: b.alias(2, a.pages(0, 1), "b"),
    ):
        with pytest.raises(BrokenPromise):
            attempt()
        a.validate()
        b.validate()
        pool.validate()
        assert (a.os_backed(), b.os_backed()) == (2, 4)
    b.unalias(1, 2, "a")
    b.unalias(3, 1, "a")
    a.close()
    b.close()
    pool.validate()
    assert pool.free == 4


def test_a_failing_map_undoes_the_lease(memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memfd, 16)
    a = BackedRange(pool, memfd, "a", 16 * PAGE)
    b = BackedRange(pool, memfd, "b", 16 * PAGE)
    assert b.back(0, 1) is None
    monkeypatch.setattr(memfd._memory, "moves", False)
    real, calls = syscalls.mmap, []

    def fail_second(*args: int) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "no more mappings")
        return real(*args)

    monkeypatch.setattr(syscalls, "mmap", fail_second)
    with pytest.raises(DeviceError):
        a.back_many([(0, 2), (8, 2)])
    assert (a.backed, a.os_backed(), pool.free, pool.ledger.owners()) == (0, 0, 15, {"b": 1})
    pool.validate()
    assert a.back_many([(0, 2), (8, 2)]) is None


def test_a_range_growing_page_by_page_stays_one_mapping(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    a = BackedRange(pool, memfd, "a", 32 * PAGE)
    before = count_mappings()
    for at in range(32):
        assert a.back(at, 1) is None
    assert count_mappings() <= before + 1
