"""Any order of calls: the books add up, the system agrees, contents stay where they were put."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.core.actions import Short
from ballast.core.units import KiB
from ballast.memory.arena import Arena
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Latch, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.effort import tries
from tests.memory.fake_cuda import FakeDriver
from tests.memory.seen_once import system_seen_once

PAGE = 64 * KiB
N_PAGES = 24
SPAN = 16
OWNERS = ("a", "b", "c")

owners = st.sampled_from(OWNERS)
places = st.integers(0, SPAN - 1)
sizes = st.integers(1, 6)


class Memory(RuleBasedStateMachine):
    """Three models and an arena on one pool, against a model of plain dictionaries."""

    real: ClassVar[bool] = False
    """Whether there is memory that could be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.vm: Vm = self.make()
        self.pool = Pool(self.vm, N_PAGES)
        self.ranges = {o: BackedRange(self.pool, self.vm, o, SPAN * PAGE) for o in OWNERS}
        self.arena = Arena(self.pool, "arena", 6 * PAGE)
        self.held: dict[str, dict[int, int]] = {o: {} for o in OWNERS}
        """Owner -> index -> the value its page is filled with."""
        self.leaving: list[tuple[str, int, Latch]] = []
        self.aliases: list[tuple[str, int, str, int]] = []
        """(holder, index there, owner, index there)."""
        self.promised = 0
        self.next_value = 0

    def make(self) -> Vm:
        return NullVm(PAGE, N_PAGES)

    def teardown(self) -> None:
        self.vm.close()

    def _write(self, owner: str, at: int) -> None:
        self.next_value = (self.next_value + 1) % 251
        self.held[owner][at] = self.next_value
        if self.real:
            address = self.ranges[owner].range.address(at)
            array_at(address, (PAGE,), "uint8")[:: PAGE // 64] = self.next_value

    def _left(self, owner: str) -> list[int]:
        return [at for o, at, _ in self.leaving if o == owner]

    def _lent(self, owner: str) -> set[int]:
        return {at for _, _, lender, at in self.aliases if lender == owner}

    def _aliased(self, holder: str) -> set[int]:
        return {at for user, at, _, _ in self.aliases if user == holder}

    def _room(self) -> int:
        return max(0, self.pool.free - self.promised)

    @rule(owner=owners, where=st.lists(st.tuples(places, sizes), min_size=1, max_size=3))
    def back(self, owner: str, where: list[tuple[int, int]]) -> None:
        indices = [i for at, n in where for i in range(at, at + n)]
        taken = set(self.held[owner]) | self._aliased(owner)
        if len(set(indices)) < len(indices) or max(indices) >= SPAN or taken & set(indices):
            return
        in_the_way = len(set(indices) & set(self._left(owner)))
        expected = in_the_way or max(0, len(indices) - self._room())
        got = self.ranges[owner].back_many(where)
        assert got == (Short(expected) if expected else None)
        if got is None:
            for at in indices:
                self._write(owner, at)

    @rule(owner=owners, at=places, n=sizes, wait=st.booleans())
    def release(self, owner: str, at: int, n: int, wait: bool) -> None:
        indices = range(at, at + n)
        if not set(indices) <= set(self.held[owner]) or self._lent(owner) & set(indices):
            return
        fence = Latch() if wait else None
        self.ranges[owner].release(at, n, fence)
        for i in indices:
            del self.held[owner][i]
            if fence is not None:
                self.leaving.append((owner, i, fence))

    @precondition(lambda self: self.leaving)
    @rule(which=st.integers(0, 99))
    def a_job_ends(self, which: int) -> None:
        self.leaving[which % len(self.leaving)][2].set()
        done = [entry for entry in self.leaving if entry[2].done()]
        assert self.pool.reap() == len(done)
        self.leaving = [entry for entry in self.leaving if not entry[2].done()]

    @rule(owner=owners, at=places, holder=owners, to=places)
    def alias(self, owner: str, at: int, holder: str, to: int) -> None:
        blocked = set(self.held[holder]) | set(self._left(holder)) | self._aliased(holder)
        if owner == holder or at not in self.held[owner] or to in blocked:
            return
        self.ranges[holder].alias(to, self.ranges[owner].pages(at, 1), owner)
        self.aliases.append((holder, to, owner, at))

    @precondition(lambda self: self.aliases)
    @rule(which=st.integers(0, 99))
    def unalias(self, which: int) -> None:
        holder, to, owner, _ = self.aliases.pop(which % len(self.aliases))
        self.ranges[holder].unalias(to, 1, owner)

    @rule(n=st.integers(0, 6), wait=st.booleans())
    def resize_arena(self, n: int, wait: bool) -> None:
        short = max(0, n - self.arena.pages - self._room())
        if not wait:
            assert self.arena.resize(n * PAGE) == (Short(short) if short else None)

    @rule(n=st.integers(0, 8))
    def promise(self, n: int) -> None:
        short = n - (self.pool.free + self.pool.ledger.reclaiming - self.promised)
        got = self.pool.promise("later", n)
        assert got == (Short(short) if short > 0 else None)
        self.promised += n if got is None else 0

    @rule()
    def use_promise(self) -> None:
        n = min(self.promised, self.pool.free)
        pages = self.pool.allocate("later", n)
        assert isinstance(pages, tuple)
        self.promised -= n
        self.pool.give_back("later", pages)
        assert self.pool.cancel_promise("later") == self.promised
        self.promised = 0

    @rule(n=st.integers(1, 8))
    def populate(self, n: int) -> None:
        assert isinstance(self.pool.free_pages.populate_some(n), int)

    @rule(owner=owners)
    def start_over(self, owner: str) -> None:
        if self._lent(owner) or self._left(owner) or self._aliased(owner):
            return
        self.ranges[owner].close()
        self.ranges[owner] = BackedRange(self.pool, self.vm, owner, SPAN * PAGE)
        self.held[owner] = {}

    @invariant()
    def books_add_up(self) -> None:
        self.pool.validate()
        counts = {o: len(held) for o, held in self.held.items() if held}
        if self.arena.pages:
            counts["arena"] = self.arena.pages
        assert self.pool.ledger.owners() == counts
        assert self.pool.ledger.reclaiming == len(self.leaving)
        assert self.pool.ledger.reservations.promised == self.promised
        assert self.pool.free + self.pool.ledger.reclaiming + sum(counts.values()) == N_PAGES

    @invariant()
    def the_system_agrees(self) -> None:
        with system_seen_once():
            backed = {owner: r.os_backed() for owner, r in self.ranges.items()}
        for owner, r in self.ranges.items():
            r.validate()
            result = (
                self.pool.ledger.owned(owner)
                + self.pool.ledger.reclaiming_of(owner)
                + self.pool.ledger.holders.held(owner)
            )
            assert backed[owner] == result
            assert (r.backed, r.aliased) == (len(self.held[owner]), len(self._aliased(owner)))
        assert self.pool.ledger.owned("arena") == self.arena.pages
        self.arena.validate()
        if isinstance(self.vm, MemfdVm | CudaVm):
            assert self.vm.physical_bytes() <= (N_PAGES - self.arena.pages) * PAGE

    @invariant()
    def contents_stay(self) -> None:
        if self.real:
            for owner, held in self.held.items():
                for at, value in held.items():
                    view = array_at(self.ranges[owner].range.address(at), (PAGE,), "uint8")
                    assert (view[:: PAGE // 64] == value).all()
            for holder, to, owner, at in self.aliases:
                view = array_at(self.ranges[holder].range.address(to), (PAGE,), "uint8")
                assert (view[:: PAGE // 64] == self.held[owner][at]).all()


class RealMemory(Memory):
    real = True

    def make(self) -> Vm:
        return MemfdVm(PAGE, N_PAGES)


class CudaMemory(Memory):
    """A GPU, as far as the driver's rules go."""

    real = True

    def make(self) -> Vm:
        self.driver = FakeDriver()
        return CudaVm(self.driver, 0, PAGE, N_PAGES)

    def teardown(self) -> None:
        super().teardown()
        assert self.driver.is_clean()


TestNull = Memory.TestCase
TestNull.settings = settings(max_examples=tries(12, all=30), stateful_step_count=40)
TestReal = RealMemory.TestCase
TestReal.settings = settings(max_examples=tries(5, all=12), stateful_step_count=40)
TestCuda = CudaMemory.TestCase
TestCuda.settings = settings(max_examples=tries(10, all=25), stateful_step_count=40)
