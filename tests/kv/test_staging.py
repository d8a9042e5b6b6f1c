"""Blocks in use move to the host and back with jobs: nothing is lost, and the books stay right."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.actions import Short
from ballast.kv.blocks import KvCache
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from tests.kv.test_blocks import PAGE, grown, make_spec


def made(pages: int = 8, host_blocks: int = 40) -> tuple[KvCache, Pool]:
    vm = NullVm(4 * PAGE, pages)
    pool = Pool(vm, pages)
    kv = KvCache(replace(make_spec(), n_layers=4), pool, vm, host_blocks=host_blocks)
    assert kv.layout.blocks_per_slab > 1
    return kv, pool


def staged(kv: KvCache, table: list[int], n: int) -> None:
    kv.staging.begin_moves(table[:n], ())
    kv.validate([table])
    assert kv.staging.end_moves([table], done=True)


def test_staged_blocks_give_up_their_pages_but_for_slots_and_come_home() -> None:
    kv, pool = made()
    table = grown(kv, 6 * kv.layout.blocks_per_slab)
    before, n = kv.pages, 4 * kv.layout.blocks_per_slab
    staged(kv, table, n)
    assert [block < 0 for block in table] == [True] * n + [False] * (len(table) - n)
    assert kv.pages == before - 4 + kv.staged.pages_for(n)
    kv.staging.begin_moves((), table[:n])
    assert kv.staging.end_moves([table], done=True)
    assert min(table) >= 0
    assert kv.pages == before
    kv.validate([table])
    kv.free(table)
    assert (kv.pages, pool.ledger.owned(kv.owner)) == (0, 0)


def test_a_job_that_fails_leaves_all_blocks_where_they_were() -> None:
    kv, _ = made()
    table = grown(kv, 6 * kv.layout.blocks_per_slab)
    staged(kv, table, 4)
    before, pages = list(table), kv.pages
    moves = kv.staging.begin_moves(table[4:8], table[:2])
    assert len(moves.stores) == 4
    assert len(moves.homes) == 2
    kv.validate([table])
    assert not kv.staging.end_moves([table], done=False)
    assert (table, kv.pages, len(kv.staged)) == (before, pages, 4)
    kv.validate([table])


def test_blocks_without_pages_for_their_slots_stay() -> None:
    """One block of each slab frees no page."""
    kv, pool = made()
    size = kv.layout.blocks_per_slab
    table = grown(kv, 8 * size)
    assert pool.free == 0
    before = list(table)
    kv.staging.begin_moves(table[::size], ())
    assert not kv.staging.end_moves([table], done=True)
    assert (table, len(kv.staged)) == (before, 0)
    kv.validate([table])


def test_the_host_takes_no_more_than_it_has_room_for() -> None:
    kv, _ = made(host_blocks=3)
    table = grown(kv, 4 * kv.layout.blocks_per_slab)
    assert len(kv.staging.begin_moves(table[:8], ()).stores) == 3
    kv.staging.end_moves([table], done=True)
    assert sum(block < 0 for block in table) == 3
    kv.validate([table])


def test_a_shared_prefix_is_staged_once_and_found_on_the_host() -> None:
    kv, _ = made()
    size = kv.spec.block_tokens
    tokens = list(range(10 * size))
    first: list[int] = []
    assert kv.grow(first, len(tokens)) is None
    kv.remember(tokens, first, len(tokens))
    second = kv.match(tokens)
    kv.staging.begin_moves(first[:6], ())
    kv.validate([first, second])
    assert kv.staging.end_moves([first, second], done=True)
    assert first[:6] == second[:6]
    assert max(first[:6]) < 0
    third = kv.admit(len(tokens), tokens)
    assert not isinstance(third, Short)
    assert third[0][:6] == first[:6]
    tables = [first, second, third[0]]
    kv.validate(tables)
    for table in tables:
        kv.free(table)
    assert kv.prefixes.find(tokens) == [], "the chain's beginning went with its last user"
    kv.validate([])
