"""KvCache against a model of what its blocks hold, under any sequence of calls.

The model keeps, for each block, what was written to each of its places: the salt and all tokens up
to there, as KV depends on them. A block whose page goes loses its contents. After every call each
table must read what its request computed, and all books must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ballast.core.actions import Short
from ballast.core.lease import Lease
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kv.blocks import KvCache
from ballast.kv.layout import Layout
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from tests.effort import tries

PAGE = 256
BLOCK_TOKENS = 2
# Head dimensions and what they make: four blocks to a page, four to three pages, one to a page, one
# to three pages, eight to a page.
GEOMETRIES = [4, 12, 16, 48, 2]
LENDABLE = 24
"""Pages of the device that lends."""
Content = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Sequence:
    """One request: KV exists for `tokens[:computed]`."""

    tokens: list[int]
    salt: str
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


# Prompts that often begin alike: some of one text, then something else.
TEXT = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1]
tails = st.lists(st.integers(0, 1), min_size=1, max_size=4)
prompts = st.builds(lambda n, tail: TEXT[:n] + tail, st.integers(0, len(TEXT)), tails)
salts = st.sampled_from(["", "", "", "a"])
picks = st.integers(0, 1000)
some = st.lists(picks, max_size=2)


class Machine(RuleBasedStateMachine):
    kv: KvCache

    @initialize(
        head_dim=st.sampled_from(GEOMETRIES),
        n_slabs=st.sampled_from([8, 12, 4, 2]),
        odd_pages=st.integers(0, 2),
        prefix=st.sampled_from([True, True, True, False]),
    )
    def begin(self, head_dim: int, n_slabs: int, odd_pages: int, prefix: bool) -> None:
        spec = ModelSpec(
            name="m",
            n_layers=1,
            n_heads=1,
            kv_heads=1,
            head_dim=head_dim,
            hidden=4,
            intermediate=4,
            vocab=2,
            dtype="float32",
            max_model_len=64,
            block_tokens=BLOCK_TOKENS,
            segment_bytes=(1,),
            fingerprint="f",
        )
        n_pages = n_slabs * Layout.of(spec, PAGE).slab_pages + odd_pages
        vm = NullVm(PAGE, n_pages)
        self.pool = Pool(vm, n_pages)
        self.borrower = Borrower(self.pool, vm, "here")
        self.borrower.meet("there", 1, NullVm(PAGE, LENDABLE).export(()))
        self.leases: list[Lease] = []
        self.lent = 0
        self.kv = KvCache(
            spec, self.pool, vm, prefix=prefix, move=self.move, borrower=self.borrower
        )
        self.moved: list[tuple[int, int]] = []
        self.memory: dict[int, list[Content | None]] = {}
        self.open: list[Sequence] = []
        self.others: list[tuple[int, ...]] = []

    # -- the model ----------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        assert all(target not in s.blocks for s in self.open)
        self.memory[target] = list(self.memory.get(source, [None] * BLOCK_TOKENS))
        self.memory[source] = [None] * BLOCK_TOKENS
        self.moved.append((source, target))

    def forget_unbacked(self) -> None:
        for block in list(self.memory):
            if block // self.kv.layout.blocks_per_slab not in self.kv.book.slabs.of:
                del self.memory[block]

    def read(self, s: Sequence, i: int) -> Content | None:
        block = self.memory.get(s.blocks[i // BLOCK_TOKENS])
        return block[i % BLOCK_TOKENS] if block else None

    def tables(self) -> list[list[int]]:
        return [s.blocks for s in self.open]

    def pick(self, i: int) -> Sequence:
        return self.open[i % len(self.open)]

    def books(self) -> tuple[object, ...]:
        kv = self.kv
        return (
            kv.pages,
            kv.borrowed.pages,
            self.borrower.unused,
            kv.counts.cached_pages,
            kv.counts.cached_blocks,
            kv.counts.used_blocks,
            self.pool.free,
            kv.counts.pages_for(3),
            list(kv.book.slabs.idle),
            sorted(kv.book.prefix.kept()) if kv.book.prefix else None,
        )

    def grow(self, blocks: list[int], n_tokens: int) -> Short | None:
        """Grow, and check that exactly what the sizes said has happened."""
        kv = self.kv
        n = ceil_div(n_tokens, BLOCK_TOKENS) - len(blocks)
        asked = kv.counts.pages_for(n)
        fresh = asked - kv.counts.cached_pages - kv.counts.cached_borrowed_pages
        refused = fresh > 0 and not self.can_back(fresh)
        before, table, pages = self.books(), list(blocks), kv.pages
        short = kv.grow(blocks, n_tokens)
        if refused:
            assert short is not None
            assert short.pages == asked
            # With so many blocks back it would need no page, with one fewer it would.
            left = n - short.blocks
            assert kv.counts.pages_for(left) == 0 < kv.counts.pages_for(left + 1)
            assert (self.books(), blocks) == (before, table)
            most = kv.pages - kv.counts.cached_pages + asked
            beyond = kv.bounds.limit is not None and most > kv.bounds.limit
            assert kv.counts.limited(short) == beyond
        else:
            assert short is None
            assert blocks[: len(table)] == table
            assert len(blocks) == max(len(table), ceil_div(n_tokens, BLOCK_TOKENS))
            assert kv.bounds.limit is None or kv.pages <= max(kv.bounds.limit, pages)
            for block in blocks[len(table) :]:
                self.memory[block] = [None] * BLOCK_TOKENS
        return short

    def can_back(self, pages: int) -> bool:
        """Whole slabs on pages of the pool, or, if they have one page, on borrowed ones."""
        size = self.kv.layout.slab_pages
        borrowed = self.borrower.unused if size == 1 else 0
        return pages // size <= self.room // size + borrowed

    def relax(self) -> None:
        """After a refusal others give way, lest most of a run be spent in want."""
        self.kv.bounds.limit = None
        if self.others:
            self.pool.give_back("other", self.others.pop())
        elif len(self.open) > 2:
            self.end(0, surrender=True)

    # -- what the engine does -----------------------------------------------------------------

    @rule(prompt=prompts, salt=salts)
    def admit(self, prompt: list[int], salt: str) -> None:
        s = Sequence(list(prompt), salt, self.kv.match(prompt, salt))
        s.computed = len(s.blocks) * BLOCK_TOKENS
        assert s.computed < len(prompt)
        self.open.append(s)
        self.check_contents()
        if self.grow(s.blocks, len(prompt)) is not None:
            self.kv.free(s.blocks)
            self.open.remove(s)
            self.relax()

    @rule(prompt=prompts, salt=salts)
    def prefill(self, prompt: list[int], salt: str) -> None:
        self.admit(prompt, salt)
        if self.open and self.open[-1].tokens == prompt:
            self.compute(len(self.open) - 1, len(prompt))

    @rule(prompt=prompts, salt=salts, surrender=st.booleans())
    def serve(self, prompt: list[int], salt: str, surrender: bool) -> None:
        self.prefill(prompt, salt)
        if self.open and self.open[-1].tokens == prompt:
            self.end(len(self.open) - 1, surrender)

    @rule(
        stays=st.lists(st.booleans(), min_size=4, max_size=16), pages=st.integers(0, 12), fixed=some
    )
    def scatter(self, stays: list[bool], pages: int, fixed: list[int]) -> None:
        """Short requests, some of which end: slabs with holes, then fewer slabs."""
        for i in range(len(stays)):
            self.prefill([i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3 & 1], "")
        fates = zip(reversed(self.open), stays, strict=False)
        for s in [s for s, stay in fates if not stay]:
            self.end(self.open.index(s), False)
        self.compact(pages, fixed)

    @precondition(lambda self: self.open)
    @rule(i=picks, n=st.integers(1, 8))
    def compute(self, i: int, n: int) -> None:
        s = self.pick(i)
        room = min(len(s.tokens), len(s.blocks) * BLOCK_TOKENS)
        for at in range(s.computed, min(room, s.computed + n)):
            block = self.memory[s.blocks[at // BLOCK_TOKENS]]
            block[at % BLOCK_TOKENS] = (s.salt, tuple(s.tokens[: at + 1]))
            s.computed = at + 1
        self.kv.remember(s.tokens, s.blocks, s.computed, s.salt)

    @precondition(lambda self: self.open)
    @rule(i=picks, more=tails)
    def extend(self, i: int, more: list[int]) -> None:
        s = self.pick(i)
        if self.grow(s.blocks, len(s.tokens) + len(more)) is None:
            s.tokens += more

    @precondition(lambda self: self.open)
    @rule(seed=st.randoms(use_true_random=False), surrender=st.booleans())
    def end_some(self, seed: Random, surrender: bool) -> None:
        for s in seed.sample(self.open, len(self.open) // 2):
            self.end(self.open.index(s), surrender)

    @precondition(lambda self: self.open)
    @rule(i=picks, surrender=st.booleans())
    def end(self, i: int, surrender: bool) -> None:
        s = self.pick(i)
        would_free, cached = self.kv.counts.if_freed(s.blocks)[0], self.kv.counts.cached_pages
        pages = self.kv.pages
        self.kv.free(s.blocks, surrender=surrender)
        self.open.remove(s)
        freed = pages - self.kv.pages
        if surrender:
            assert (freed, self.kv.counts.cached_pages) == (would_free, cached)
        else:
            assert freed + self.kv.counts.cached_pages - cached == would_free

    # -- what policies ask for ----------------------------------------------------------------

    @rule(pages=st.integers(0, 6))
    def drop_cached(self, pages: int) -> None:
        kv = self.kv
        before, cached = self.backed, kv.counts.cached_pages + kv.counts.cached_borrowed_pages
        wanted = ceil_div(pages, slab := kv.layout.slab_pages) * slab
        own = kv.pages - min(kv.counts.cached_pages, wanted)
        freed = kv.prefixes.drop(pages)
        assert kv.pages == own
        assert freed == before - self.backed == min(cached, ceil_div(pages, slab) * slab)

    @rule(pages=st.integers(0, 12), fixed=some)
    def compact(self, pages: int, fixed: list[int]) -> None:
        in_flight = [self.pick(i) for i in fixed if self.open]
        nailed = {b for s in in_flight for b in s.blocks}
        before, tables = self.backed, [list(s.blocks) for s in in_flight]
        freed = self.kv.compact(self.tables(), pages, fixed=nailed)
        assert freed == before - self.backed <= pages + self.kv.layout.slab_pages - 1
        assert [s.blocks for s in in_flight] == tables

    @rule(limit=st.sampled_from([None, None, None, None, None, None, 0, 2, 4, 9]))
    def limit(self, limit: int | None) -> None:
        self.kv.bounds.limit = limit

    @rule(really=st.integers(0, 7))
    def evict(self, really: int) -> None:
        if really:
            return
        for s in self.open:
            self.kv.free(s.blocks, surrender=True)
        self.open.clear()
        self.kv.clear()
        assert self.backed == self.kv.counts.cached_blocks == self.kv.counts.used_blocks == 0
        assert self.pool.ledger.owned(self.kv.owner) == 0

    @precondition(lambda self: not self.others)
    @rule(left=st.integers(0, 6))
    def others_lease(self, left: int) -> None:
        pages = self.pool.allocate("other", max(0, self.pool.free - left))
        if not isinstance(pages, Short):
            self.others.append(pages)

    # -- what another device asks for ---------------------------------------------------------

    @property
    def backed(self) -> int:
        return self.kv.pages + self.kv.borrowed.pages

    @property
    def room(self) -> int:
        """Pages of the pool that it may have more."""
        room = self.pool.available(self.kv.owner)
        limit = self.kv.bounds.limit
        return room if limit is None else max(0, min(room, limit - self.kv.pages))

    @rule(n=st.integers(1, 8), left=st.integers(0, 3))
    def borrow(self, n: int, left: int) -> None:
        """And be short of pages of its own."""
        if not self.others:
            self.others_lease(left)
        taken = {page for lease in self.leases for page in lease.pages}
        pages = [page for page in range(LENDABLE) if page not in taken][:n]
        if pages:
            self.lent += 1
            self.leases.append(Lease(self.lent, 1, "there", "here", tuple(pages)))
            assert self.borrower.accept(self.leases[-1]) is None

    @precondition(lambda self: self.leases)
    @rule(i=picks, moves=st.booleans())
    def asked_back(self, i: int, moves: bool) -> None:
        """What is cached goes, or takes the places of what is colder; what fits comes home, and the
        rest is preempted."""
        lease = self.leases[i % len(self.leases)]
        self.borrower.recall(lease)
        if moves:
            self.clear([used.page for used in self.borrower.wanted()])
        for page in [used.page for used in self.borrower.wanted()]:
            if not self.kv.borrowed.holds(page):
                continue  # it went with a table that has ended
            if self.kv.borrowed.drop(page):
                continue
            room = self.room >= 1
            before = [list(s.blocks) for s in self.open]
            self.moved.clear()
            assert self.kv.borrowed.bring_home(page, self.tables()) == room
            twins = dict(self.moved)
            assert self.tables() == [[twins.get(b, b) for b in table] for table in before]
            if not room:
                users = set(self.kv.borrowed.used_on(page))
                for s in [s for s in self.open if users & set(s.blocks)]:
                    self.end(self.open.index(s), True)
        self.settle()
        assert lease.id not in [result.id for result in self.leases]

    def clear(self, pages: list[int]) -> None:
        """The coldest prefixes go, wherever they lie; the others stay, in their order."""
        slabs, names = self.kv.book.slabs, self.kv.book.prefix
        assert names is not None or not slabs.idle
        held = lambda slab: [names._names[b] for b in slab.cached] if names else []  # noqa: E731
        order = [held(slab) for slab in slabs.to_drop(())]
        leaving = [p for p in pages if not slabs.of[p].used]
        room = max(0, self.room) + self.borrower.unused
        moved, dropped = self.kv.borrowed.clear(pages)
        assert moved + dropped == len(leaving)
        assert dropped == max(0, len(leaving) - room)
        assert [held(slab) for slab in slabs.to_drop(())] == order[dropped:]
        assert all(not self.kv.borrowed.holds(page) for page in leaving)

    def settle(self) -> None:
        for result in self.borrower.settle():
            (lease,) = [known for known in self.leases if known.id == result.id]
            left = tuple(page for page in lease.pages if page not in result.pages)
            self.leases.remove(lease)
            if left:
                self.leases.append(lease.part(left))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def check_contents(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.forget_unbacked()
        for s in self.open:
            for i in range(s.computed):
                assert self.read(s, i) == (s.salt, tuple(s.tokens[: i + 1]))

    @invariant()
    def check_books(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.validate(self.tables())
        self.pool.validate()
        self.borrower.validate()
        assert self.kv.book.backing.os_backed() == self.backed
        assert self.borrower.in_use == self.kv.borrowed.pages
        assert self.pool.ledger.borrowed.total() == sum(len(lease.pages) for lease in self.leases)
        assert self.pool.free + self.kv.pages + sum(map(len, self.others)) == self.pool.total


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=tries(15, all=40), stateful_step_count=50)
