"""KV that lies layer by layer: layers share pages, and the books agree whatever happens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Short
from ballast.core.kv_swap import spread
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.blocks import KvCache
from ballast.kv.layered import LayeredLayout
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from tests.kv.test_blocks import make_spec

PAGE = 256
LAYERS = 6


def cache(pages: int, head_dim: int = 4) -> tuple[KvCache, Pool]:
    vm = NullVm(PAGE, pages)
    pool = Pool(vm, pages)
    spec = replace(make_spec(head_dim=head_dim), n_layers=LAYERS, block_tokens=4)
    return KvCache(spec, pool, vm, layered=True), pool


def test_blocks_of_a_layer_lie_side_by_side() -> None:
    kv, _ = cache(60)
    layout = kv.layout
    assert isinstance(layout, LayeredLayout)
    # 2 * 4 tokens * 4 elements * 4 bytes: two blocks to a page, in each of six layers.
    assert (layout.stride_bytes, layout.blocks_per_slab, layout.slab_pages) == (128, 2, LAYERS)
    assert layout.layer_stride_bytes % PAGE == 0
    assert kv.addresses.n_bytes == LAYERS * layout.layer_stride_bytes


def test_what_layers_give_up_holds_more_blocks() -> None:
    kv, pool = cache(24)
    table: list[int] = []
    assert kv.grow(table, 4 * 2 * 4) is None  # four slabs of six pages
    assert kv.grow(table, 4 * 2 * 4 + 1) == Short(6, 1)
    assert kv.turn(Rotation(spread(LAYERS, 5), 2))
    assert (kv.pages, pool.free, kv.layer_pages) == (12, 12, 4)
    assert kv.grow(table, 4 * 2 * 8) is None
    assert kv.grow(table, 4 * 2 * 8 + 1) == Short(3, 1)
    kv.validate([table])
    assert not kv.turn(WHOLE)  # there is no room for it
    kv.validate([table])
    kv.free(table[4:])
    assert kv.turn(Rotation(spread(LAYERS, 3), 1))
    kv.validate([table[:4]])
    kv.free(table[:4])
    kv.close()
    assert pool.free == pool.total


def test_pages_promised_to_a_cache_back_its_slots_as_well() -> None:
    kv, pool = cache(24)
    assert kv.turn(Rotation(spread(LAYERS, 5), 2))
    assert pool.promise(kv.owner, 6) is None
    others = pool.allocate("other", 18)
    assert not isinstance(others, Short)
    table: list[int] = []
    assert kv.grow(table, 4 * 2 * 3) == Short(9, 6), "more than is promised"
    assert (pool.ledger.promised_to(kv.owner), pool.ledger.promised) == (6, 6)
    assert kv.grow(table, 4 * 2 * 2) is None  # two slabs: a layer's page and two slots' each
    assert pool.ledger.promised == 0
    kv.validate([table])
    pool.validate()


def test_pages_promised_to_a_cache_back_the_slots_of_layers_that_come_home() -> None:
    """Fewer layers rotate, through more slots than before: one slot, which is new, has pages of its
    own, out of those that were promised for the change."""
    kv, pool = cache(24)
    assert kv.turn(Rotation(spread(LAYERS, 4), 1))
    table: list[int] = []
    assert kv.grow(table, 4 * 2 * 2) is None
    assert kv.pages == 6
    assert pool.promise(kv.owner, 4) is None
    others = pool.allocate("other", 14)
    assert not isinstance(others, Short)
    assert pool.free == 4, "all promised"
    assert kv.turn(Rotation(spread(LAYERS, 3), 2))
    assert (kv.pages, pool.free, pool.ledger.promised) == (10, 0, 0)
    kv.validate([table])
    pool.validate()


def test_slots_take_free_pages_before_those_promised_to_the_cache() -> None:
    kv, pool = cache(24)
    assert kv.turn(Rotation(spread(LAYERS, 4), 1))
    assert kv.grow([], 4 * 2 * 2) is None
    assert pool.promise(kv.owner, 4) is None
    assert kv.turn(Rotation(spread(LAYERS, 3), 2))
    assert pool.ledger.promised_to(kv.owner) == 2, "its layers took theirs of it, the slot none"
    pool.validate()


def test_what_is_cached_stays_while_the_cache_is_fixed() -> None:
    kv, _ = cache(24)
    tokens = list(range(9))
    table: list[int] = []
    kv.grow(table, 8)
    kv.remember(tokens, table, 8)
    kv.free(table)
    kv.fixed = True
    assert (kv.cached_pages, kv.drop_cached(6), kv.compact([], 6)) == (0, 0, 0)
    kv.fixed = False
    assert (kv.cached_pages, kv.drop_cached(6)) == (6, 6)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 40)),
        st.tuples(st.just("free"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("turn"), st.integers(0, LAYERS - 1), st.integers(1, 3)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
    ),
    max_size=30,
)


@given(steps=steps, pages=st.integers(1, 60), head_dim=st.sampled_from([2, 4, 12, 40]))
def test_books_agree_whatever_happens(
    steps: list[tuple[str, int, int]], pages: int, head_dim: int
) -> None:
    kv, pool = cache(pages, head_dim)
    tables: list[list[int]] = [[] for _ in range(4)]
    lengths = [0] * 4
    tokens = list(range(400))
    for what, n, more in steps:
        if what == "grow":
            short = kv.grow(tables[n], lengths[n] + more)
            if short is None:
                lengths[n] += more
                kv.remember(tokens, tables[n], lengths[n])
            else:
                assert short.pages > pool.free + kv.cached_pages
        elif what == "free":
            kv.free(tables[n])
            tables[n], lengths[n] = [], 0
        elif what == "turn":
            before = (kv.rotation, kv.pages, pool.free)
            wanted = Rotation(spread(LAYERS, n), more) if n > more else WHOLE
            if kv.turn(wanted):
                assert kv.rotation == wanted
                saved = wanted.n_freed * kv.layer_pages
                assert kv.pages + saved == LAYERS * kv.layer_pages
            else:
                assert (kv.rotation, kv.pages, pool.free) == before
        else:
            kv.drop_cached(n)
        kv.validate(tables)
        assert kv.pages + pool.free == pool.total
    for table in tables:
        kv.free(table)
    kv.close()
    assert pool.free == pool.total
