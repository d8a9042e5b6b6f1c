"""KvCache by example: what comes from where, what goes when, and who is told what."""

import random
from collections.abc import Sequence

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.model import ModelSpec
from ballast.core.units import KiB
from ballast.kv.blocks import KvCache
from ballast.kv.compaction import plan
from ballast.kv.slabs import Slabs
from ballast.memory.address_space import count_mappings
from ballast.memory.pool import Pool
from ballast.memory.tensor import array_at
from ballast.memory.vm import Range
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm

PAGE = 256
TOKENS = random.Random(1).sample(range(1000), 64)


def make_spec(name: str = "m", *, head_dim: int = 4, fingerprint: str = "f") -> ModelSpec:
    """Blocks of 2 tokens; `head_dim` 4: four to a page, 12: four to three pages, 16: one a page."""
    return ModelSpec(
        name=name,
        n_layers=1,
        n_heads=1,
        kv_heads=1,
        head_dim=head_dim,
        hidden=4,
        intermediate=4,
        vocab=1000,
        dtype="float32",
        max_model_len=64,
        block_tokens=2,
        segment_bytes=(1,),
        fingerprint=fingerprint,
    )


def make(
    n_pages: int = 8, *, head_dim: int = 4, capacity_blocks: int | None = None, prefix: bool = True
) -> tuple[KvCache, Pool]:
    vm = NullVm(PAGE, n_pages)
    pool = Pool(vm, n_pages)
    spec = make_spec(head_dim=head_dim)
    return KvCache(spec, pool, vm, capacity_blocks=capacity_blocks, prefix=prefix), pool


def grown(kv: KvCache, n_blocks: int) -> list[int]:
    table: list[int] = []
    assert kv.grow(table, n_blocks * 2) is None
    return table


def cached(kv: KvCache, first_token: int, n_blocks: int) -> list[int]:
    """Leaves `n_blocks` cached and unused; returns their tokens and one more."""
    tokens = [first_token, *TOKENS[: 2 * n_blocks]]
    table = grown(kv, n_blocks)
    kv.remember(tokens, table, 2 * n_blocks)
    kv.free(table)
    return tokens


def test_a_table_grows_by_whole_blocks_and_slabs() -> None:
    kv, pool = make()
    table: list[int] = []
    assert kv.grow(table, 1) is None
    assert (len(table), kv.pages, pool.ledger.owned("kv:m")) == (1, 1, 1)
    assert kv.grow(table, 2) is None
    assert len(table) == 1
    assert kv.grow(table, 9) is None
    assert (table, kv.pages) == ([0, 1, 2, 3, 4], 2)
    assert kv.block_address(4) == kv.base + PAGE
    kv.validate([table])
    kv.free(table)
    assert (kv.pages, pool.free) == (0, pool.total)
    kv.validate([])


def test_slabs_of_several_pages_come_and_go_whole() -> None:
    kv, pool = make(8, head_dim=12)
    assert (kv.layout.slab_pages, kv.layout.blocks_per_slab) == (3, 4)
    table = grown(kv, 5)
    assert kv.pages == 6
    assert kv.grow(table, 18) == Short(3, 1)
    kv.free(table)
    assert pool.free == 8


def test_partly_used_slabs_fill_first_and_the_fullest_of_them() -> None:
    kv, _ = make()
    a, b = grown(kv, 4), grown(kv, 4)
    kv.free(a[1:])
    kv.free(b[:1])
    assert grown(kv, 1) == b[:1]
    assert set(grown(kv, 3)) == set(a[1:])
    assert kv.pages == 2


def test_growth_is_all_or_nothing() -> None:
    kv, pool = make(3)
    table = grown(kv, 9)
    before = list(table)
    assert kv.grow(table, 2 * 17) == Short(2, 5)
    assert (table, kv.pages, pool.free) == (before, 3, 0)
    assert kv.grow(table, 2 * 12) is None


def test_a_short_counts_what_was_asked_for_so_that_free_pages_can_be_set_against_it() -> None:
    kv, pool = make(4)
    pool.allocate("other", 2)
    table: list[int] = []
    short = kv.grow(table, 2 * 12)
    assert short == Short(3, 12)
    assert kv.counts.pages_for(12) == 3
    assert not kv.counts.limited(short)


