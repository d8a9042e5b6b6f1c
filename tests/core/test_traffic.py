"""Rates and lengths against their definitions, computed over all that happened."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import Traffic
from ballast.core.traffic import (
    LEAST_SECONDS,
    LENGTHS_WEIGHT,
    PRIOR_OUTPUT,
    WINDOW,
    Arrivals,
    Lengths,
    TrafficStats,
)

times = st.lists(st.floats(0, 1000), max_size=30)


@given(times, st.floats(0, 500))
def test_a_rate_is_decayed_arrivals_over_decayed_time(ats: list[float], later: float) -> None:
    seen = TrafficStats.since(0.0)
    for at in ats:
        seen = seen.arrived(at)
    now = max(ats, default=0.0) + later
    weight = sum(math.exp((at - now) / WINDOW) for at in ats)
    seconds = max(LEAST_SECONDS, WINDOW * (1 - math.exp(-now / WINDOW)))
    assert seen.arrivals.per_second(now) == pytest.approx(weight / seconds, rel=1e-9)


@pytest.mark.parametrize("seconds", [5, 60, 600])
def test_a_steady_rate_is_found_early_and_late(seconds: int) -> None:
    seen = TrafficStats.since(100.0)
    for i in range(4 * seconds):
        seen = seen.arrived(100.0 + (i + 0.5) / 4)
    assert seen.arrivals.per_second(100.0 + seconds) == pytest.approx(4.0, rel=1e-3)


def test_a_rate_falls_while_nothing_arrives() -> None:
    seen = Arrivals(0.0, 0.0, -1e6).and_one(0.0)
    now, later = (seen.per_second(t) for t in (1.0, 1.0 + WINDOW))
    assert now == pytest.approx(math.exp(-1 / WINDOW) / WINDOW)
    assert later == pytest.approx(now / math.e)


def test_the_first_arrival_is_no_burst() -> None:
    assert TrafficStats.since(3.0).arrived(3.0).arrivals.per_second(3.0) == 1 / LEAST_SECONDS


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40))
def test_lengths_are_weighted_averages(lengths: list[int]) -> None:
    seen = Lengths()
    for n in lengths:
        seen = seen.and_one(n)
    weights = list[float]()
    for i in range(len(lengths)):
        latest = max(LENGTHS_WEIGHT, 1 / (i + 1))
        weights = [*(w * (1 - latest) for w in weights), latest]
    mean = sum(a * n for a, n in zip(weights, lengths, strict=True))
    variance = sum(a * (n - mean) ** 2 for a, n in zip(weights, lengths, strict=True))
    assert seen.n == len(lengths)
    assert seen.mean == pytest.approx(mean)
    assert seen.variance == pytest.approx(variance, abs=1e-6)
    assert seen.spread == pytest.approx(math.sqrt(variance), abs=1e-3)


def test_what_has_been_seen_is_what_is_expected() -> None:
    seen = TrafficStats.since(0.0).ended(prompt=50, output=40)
    assert seen.expected(9.0) == Traffic(0.0, 50.0, 40.0)
    seen = seen.arrived(9.0)
    assert seen.expected(9.0).rate == seen.arrivals.per_second(9.0) > 0


def test_traffic_of_two_adds_up() -> None:
    a, b = Traffic(1.0, 100.0, 10.0), Traffic(3.0, 300.0, 50.0)
    assert a + b == b + a == Traffic(4.0, 250.0, 40.0)
    assert Traffic() + Traffic() == Traffic()
    assert a + Traffic() == a


def test_a_usual_length_is_expected_until_requests_have_ended() -> None:
    """Whatever bound a client gives: many give none."""
    seen = TrafficStats()
    assert [seen.expected_outputs(left) for left in (8000, 300, 40)] == [PRIOR_OUTPUT] * 2 + [40]
    seen = seen.ended(prompt=50, output=40)
    assert (seen.prompts.mean, seen.outputs.mean) == (50.0, 40.0)
    assert 40 < seen.expected_outputs(300) < PRIOR_OUTPUT
    for _ in range(400):
        seen = seen.ended(prompt=50, output=40)
    assert [seen.expected_outputs(left) for left in (300, 40, 7, 0)] == [41, 40, 7, 1]


def test_lengths_count_what_has_not_ended() -> None:
    """Of many requests the short ones end first: their mean alone is too low."""
    seen = TrafficStats()
    for _ in range(500):
        seen = seen.ended(prompt=50, output=40)
    assert seen.expected_outputs(1000) == 41
    assert seen.expected_outputs(1000, unended=80_000) == 200
    assert seen.expected_outputs(100, unended=80_000) == 100


def test_the_first_answer_that_ended_says_no_more_than_the_others() -> None:
    """It was a short one: of answers that began together the short ones end first."""
    seen = TrafficStats().ended(prompt=50, output=1)
    for _ in range(19):
        seen = seen.ended(prompt=50, output=400)
    assert seen.outputs.mean == pytest.approx(400 * 19 / 20, rel=0.01)
