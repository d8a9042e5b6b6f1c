"""How likely cached blocks are used again is learned from those that were, by their age."""

from __future__ import annotations

import pytest

from ballast.core.actions import Short
from ballast.kv.survival import PARTS, Survival
from tests.kv.test_blocks import cached, make


def test_nothing_is_known_before_a_block_was_used_again_or_dropped() -> None:
    kv, _ = make(6)
    cached(kv, 5, 4)
    assert kv.counts.cached_chances() == ()


def test_blocks_that_are_used_while_young_are_dead_when_they_are_old() -> None:
    survival = Survival()
    for _ in range(200):
        survival.now += 4
        survival.used(survival.now - 4, 3)
        survival.dropped(survival.now - 1000, 1)
    chances = survival.chances(survival.now - 2000, survival.now, 100)()
    assert len(chances) == PARTS
    assert list(chances) == sorted(chances)
    assert chances[0] < 0.05
    (young, *_) = survival.chances(survival.now, survival.now, 1)()
    assert young == pytest.approx(0.75, abs=0.02), "three of four are used again"


def test_blocks_that_are_still_there_are_no_certain_hits() -> None:
    """Those that have been used again are all that has ended; many more still wait."""
    few, many = Survival(), Survival()
    for survival in (few, many):
        survival.now = 1000
        survival.used(990, 10)
    assert few.chances(900, 1000, 0)()[-1] > 0.9
    assert many.chances(900, 1000, 100)()[-1] < 0.2


def test_what_an_admission_finds_has_been_used_again_and_what_it_is_refused_has_not() -> None:
    kv, pool = make(8)
    tokens = cached(kv, 5, 4)
    held = pool.allocate("other", pool.free)
    assert not isinstance(held, Short)
    assert isinstance(kv.admit(100, tokens), Short)
    assert kv.counts.cached_chances() == ()
    pool.give_back("other", held)
    admitted = kv.admit(len(tokens), tokens)
    assert not isinstance(admitted, Short)
    kv.free(admitted[0])
    used = kv.counts.cached_chances()
    assert min(used) > 0.0
    kv.prefixes.drop(kv.counts.cached_pages)
    cached(kv, 5, 4)
    assert max(kv.counts.cached_chances()) < min(used), "some have been dropped in vain"