def test_a_limit_bounds_growth_and_says_so() -> None:
    kv, pool = make(8)
    kv.bounds.limit = 2
    table = grown(kv, 8)
    short = kv.grow(table, 18)
    assert short == Short(1, 1)
    assert kv.counts.limited(short)
    kv.bounds.limit = None
    assert kv.grow(table, 18) is None
    kv.bounds.limit = 1
    pool.allocate("other", 5)
    kv.free(table[4:])
    assert kv.pages == 1


def test_a_limit_is_not_blamed_for_an_empty_pool() -> None:
    kv, pool = make(8)
    kv.bounds.limit = 7
    pool.allocate("other", 6)
    table = grown(kv, 4)
    short = kv.grow(table, 2 * 12)
    assert short == Short(2, 8)
    assert not kv.counts.limited(short)


def test_capacity_is_a_limit_for_ever() -> None:
    kv, _ = make(8, capacity_blocks=6)
    table = grown(kv, 8)
    short = kv.grow(table, 18)
    assert short is not None
    assert kv.counts.limited(short)
    assert kv.counts.excess(2 - kv.pages) == 0 < kv.counts.excess(3 - kv.pages)


def test_promised_pages_are_not_taken() -> None:
    kv, pool = make(4)
    pool.promise("weights:x", 3)
    table: list[int] = []
    assert kv.grow(table, 16) == Short(2, 8)
    assert kv.grow(table, 8) is None


def test_a_cached_prefix_survives_and_is_shared() -> None:
    kv, _ = make()
    tokens = cached(kv, 1, 4)
    assert (kv.pages, kv.counts.cached_pages, kv.counts.cached_blocks, kv.counts.used_blocks) == (
        1,
        1,
        4,
        0,
    )
    a = kv.match(tokens)
    b = kv.match(tokens)
    assert a == b == [0, 1, 2, 3]
    assert (kv.counts.cached_pages, kv.prefixes.hit_tokens, kv.prefixes.asked_tokens) == (0, 16, 18)
    kv.validate([a, b])
    kv.free(a)
    assert kv.counts.cached_pages == 0
    kv.free(b)
    assert kv.counts.cached_pages == 1


def test_one_token_is_always_left_to_compute() -> None:
    kv, _ = make()
    tokens = cached(kv, 1, 4)
    assert len(kv.match(tokens[:8])) == 3


def test_salts_models_and_a_cache_switched_off_find_nothing() -> None:
    kv, pool = make()
    table = grown(kv, 2)
    kv.remember(TOKENS, table, 4, "tenant-a")
    assert kv.match(TOKENS, "tenant-b") == []
    assert kv.match(TOKENS) == []
    assert kv.match(TOKENS, "tenant-a") == table
    other = KvCache(make_spec("n", fingerprint="g"), pool, pool.vm)
    assert other.match(TOKENS, "tenant-a") == []
    off, _ = make(prefix=False)
    cached(off, 1, 4)
    assert off.pages == 0
    assert off.match([1, *TOKENS]) == []
    off.validate([])


def test_an_equal_block_stays_private_until_the_first_is_gone() -> None:
    kv, _ = make()
    a, b = grown(kv, 4), grown(kv, 4)
    kv.remember(TOKENS, a, 8)
    kv.remember(TOKENS, b, 8)
    kv.free(a)
    assert kv.counts.cached_pages == 1
    assert kv.prefixes.drop(1) == 1
    assert kv.match(TOKENS) == []
    kv.free(b)
    assert kv.match(TOKENS) == b


def test_cached_prefixes_are_kept_while_the_pool_has_pages() -> None:
    kv, _ = make(4)
    tokens = cached(kv, 1, 4)
    grown(kv, 12)
    assert kv.pages == 4
    assert len(kv.match(tokens)) == 4


def test_a_short_pool_costs_cached_prefixes_oldest_slab_first() -> None:
    kv, pool = make(3)
    old, new = cached(kv, 1, 4), cached(kv, 2, 4)
    table = grown(kv, 4)
    assert (kv.counts.pages_for(1), kv.counts.cached_pages) == (1, 2)
    assert kv.grow(table, 2 * 5) is None
    assert kv.match(old) == []
    found = kv.match(new)
    assert len(found) == 4
    assert (kv.pages, pool.free) == (3, 0)
    kv.validate([table, found])


