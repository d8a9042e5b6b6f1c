"""Estimates: when the next request comes, and how often what is cached is used again."""

from __future__ import annotations

import math
import random

import pytest

from ballast.core.estimates import Gaps, Reuse


def seen(gaps: list[float]) -> Gaps:
    found = Gaps()
    for gap in gaps:
        found = found.and_one(gap)
    return found


def test_without_gaps_arrivals_are_as_of_the_rate() -> None:
    assert Gaps().chance(5.0, 1.0, 0.0) == 0.0
    assert Gaps().chance(3.0, 1.0, 1.0) == pytest.approx(1.0 - math.exp(-1.0))


def test_poisson_arrivals_do_not_remember() -> None:
    rng = random.Random(1)
    found = seen([rng.expovariate(0.5) for _ in range(1000)])
    for age in (0.0, 1.0, 3.0):
        assert found.chance(age, 2.0, 0.5) == pytest.approx(0.63, abs=0.15)


def test_a_burst_that_is_over_is_over() -> None:
    """Gaps of 0.2 s within bursts, of a minute between them."""
    found = seen(([0.2] * 20 + [60.0]) * 10)
    assert found.chance(0.0, 1.0, 0.3) > 0.8
    assert found.chance(2.0, 1.0, 0.3) < 0.2


def test_periodic_arrivals_are_expected_at_their_period() -> None:
    found = seen([10.0] * 100)
    assert found.chance(1.0, 2.0, 0.1) < 0.1
    assert found.chance(9.0, 3.0, 0.1) > 0.7


def test_chances_are_probabilities_that_grow_with_the_horizon() -> None:
    rng = random.Random(2)
    found = seen([rng.paretovariate(1.1) for _ in range(300)])
    for age in (0.0, 0.5, 5.0, 50.0, 1000.0):
        chances = [found.chance(age, s, 0.2) for s in (0.1, 1.0, 10.0, 100.0)]
        assert chances == sorted(chances)
        assert chances[0] >= 0.0
        assert chances[-1] <= 1.0


def test_reuse_follows_what_prompts_find() -> None:
    assert Reuse().times(0.05) == 0.05
    never, often = Reuse(), Reuse()
    for _ in range(50):
        never, often = never.and_one(100, 0), often.and_one(100, 90)
    assert never.times(0.05) == 0.0
    assert often.times(0.05) == 1.0
    assert 0.1 < Reuse().and_one(100, 25).times(0.05) < 0.5
