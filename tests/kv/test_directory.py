"""The directory of KV blocks over tiers: what is found, what makes way, what is scrubbed."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.kv_tiers import KvTierSettings
from ballast.kv.directory import BlockDirectory, Tier, TierSettings
from ballast.kv.host_store import HostStore
from ballast.kv.tier_shelf import KvBlock
from ballast.kv.tiered_store import TieredStore
from ballast.memory.cell_book import CELL_BYTES, CellBook
from tests.effort import tries

MODEL = "finger:float32:2x2x16x1x8:"


def chain(label: str, n: int, tenant: str = "", model: str = MODEL) -> list[KvBlock]:
    blocks, parent = list[KvBlock](), b""
    for i in range(n):
        name = hashlib.sha256(f"{label}{i}".encode()).digest()
        blocks.append(KvBlock(name, parent, CELL_BYTES, model, tenant, 1.0))
        parent = name
    return blocks


def names(blocks: list[KvBlock]) -> list[bytes]:
    return [b.name for b in blocks]


def store_of(blocks: int) -> HostStore:
    """A store without memory, as in virtual time."""
    tier = TierSettings(blocks * CELL_BYTES, unit=CELL_BYTES)
    return HostStore(BlockDirectory({Tier.HOST: tier}), CellBook(blocks))


def memory_only(n_bytes: int) -> TieredStore:
    """A store with memory and no disk."""
    settings = KvTierSettings(host_bytes=n_bytes)
    return TieredStore.create(settings, lambda call: call(), threaded=False)


def put(store: HostStore, blocks: list[KvBlock], owner: str = "w") -> int:
    """Store blocks as a worker does; return how many found room."""
    n = 0
    for block in blocks:
        (cells,) = store.reserve(owner, [block])
        if cells is not None:
            store.land(owner, block.name, 7)
            n += 1
    return n


def found(store: HostStore, blocks: list[KvBlock]) -> int:
    return len(store.look_up(MODEL, names(blocks)).partition("-")[0])


def test_a_copy_is_listed_when_it_has_landed() -> None:
    store, blocks = store_of(8), chain("a", 3)
    cells = store.reserve("w", blocks)
    assert None not in cells
    assert store.look_up(MODEL, names(blocks)) == ""
    assert store.reserve("other", blocks) == [None] * 3
    store.land("w", blocks[0].name, 1)
    store.land("w", blocks[2].name, 1)
    store.abandon("w", blocks[1].name)
    assert store.look_up(MODEL, names(blocks)) == "h-h"
    assert store.look_up(f"{MODEL}adapter", names(blocks)) == ""
    assert len(store.fetch("w", MODEL, names(blocks))) == 1
    store.validate()


def test_an_owner_that_dies_leaves_no_lock() -> None:
    store, old, new = store_of(4), chain("a", 2), chain("b", 4)
    put(store, old)
    store.fetch("reader", MODEL, names(old))
    store.reserve("writer", chain("c", 2))
    assert store.reserve("w", new) == [None] * 4, "all is in use"
    store.end("writer")
    store.end("reader")
    assert put(store, new) == 4
    store.validate()


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    store, old = store_of(6), chain("a", 6)
    put(store, old)
    assert put(store, chain("b", 2)) == 2
    assert found(store, old) == 4
    assert put(store, chain("c", 7)) == 6, "a chain that is too long keeps its beginning"
    assert found(store, chain("c", 7)) == 6
    store.validate()


def test_prefixes_used_once_do_not_flush_those_used_often() -> None:
    store, often = store_of(20), chain("often", 8)
    put(store, often)
    assert found(store, often) == 8
    for i in range(50):
        assert put(store, chain(f"once{i}", 5)) == 5
    assert found(store, often) == 8
    # What has come back after it made way is kept from then on.
    back = chain("once40", 5)
    put(store, back)
    for i in range(50, 60):
        put(store, chain(f"once{i}", 5))
    assert found(store, back) == 5
    store.validate()


def test_what_is_never_used_again_makes_way_in_the_end() -> None:
    store, was = store_of(10), chain("was", 8)
    put(store, was)
    found(store, was)
    for i in range(6):
        blocks = chain(f"now{i}", 4)
        put(store, blocks)
        found(store, blocks)
    assert found(store, was) == 0


def test_a_tenant_takes_no_more_than_its_share_of_others() -> None:
    store, mine = store_of(20), chain("mine", 8, "me")
    put(store, mine)
    for i in range(30):
        put(store, chain(f"flood{i}", 4, "flooder"))
    assert found(store, mine) == 8
    sizes = store.directory.shelves[Tier.HOST].bytes_of()
    assert sizes["me"] == 8 * CELL_BYTES
    put(store, chain("more", 8, "me"))
    assert store.directory.shelves[Tier.HOST].bytes_of()["me"] == 10 * CELL_BYTES
    store.validate()


def test_scrubbing_leaves_nothing_even_of_what_is_in_use() -> None:
    store = store_of(12)
    one, two = chain("a", 4, "one"), chain("b", 4, "two", "other:float32:1:adapter")
    put(store, one)
    put(store, two)
    store.fetch("w", MODEL, names(one)[:2])
    assert store.scrub(tenant="one") == 4
    assert found(store, one) == 0
    assert store.cells.used == 6, "two are still read"
    store.release("w", names(one)[:2])
    assert store.scrub(model="adapter") == 4
    assert store.cells.used == 0
    assert put(store, one) == 4
    assert store.scrub(model="finger") == 4
    store.validate()


def test_what_costs_less_to_compute_is_not_stored() -> None:
    directory = BlockDirectory({Tier.HOST: TierSettings(10**9, bytes_per_second=CELL_BYTES / 2)})
    (block,) = chain("a", 1)
    assert not directory.demote(block, Tier.HOST).room
    slow = KvBlock(block.name, b"", CELL_BYTES, MODEL, seconds=3.0)
    assert directory.demote(slow, Tier.HOST).room


def test_chains_span_tiers() -> None:
    tiers = {Tier.HOST: TierSettings(10**6), Tier.DISK: TierSettings(10**7)}
    directory, blocks = BlockDirectory(tiers), chain("a", 4)
    for block, tier in zip(blocks, (Tier.HOST, Tier.DISK, Tier.DISK, Tier.HOST), strict=True):
        assert directory.demote(block, tier).room
        directory.land(block.name, tier, 5)
    assert directory.look_up(MODEL, names(blocks)) == "hddh"
    assert list(directory.stage(MODEL, names(blocks), Tier.DISK)) == blocks[1:3]
    assert directory.demote(blocks[1], Tier.HOST).room
    directory.land(blocks[1].name, Tier.HOST, 5)
    assert directory.look_up(MODEL, names(blocks)) == "hhdh"
    assert directory.drop(blocks[1].name, Tier.HOST)
    assert directory.look_up(MODEL, names(blocks)) == "hddh"
    directory.validate()


@settings(max_examples=tries(25, all=60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(1, 7)), max_size=60))
def test_no_cell_is_lost_whatever_happens(steps: list[tuple[int, int, int]]) -> None:
    store = store_of(9)
    reserved: list[tuple[str, bytes]] = []
    fetched: list[tuple[str, list[bytes]]] = []
    for kind, which, n in steps:
        owner = f"w{which % 2}"
        blocks = chain(f"c{which}", n, f"t{which % 3}")
        if kind == 0:
            cells = store.reserve(owner, blocks)
            reserved += [(owner, b.name) for b, c in zip(blocks, cells, strict=True) if c]
        elif kind == 1 and reserved:
            who, name = reserved.pop(which % len(reserved))
            store.land(who, name, n)
        elif kind == 2 and reserved:
            who, name = reserved.pop(which % len(reserved))
            store.abandon(who, name)
        elif kind == 3:
            slots = store.fetch(owner, MODEL, names(blocks))
            fetched.append((owner, names(blocks)[: len(slots)]))
        elif kind == 4 and fetched:
            who, gone = fetched.pop(which % len(fetched))
            store.release(who, gone, gone[0] if gone and n == 7 else b"")
        elif kind == 5:
            store.scrub(tenant=f"t{which % 3}")
        elif kind == 6 and n == 7:
            store.end(owner)
            reserved = [(w, name) for w, name in reserved if w != owner]
            fetched = [(w, gone) for w, gone in fetched if w != owner]
        store.validate()
    for owner in ("w0", "w1"):
        store.end(owner)
    store.scrub()
    assert store.cells.used == 0
    store.validate()


def test_names_of_two_fine_tunes_differ() -> None:
    """`spec.fingerprint` covers the bytes of the weights (`weights.checkpoint`), so chains do."""
    from ballast.kv.prefix import PrefixIndex

    a, b = PrefixIndex("one", 4), PrefixIndex("two", 4)
    tokens = list(range(9))
    assert not set(a.chain(tokens, "")) & set(b.chain(tokens, ""))
    assert not set(a.chain(tokens, "")) & set(a.chain(tokens, "key:x"))
    named = a.name(tokens, [5, 6, 7], 2, "")
    assert [n.name for n in named] == a.chain(tokens, "")
    assert [n.parent for n in named] == [b"", named[0].name]
