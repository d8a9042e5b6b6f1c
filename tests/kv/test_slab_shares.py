"""Under pressure a key loses the cached prefixes beyond its share before others lose any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.request import Precedence
from ballast.kv.blocks import KvCache
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.offers import cached_prefixes
from tests.kv.test_blocks import make
from tests.policy import worlds

ONE_A_PAGE, FOUR_A_PAGE = 16, 4


def cached(kv: KvCache, tenant: str, first: int, n_blocks: int = 1) -> list[int]:
    """Leave blocks of a tenant cached and unused; returns their tokens and one more."""
    tokens = [first, *range(2 * n_blocks)]
    table: list[int] = []
    assert kv.grow(table, 2 * n_blocks) is None
    kv.remember(tokens, table, 2 * n_blocks, tenant, tenant)
    kv.free(table)
    return tokens


def held(kv: KvCache, tenant: str, prompts: list[list[int]]) -> int:
    return sum(bool(kv.prefixes.find(tokens, tenant)) for tokens in prompts)


@pytest.mark.parametrize("head_dim", [ONE_A_PAGE, FOUR_A_PAGE])
def test_a_flood_leaves_others_their_share(head_dim: int) -> None:
    kv, _ = make(8, head_dim=head_dim)
    per_page = kv.layout.blocks_per_slab
    mine = [cached(kv, "one", n, per_page) for n in range(3)]
    for n in range(100, 150):
        cached(kv, "flood", n, per_page)
    assert held(kv, "one", mine) == 3, "the oldest of all, and less than half"
    assert kv.counts.cached_pages_of == {"one": 3, "flood": 5}
    kv.validate([])
    assert kv.prefixes.drop(2) == 2
    assert kv.counts.cached_pages_of == {"one": 3, "flood": 3}
    assert kv.prefixes.drop(2) == 2
    assert kv.counts.cached_pages_of == {"one": 2, "flood": 2}
    assert held(kv, "one", mine) == 2
    kv.validate([])


def test_beyond_its_share_a_key_loses_its_oldest_first() -> None:
    kv, _ = make(8, head_dim=ONE_A_PAGE)
    mine = [cached(kv, "one", n) for n in range(8)]
    for n in range(100, 150):
        cached(kv, "flood", n)
    assert [bool(kv.prefixes.find(tokens, "one")) for tokens in mine] == [False] * 4 + [True] * 4
    assert kv.counts.cached_pages_of == {"one": 4, "flood": 4}


def test_without_keys_the_least_recently_used_goes() -> None:
    kv, _ = make(8, head_dim=ONE_A_PAGE)
    prompts = [cached(kv, "", n) for n in range(8)]
    kv.free(kv.match(prompts[0], ""))
    kv.prefixes.drop(2)
    found = [bool(kv.prefixes.find(tokens)) for tokens in prompts]
    assert found == [True, False, False, *[True] * 5]


def test_what_a_request_reuses_is_spared_whoever_is_over() -> None:
    kv, _ = make(8, head_dim=ONE_A_PAGE)
    prompts = [cached(kv, "flood", n) for n in range(5)]
    cached(kv, "one", 100)
    kv.prefixes.drop(3, spare=kv.prefixes.find(prompts[0], "flood"))
    found = [bool(kv.prefixes.find(tokens, "flood")) for tokens in prompts]
    assert found == [True, False, False, False, True]


@given(
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=80),
    drop=st.integers(0, 8),
)
def test_nobody_within_a_share_loses_to_one_beyond(asked: list[tuple[str, int]], drop: int) -> None:
    kv, _ = make(8, head_dim=ONE_A_PAGE)
    for tenant, n in asked:
        before = kv.counts.cached_pages_of
        full = kv.counts.cached_pages == 8
        cached(kv, tenant, n)
        kv.validate([])
        for other, pages in before.items():
            lost = pages - kv.counts.cached_pages_of.get(other, 0)
            assert lost <= 0 or (full and pages == max(before.values())), (before, tenant)
    before = kv.counts.cached_pages_of
    kv.prefixes.drop(drop)
    kv.validate([])
    left = kv.counts.cached_pages_of
    lost = {t: n - left.get(t, 0) for t, n in before.items()}
    assert sum(lost.values()) == min(drop, sum(before.values()))
    for tenant, n in lost.items():
        assert n == 0 or all(left.get(tenant, 0) + 1 >= left.get(o, 0) for o in before)


def test_models_with_prefixes_of_a_key_that_is_over_are_offered_first() -> None:
    flooded = replace(worlds.model("flooded"), last_used=9.0, cached_pages=30)
    quiet = replace(worlds.model("quiet"), last_used=1.0, cached_pages=5)
    claim = Claim("quiet", Precedence(0, 0.0, 1), 3, may_preempt=False)

    def order(of_flooded: dict[str, int], of_quiet: dict[str, int]) -> list[str]:
        models = (
            replace(flooded, cached_of=tuple(of_flooded.items())),
            replace(quiet, cached_of=tuple(of_quiet.items())),
        )
        view = worlds.device(*models, now=10.0, free=0)
        return [offer.owner for offer in cached_prefixes(view, claim)]

    assert order({"": 30}, {"": 5}) == ["quiet", "flooded"]
    assert order({"flood": 30}, {"one": 5}) == ["flooded", "quiet"]
    assert order({"flood": 12, "one": 18}, {"two": 5}) == ["flooded", "quiet"]
    assert order({"flood": 5, "one": 25}, {"flood": 5}) == ["flooded", "quiet"]
