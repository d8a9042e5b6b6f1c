"""The benchmark of placements: its problems, and what is published of 50 of them."""

from __future__ import annotations

import pytest

from benchmarks import placement
from benchmarks.placement import by_pressure_before, large, published, small, solve


def test_problems_are_as_large_as_said_and_always_the_same() -> None:
    for seed in range(6):
        found = small(seed)
        assert 5 <= len(found.devices) <= 9
        assert len(found.claims) == 2 * len(found.devices)
        assert all(bool(c.devices) == bool(seed % 2) for c in found.claims)
        assert found == small(seed)
    found = large(1)
    assert (len(found.devices), len(found.claims)) == (32, 58)
    assert sorted({c.parts for c in found.claims}) in ([1, 4], [1, 8], [1, 4, 8])


def test_the_published_score_of_algorithm_1_is_that_of_the_pressure_before() -> None:
    problems = published(50)
    before = [by_pressure_before(p) for p in problems]
    assert 1 / (sum(before) / 50) == pytest.approx(20.89, abs=0.005)
    claims, devices = problems[0].claims, problems[0].devices
    assert len(claims) == 2 * len(devices)


def test_what_is_told_of_a_problem_is_true() -> None:
    solved = solve(small(1))
    assert 0 <= solved.ours <= solved.greedy
    result = placement.summary("small", [solved, solved])
    assert result["small_gap"] == solved.ours
    assert result["greedy_small_gap"] == solved.greedy
    assert result["small_seconds_max"] == solved.seconds
    scored = placement.scores(published(4))
    assert scored["published_score"] >= scored["published_score_greedy"]