def test_free_pages_are_used_before_cached_prefixes() -> None:
    kv, pool = make(8, head_dim=16)
    held = cached(kv, 3, 6)
    assert pool.free == 2
    grown(kv, 5)
    assert pool.free == 0
    assert kv.prefixes.held_tokens(held) == 6, "three blocks of the six gave their pages"


def test_a_limit_costs_own_cached_prefixes_too() -> None:
    kv, pool = make(8)
    cached(kv, 1, 8)
    kv.bounds.limit = 2
    table = grown(kv, 8)
    assert (kv.pages, kv.counts.cached_blocks, pool.free) == (2, 0, 6)
    short = kv.grow(table, 18)
    assert short is not None
    assert kv.counts.limited(short)


def test_scattered_cached_blocks_are_reused_before_whole_slabs() -> None:
    kv, _ = make(2)
    whole = cached(kv, 1, 4)
    mixed = grown(kv, 4)
    kv.remember(TOKENS, mixed, 2)
    kv.free(mixed[:1])
    assert kv.counts.pages_for(1) == 0
    table = [*mixed[1:], *grown(kv, 1)]
    assert table[-1] == mixed[0]
    assert len(kv.match(whole)) == 4
    assert kv.match(TOKENS) == []


def test_of_scattered_cached_blocks_those_not_used_for_longest_go_first() -> None:
    kv, _ = make(2)
    texts = [TOKENS[at : at + 3] for at in range(0, 12, 3)]
    left, right = grown(kv, 4), grown(kv, 4)
    tables = [left[:1], right[:1], left[1:2]]
    for text, table in zip(texts, tables, strict=False):
        kv.remember(text, table, 2)
        kv.free(table)
    # `left` was used last, though it was the first to hold anything cached.
    grown(kv, 1)
    assert [len(kv.match(text)) for text in texts[:3]] == [1, 0, 1]


def test_dropping_takes_whole_slabs_least_recently_used_first() -> None:
    kv, pool = make(8)
    a, b, c = (cached(kv, first, 4) for first in (1, 2, 3))
    kv.free(kv.match(a))
    assert kv.prefixes.drop(1) == 1
    assert (kv.pages, pool.free, kv.match(b)) == (2, 6, [])
    assert len(kv.match(a)) == 4
    assert kv.prefixes.drop(100) == 1
    assert kv.match(c) == []
    assert kv.prefixes.drop(1) == 0
    assert kv.prefixes.drop(0) == 0


def test_surrender_gives_pages_back_and_keeps_what_frees_none() -> None:
    kv, pool = make(8)
    mine, other = grown(kv, 6), grown(kv, 1)
    assert other[0] // 4 == 1
    kv.remember(TOKENS, mine, 12)
    assert kv.counts.if_freed(mine)[0] == 1
    kv.free(mine, surrender=True)
    assert (kv.pages, pool.free, kv.counts.cached_blocks) == (1, 7, 2)
    kv.validate([other])


def test_shared_blocks_free_nothing_while_the_other_holds_them() -> None:
    kv, _ = make(8)
    a = grown(kv, 4)
    kv.remember(TOKENS, a, 8)
    b = kv.match(TOKENS)
    assert kv.counts.if_freed(a)[0] == kv.counts.if_freed(b)[0] == 0
    kv.free(a, surrender=True)
    assert kv.counts.if_freed(b)[0] == 1


def test_compaction_frees_slabs_and_edits_every_table() -> None:
    kv, pool = make(8)
    moved: list[tuple[int, int]] = []
    kv.book.move = lambda source, target: moved.append((source, target))
    first, second, third = grown(kv, 4), grown(kv, 4), grown(kv, 4)
    kv.remember(TOKENS, third, 2)
    shared = kv.match(TOKENS[:3])
    assert shared == third[:1]
    kv.free(first[2:])
    kv.free(second[3:])
    kv.free(third[1:])
    tables = [first[:2], second[:3], third[:1], shared]
    assert kv.compact(tables, 5) == 1
    assert moved == [(third[0], second[3])]
    assert tables[2] == tables[3] == [second[3]]
    assert (kv.pages, pool.free) == (2, 6)
    assert kv.match(TOKENS[:3]) == [second[3]]
    kv.validate([*tables, [second[3]]])
    assert kv.compact([*tables, [second[3]]], 5) == 0


