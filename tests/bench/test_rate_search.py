"""The search for the highest rate, on functions whose answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ballast.bench.rate_search import RateSearch, bisect_max_rate, search_in_turns, searching
from ballast.core.errors import ConfigError


def step(limit: float) -> RateSearch:
    return bisect_max_rate(lambda r: 1.0 if r <= limit else 0.5, lo=1.0, hi=8.0, steps=8)


@pytest.mark.parametrize("limit", [1.0, 1.5, 3.0, 7.9, 12.0, 0.6])
def test_finds_a_step(limit: float) -> None:
    found = step(limit)
    assert found.rate <= limit
    assert found.failed_at is not None
    assert found.failed_at > limit
    assert found.failed_at / found.rate < 8 ** (1 / 200)


def test_goes_outside_the_bounds_but_not_for_ever() -> None:
    assert step(1000.0).failed_at is None
    assert step(1000.0).rate == 128.0
    assert len(step(1000.0).tried) == 6
    nothing = step(0.01)
    assert nothing.rate == 0.0
    assert nothing.failed_at == 1 / 16


def test_no_rate_is_run_twice() -> None:
    for limit in (0.6, 3.0, 20.0):
        rates = [rate for rate, _ in step(limit).tried]
        assert len(set(rates)) == len(rates)


@pytest.mark.parametrize("seed", range(30))
def test_noise_cannot_show_a_rate_that_did_not_pass(seed: int) -> None:
    rng = random.Random(seed)

    def run(rate: float) -> float:
        return min(1.0, 1.02 - 0.01 * rate + rng.uniform(-0.03, 0.03))

    found = bisect_max_rate(run, 0.99, lo=1.0, hi=6.0)
    outcome = dict(found.tried)
    if found.rate:
        assert outcome[found.rate] >= 0.99
    assert all(a >= 0.99 for rate, a in found.tried if rate <= found.rate)
    if found.failed_at is not None:
        assert outcome[found.failed_at] < 0.99
        assert not any(found.rate < rate < found.failed_at for rate in outcome)


@pytest.mark.parametrize(("lo", "hi"), [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, float("inf"))])
def test_bounds_are_checked(lo: float, hi: float) -> None:
    with pytest.raises(ConfigError, match="lo, hi"):
        bisect_max_rate(lambda _: 1.0, lo=lo, hi=hi)


def test_searches_in_turns_find_what_each_finds_alone() -> None:
    ran: list[str] = []

    def run(name: str, limit: float) -> Callable[[float], float]:
        def attained(rate: float) -> float:
            ran.append(name)
            return 1.0 if rate <= limit else 0.5

        return attained

    limits = {"a": 1.5, "b": 40.0, "c": 3.0}
    how = {"lo": 1.0, "hi": 8.0, "steps": 2, "widen": 4}
    found = search_in_turns({n: (run(n, x), searching(0.99, **how)) for n, x in limits.items()})  # type: ignore[arg-type]
    turns = ran.copy()
    alone = {n: bisect_max_rate(run(n, x), 0.99, **how) for n, x in limits.items()}  # type: ignore[arg-type]
    assert found == alone
    assert list(found) == list(limits)
    assert turns[:6] == ["a", "b", "c", "c", "b", "a"]
    assert sorted(turns) == sorted(ran[len(turns) :])
    assert turns[-1] == "b"
