"""A refused admission changes nothing, and is granted only once something has counted as freed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.core.actions import Short
from ballast.kv.blocks import KvCache
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from tests.effort import tries
from tests.kv.test_blocks import PAGE, cached, grown, make, make_spec

N_PAGES = 5
picks = st.integers(0, 1000)
sizes = st.integers(1, 12)


def books(kv: KvCache, pool: Pool) -> object:
    slabs = {i: (s.used, [*s.cached], sorted(s.free)) for i, s in kv.book.slabs.of.items()}
    return (
        dict(kv.book.refs),
        slabs,
        kv.book.shared,
        kv.pages,
        pool.ledger.owners(),
        pool.free,
        pool.ledger.reservations.promised,
    )


def test_what_is_refused_leaves_the_books_as_they_were() -> None:
    kv, pool = make(6)
    prefix = cached(kv, 5, 4)
    held = pool.allocate("other", pool.free)
    assert not isinstance(held, Short)
    before, freed = books(kv, pool), pool.freed.n
    assert isinstance(kv.admit(100, prefix), Short)
    assert (books(kv, pool), pool.freed.n) == (before, freed)
    pool.give_back("other", held)
    assert pool.freed.n > freed
    admitted = kv.admit(len(prefix), prefix)
    assert not isinstance(admitted, Short)
    blocks, there = admitted
    assert (there, len(blocks)) == (8, 5)
    kv.validate([blocks])
    pool.validate()


class Exhausted(NullVm):
    """A machine that has memory for so many more pages."""

    left = 12

    def populate(self, pages: Sequence[int]) -> Short | None:
        if len(pages) > self.left:
            return Short(len(pages) - self.left)
        self.left -= len(pages)
        return None


def test_a_machine_without_memory_frees_nothing() -> None:
    vm = Exhausted(PAGE, 60)
    pool = Pool(vm, 60)
    spec = make_spec()
    kv = KvCache(spec, pool, vm)
    freed = pool.freed.n
    assert isinstance(kv.admit(30 * kv.layout.blocks_per_slab * spec.block_tokens, []), Short)
    assert pool.unfilled > 0
    assert pool.freed.n == freed
    kv.validate([])
    pool.validate()


class Waiter(RuleBasedStateMachine):
    """A request that was refused, and everything that may happen beside it on one pool."""

    def __init__(self) -> None:
        super().__init__()
        vm = NullVm(PAGE, N_PAGES)
        self.pool = Pool(vm, N_PAGES)
        self.caches = [KvCache(make_spec(n, fingerprint=n), self.pool, vm) for n in "ab"]
        self.tables: list[tuple[KvCache, list[int]]] = []
        self.leased: list[tuple[int, ...]] = []
        self.refused: tuple[int, int] | None = None
        """Tokens asked of the first cache, and what had counted as freed then."""

    @rule(pick=picks, blocks=st.integers(1, 12))
    def grow(self, pick: int, blocks: int) -> None:
        kv, table = self.caches[pick % 2], list[int]()
        if kv.grow(table, 2 * blocks) is None:
            self.tables.append((kv, table))

    @precondition(lambda self: self.tables)
    @rule(pick=picks, surrender=st.booleans(), keep=st.booleans())
    def free(self, pick: int, surrender: bool, keep: bool) -> None:
        kv, table = self.tables.pop(pick % len(self.tables))
        if keep:
            tokens = [pick % 900 + i for i in range(2 * len(table) + 1)]
            kv.remember(tokens, table, 2 * len(table))
        kv.free(table, surrender=surrender)

    @rule(pick=picks, pages=st.integers(1, 4))
    def drop(self, pick: int, pages: int) -> None:
        self.caches[pick % 2].prefixes.drop(pages)

    @rule(pick=picks, pages=st.integers(1, 4))
    def compact(self, pick: int, pages: int) -> None:
        kv = self.caches[pick % 2]
        kv.compact([table for owner, table in self.tables if owner is kv], pages)

    @rule(pages=st.one_of(st.none(), st.integers(0, N_PAGES)))
    def limit(self, pages: int | None) -> None:
        self.caches[0].bounds.limit = pages

    @rule(left=st.sampled_from([0, 0, 1, 3]))
    def lease(self, left: int) -> None:
        got = self.pool.allocate("other", max(0, self.pool.available("other") - left))
        if not isinstance(got, Short):
            self.leased.append(got)

    @precondition(lambda self: self.leased)
    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        self.pool.give_back("other", self.leased.pop(pick % len(self.leased)))

    @rule(pages=st.integers(0, 6))
    def promise(self, pages: int) -> None:
        self.pool.replace_promise("another", pages)

    @rule(tokens=sizes)
    def wait(self, tokens: int) -> None:
        """A request asks; where it is refused it waits until something has been freed."""
        kv = self.caches[0]
        before, freed = books(kv, self.pool), self.pool.freed.n
        found = kv.admit(tokens, [])
        if isinstance(found, Short):
            assert (books(kv, self.pool), self.pool.freed.n) == (before, freed)
            self.refused = tokens, freed
        else:
            self.tables.append((kv, found[0]))

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        if self.refused is None or self.refused[1] != self.pool.freed.n:
            self.refused = None
            return
        assert isinstance(self.caches[0].admit(self.refused[0], []), Short)

    def teardown(self) -> None:
        self.pool.validate()
        for kv in self.caches:
            kv.validate([table for owner, table in self.tables if owner is kv])


TestWaiter = Waiter.TestCase
TestWaiter.settings = settings(
    max_examples=tries(20, all=50), stateful_step_count=25, deadline=None
)


def test_growth_counts_nothing_as_freed() -> None:
    kv, pool = make(6)
    table = grown(kv, 6)
    assert pool.freed.n == 0
    kv.free(table)
    assert pool.freed.n > 0
    pool.validate()
