"""A group's memory: what one rank cannot do is done on none, whatever came before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB
from ballast.memory.group.vm import GroupVm
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Range, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.memory.seen_once import system_seen_once
from tests.memory.test_machine import Memory

PAGE = 64 * KiB
N_PAGES = 12
SPAN = 8


class Moody(MemfdVm):
    """A rank whose next calls of the system may fail, or find no memory."""

    def __init__(self, page_bytes: int, n_pages: int) -> None:
        super().__init__(page_bytes, n_pages)
        self.fails = False
        self.lacks = 0

    def reserve(self, n_bytes: int) -> Range:
        self._may_fail()
        return super().reserve(n_bytes)

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        self._may_fail()
        super().map(range, at, pages, alias=alias, prefault=prefault)

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._may_fail()
        super().unmap(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        if self.lacks and pages:
            return Short(min(self.lacks, len(pages)))
        return super().populate(pages)

    def _may_fail(self) -> None:
        if self.fails:
            raise DeviceError("mmap", "a bad day")


class Group(RuleBasedStateMachine):
    """Two owners on a group of three ranks, of which any may fail at any call."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [Moody(PAGE, N_PAGES) for _ in range(3)]
        self.vm = GroupVm(self.ranks[0], self.ranks[1:])
        self.pool = Pool(self.vm, N_PAGES)
        self.ranges = [BackedRange(self.pool, self.vm, o, SPAN * PAGE) for o in ("a", "b")]
        self.backed: list[set[int]] = [set(), set()]

    def teardown(self) -> None:
        for rank in self.ranks:
            rank.fails = False
        self.vm.close()

    @rule(rank=st.integers(0, 2), fails=st.booleans(), lacks=st.integers(0, 1))
    def a_day(self, rank: int, fails: bool, lacks: int) -> None:
        self.ranks[rank].fails, self.ranks[rank].lacks = fails, lacks

    @rule(owner=st.integers(0, 1), at=st.integers(0, SPAN - 1), n=st.integers(1, 4))
    def back(self, owner: int, at: int, n: int) -> None:
        wanted = set(range(at, at + n))
        if at + n > SPAN or wanted & self.backed[owner]:
            return
        free = self.pool.free
        try:
            short = self.ranges[owner].back(at, n)
        except DeviceError:
            assert any(rank.fails for rank in self.ranks)
            assert self.pool.free == free
        else:
            enough = n <= free
            assert short is None or not enough or any(rank.lacks for rank in self.ranks)
            if short is None:
                self.backed[owner] |= wanted

    @rule(owner=st.integers(0, 1), at=st.integers(0, SPAN - 1), n=st.integers(1, 4))
    def release(self, owner: int, at: int, n: int) -> None:
        # Only good days: a pool keeps what could not be unmapped for another try.
        if any(rank.fails for rank in self.ranks):
            return
        gone = set(range(at, at + n))
        if gone <= self.backed[owner]:
            self.ranges[owner].release(at, n)
            self.backed[owner] -= gone

    @rule(owner=st.integers(0, 1), at=st.integers(0, SPAN - 1), n=st.integers(1, 4))
    def unmap_and_map_again(self, owner: int, at: int, n: int) -> None:
        where = self.ranges[owner]
        if not set(range(at, at + n)) <= self.backed[owner]:
            return
        pages = where.pages(at, n)
        try:
            self.vm.unmap(where.range, at, n)
        except DeviceError:
            return  # the invariants say that nothing has changed
        good = [rank.fails for rank in self.ranks]
        for rank in self.ranks:
            rank.fails = False
        self.vm.map(where.range, at, pages)
        for rank, fails in zip(self.ranks, good, strict=True):
            rank.fails = fails

    @invariant()
    def ranks_agree_with_each_other_and_with_the_books(self) -> None:
        self.pool.validate()
        with system_seen_once():
            for where, backed in zip(self.ranges, self.backed, strict=True):
                where.validate()
                # Raises where ranks differ.
                assert set(self.vm.os_pages(where.range)) == backed
                assert where.os_backed() == len(backed)


class GroupMemory(Memory):
    real = True

    def make(self) -> Vm:
        return GroupVm(MemfdVm(64 * KiB, 24), [MemfdVm(64 * KiB, 24)])


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=10, stateful_step_count=30)
TestGroupMemory = GroupMemory.TestCase
TestGroupMemory.settings = settings(max_examples=5, stateful_step_count=30)


def test_a_failing_reservation_leaves_no_rank_with_addresses() -> None:
    own, other = Moody(PAGE, 4), Moody(PAGE, 4)
    vm = GroupVm(own, [other])
    other.fails = True
    with pytest.raises(DeviceError, match="a bad day"):
        vm.reserve(PAGE)
    assert own._mappings.ranges() == []
    vm.close()


def test_a_failing_unmap_leaves_the_pages_where_they_were_on_all_ranks() -> None:
    own, other = Moody(PAGE, 4), Moody(PAGE, 4)
    vm = GroupVm(own, [other])
    r = vm.reserve(4 * PAGE)
    vm.map(r, 1, [3, 0])
    other.fails = True
    with pytest.raises(DeviceError, match="a bad day"):
        vm.unmap(r, 1, 2)
    other.fails = False
    assert vm.os_pages(r) == {1: 3, 2: 0}
    vm.unmap(r, 1, 2)
    vm.release(r)
    vm.close()


def test_places_are_found_on_every_rank() -> None:
    vms = [NullVm(PAGE, 4) for _ in range(3)]
    vm = GroupVm(vms[0], vms[1:])
    first, second = vm.reserve(2 * PAGE), vm.reserve(PAGE)
    own, *others = vm.ranges.where(first.base + PAGE + 5)
    assert own == first.base + PAGE + 5
    assert len({own, *others}) == 3
    assert all(place % PAGE == 5 for place in others)
    for nowhere in (first.base - 1, first.end, second.end):
        with pytest.raises(BrokenPromise):
            vm.ranges.where(nowhere)
    vm.release(first)
    with pytest.raises(BrokenPromise):
        vm.ranges.where(first.base)


def test_a_group_lends_and_borrows_nothing() -> None:
    vm = GroupVm(NullVm(PAGE, 4), [NullVm(PAGE, 4)])
    with pytest.raises(DeviceError, match="lends no pages"):
        vm.export([0])
    with pytest.raises(DeviceError, match="borrows no pages"):
        vm.attach(NullVm(PAGE, 2).export([0]))
    with pytest.raises(BrokenPromise, match="differ"):
        GroupVm(NullVm(PAGE, 4), [NullVm(PAGE, 5)])