def test_compaction_of_equally_used_slabs_never_fills_the_one_it_empties() -> None:
    kv, _ = make(8)
    tables = [grown(kv, 4) for _ in range(4)]
    for table in tables:
        kv.free(table[2:])
        del table[2:]
    assert kv.compact(tables, 8) == 2
    assert kv.pages == 2
    kv.validate(tables)


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_compaction_does_not_depend_on_the_numbers_of_pages(ids: tuple[int, ...]) -> None:
    slabs = Slabs(4)
    for index in ids:
        slabs.open([index])
        slabs.allocate(4)
    for slab in slabs.of.values():
        slab.free, slab.used = [slab.index * 4 + 3, slab.index * 4 + 2], 2
        slabs.settle(slab)
    place = {index: nth for nth, index in enumerate(ids)}
    moves = plan(slabs, 2, set())
    assert [(place[a // 4], a % 4, place[b // 4], b % 4) for a, b in moves] == [
        (0, 0, 1, 2),
        (0, 1, 1, 3),
        (2, 0, 3, 2),
        (2, 1, 3, 3),
    ]


def test_compaction_keeps_cached_prefixes() -> None:
    kv, pool = make(8)
    host = grown(kv, 4)
    tokens = cached(kv, 1, 2)
    kv.free(host[1:])
    assert (kv.pages, kv.counts.cached_pages) == (2, 1)
    assert kv.compact([host[:1]], 1) == 1
    assert (kv.pages, kv.counts.cached_pages, pool.free) == (1, 0, 7)
    found = kv.match(tokens)
    assert len(found) == 2
    kv.validate([host[:1], found])


def test_compaction_forgets_prefixes_that_lie_between_blocks_in_use() -> None:
    """Two slabs of two blocks each in use and two cached: no slab is idle, and none has a hole."""
    kv, pool = make(8)
    tables = []
    for first in (1, 50):
        table = grown(kv, 4)
        kv.remember([first, *TOKENS[:4], 3], table, 4)
        kv.free(table[:2])
        tables.append(table[2:])
    assert (kv.pages, kv.counts.cached_pages, kv.counts.loose_pages) == (2, 0, 1)
    assert kv.compact(tables, 1) == 1
    assert (kv.pages, pool.free, kv.counts.loose_pages) == (1, 7, 0)
    assert kv.match([50, *TOKENS[:4], 3]) == []
    kv.validate(tables)


def test_compaction_leaves_fixed_blocks_where_they_are() -> None:
    kv, _ = make(8)
    a, b = grown(kv, 4), grown(kv, 4)
    kv.free(a[1:])
    kv.free(b[2:])
    tables = [a[:1], b[:2]]
    assert kv.compact(tables, 1, fixed={*a[:1], *b[:2]}) == 0
    assert kv.compact(tables, 1, fixed=set(a[:1])) == 1
    assert tables[0] == a[:1]
    assert all(block // 4 == a[0] // 4 for block in tables[1])
    kv.validate(tables)


def test_compaction_refuses_references_it_cannot_see() -> None:
    kv, _ = make(8)
    a, b = grown(kv, 4), grown(kv, 4)
    kv.free(a[1:])
    kv.free(b[1:])
    with pytest.raises(BrokenPromise, match="references"):
        kv.compact([], 1)
    kv.validate([a[:1], b[:1]])


def test_a_move_that_fails_leaves_books_and_tables_in_step() -> None:
    kv, _ = make(8)
    a, b = grown(kv, 4), grown(kv, 4)
    kv.free(a[2:])
    kv.free(b[2:])
    tables = [a[:2], b[:2]]
    calls = []

    def move(source: int, target: int) -> None:
        calls.append((source, target))
        if len(calls) == 2:
            raise OSError

    kv.book.move = move
    with pytest.raises(OSError):
        kv.compact(tables, 1)
    kv.validate(tables)


def test_clear_gives_everything_back_but_not_from_under_a_request() -> None:
    kv, pool = make(8)
    tokens = cached(kv, 1, 6)
    table = kv.match(tokens)
    with pytest.raises(BrokenPromise, match="used"):
        kv.clear()
    kv.free(table)
    kv.clear()
    assert (kv.pages, pool.free, kv.match(tokens)) == (0, 8, [])
    kv.validate([])
    kv.close()


def test_a_machine_without_memory_is_short_and_changes_nothing() -> None:
    class Exhausted(NullVm):
        def populate(self, pages: Sequence[int]) -> Short | None:
            return Short(len(pages)) if len(pages) > 1 else None

    vm = Exhausted(PAGE, 8)
    pool = Pool(vm, 8)
    kv = KvCache(make_spec(), pool, vm)
    table = grown(kv, 4)
    assert kv.grow(table, 2 * 12) == Short(2, 8)
    kv.validate([table])
    assert kv.grow(table, 2 * 8) is None
    kv.validate([table])


def test_a_mapping_that_fails_changes_nothing() -> None:
    class Full(NullVm):
        full = False

        def map(self, range: Range, at: int, pages: Sequence[int], **how: bool) -> None:
            if self.full:
                raise DeviceError("mmap", "no")
            super().map(range, at, pages, **how)

    vm = Full(PAGE, 8)
    pool = Pool(vm, 8)
    kv = KvCache(make_spec(head_dim=48), pool, vm)
    assert kv.layout.slab_pages == 3
    table = grown(kv, 1)
    vm.full = True
    with pytest.raises(DeviceError):
        kv.grow(table, 2 * 2)
    vm.full = False
    kv.validate([table])
    assert pool.free == 5
    assert kv.grow(table, 2 * 2) is None
    assert [kv.book.backing.page_at(b * kv.layout.stride_bytes) for b in table] == [0, 3]


def test_blocks_are_found_in_the_window_by_the_numbers_of_their_pages() -> None:
    vm = MemfdVm(16 * KiB, 8)
    pool = Pool(vm, 8)
    kv = KvCache(make_spec(head_dim=256), pool, vm)
    assert pool.allocate("weights", 3) == (0, 1, 2)
    before = count_mappings()
    table = grown(kv, 20)
    size = kv.layout.blocks_per_slab
    assert (kv.layout.slab_pages, size, kv.base) == (1, 4, vm.window.base)
    assert {block // size for block in table} == {3, 4, 5, 6, 7}
    for block in table:
        array_at(kv.block_address(block), (kv.layout.block_bytes,), "uint8")[:] = block
    # Another owner's mapping of the page shows what is there.
    weights = vm.reserve(16 * KiB)
    vm.map(weights, 0, [table[0] // size], alias=True)
    at = table[0] % size * kv.layout.stride_bytes
    assert array_at(weights.base + at, (1,), "uint8")[0] == table[0]
    assert kv.book.backing.os_backed() == kv.pages == 5
    vm.unmap(weights, 0, 1)
    vm.release(weights)
    kv.free(table)
    assert (kv.pages, kv.book.backing.os_backed(), count_mappings()) == (0, 0, before)
    kv.validate([])
    vm.close()


def test_freeing_twice_is_a_broken_promise() -> None:
    kv, _ = make()
    table = grown(kv, 1)
    kv.free(table)
    with pytest.raises(BrokenPromise, match="nobody uses it"):
        kv.free(table)


def test_validate_sees_a_table_that_is_not_counted() -> None:
    kv, _ = make()
    table = grown(kv, 2)
    with pytest.raises(BrokenPromise, match="references"):
        kv.validate([table, table])


def test_a_pool_smaller_than_a_slab_is_short_for_ever() -> None:
    kv, _ = make(2, head_dim=12)
    table: list[int] = []
    assert kv.grow(table, 1) == Short(3, 1)
    kv.validate([table])


def test_a_scrub_forgets_what_a_tenant_has_cached_and_nobody_uses() -> None:
    kv, pool = make()
    for first, tenant in ((1, "me"), (2, "they"), (3, "me")):
        table = grown(kv, 3)
        kv.remember([first, *TOKENS[:6]], table, 6, tenant=tenant)
        if first < 3:
            kv.free(table)
    assert kv.prefixes.scrub("me") == 3
    kv.validate([table])
    assert [len(kv.prefixes.find([first, *TOKENS[:6]], "")) for first in (1, 2, 3)] == [0, 3, 3]
    kv.free(table)
    assert kv.prefixes.scrub(None) == 6
    assert pool.free == pool.total
    kv.validate([])
