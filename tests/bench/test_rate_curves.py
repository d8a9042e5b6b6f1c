"""Rates at which a target is met, and their ratios, as `fleet` reports them."""

from __future__ import annotations

import pytest

from ballast.core.request import Precedence
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.clairvoyant import HORIZON, Future
from benchmarks.fleet import (
    COMPARED_PRESETS,
    TARGET,
    Climb,
    brought_to,
    equal_rows,
    folded,
    rows_of,
    summary,
)
from benchmarks.rate_curves import RATES, Curve, curve, ratios
from tests.policy.compute.test_deadline import COSTS, NOW, decode, prompt, work


def test_a_rate_lies_between_the_last_that_meets_the_target_and_the_next() -> None:
    c = Curve({0.5: 1.0, 1.0: 1.0, 2.0: 0.98, 4.0: 0.5})
    assert c.rate_at(0.99) == pytest.approx(2**0.5)
    assert c.rate_at(0.98) == 2.0
    assert c.rate_at(0.5) == 4.0
    assert Curve({0.5: 0.9}).rate_at(0.99) == 0.0
    assert Curve({}).rate_at(0.99) == 0.0


def test_a_rate_above_one_that_misses_does_not_count() -> None:
    assert Curve({1.0: 1.0, 2.0: 0.9, 4.0: 1.0}).rate_at(0.99) == pytest.approx(2**0.1)


def test_a_curve_ends_where_it_is_hopeless() -> None:
    asked: list[float] = []

    def attainment(rate: float) -> float:
        asked.append(rate)
        return 1.0 if rate < 1.0 else 0.2

    assert curve(attainment).rate_at(0.99) < 1.0
    assert asked == [r for r in RATES if r < 1.0] + [r for r in RATES if r >= 1.0][:2]


@pytest.mark.parametrize("highest", [0.0, 0.3, 0.5, 1.1, 3.0, 50.0])
@pytest.mark.parametrize("expected", [0.0, 0.4, 1.0, 9.0, 60.0])
def test_a_climb_finds_what_a_whole_curve_would(highest: float, expected: float) -> None:
    climb = Climb(expected, TARGET)
    while (rate := climb.next_rate) is not None:
        assert rate not in climb.attained
        climb.saw(1.0 if rate <= highest else 0.5)
    whole = Curve({rate: 1.0 if rate <= highest else 0.5 for rate in RATES})
    assert Curve(climb.attained).rate_at(TARGET) == whole.rate_at(TARGET)


def test_ratios_say_what_they_are_bounds_of() -> None:
    """No bound is averaged, and one against the first side is not hidden."""
    of = {"a": 2.0, "b": 1.0, "c": 0.0, "d": 8.0, "e": 1.5}
    over = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 8.0, "e": 3.0}
    found = ratios(of, over, lowest=0.25, highest=8.0)
    assert found.by_case == {"a": 2.0, "e": 0.5}
    assert found.edges == {
        "b": "at least 4.00",
        "c": "both missed at the lowest rate",
        "d": "both met at the highest rate",
    }
    assert found.mean == pytest.approx(1.0)
    assert found.worst == 0.5
    lost = ratios({"a": 0.0, "b": 3.0}, {"a": 1.0, "b": 1.0})
    assert lost.mean == pytest.approx(3.0)
    assert (lost.worst, lost.edges) == (0.0, {"a": "at most 0.25"})
    assert ratios({"a": 0.0}, {"a": 0.0}).mean is None


def test_every_preset_has_both_orders_and_its_better_one_counts() -> None:
    for preset in COMPARED_PRESETS:
        assert [resolve(row).order for row in rows_of(preset)] == ["round-robin", "deadline"]
    slow, fast = Curve({1.0: 1.0, 2.0: 0.0}), Curve({1.0: 1.0, 2.0: 1.0, 4.0: 0.0})
    for better in rows_of("swap"):
        presets = (*COMPARED_PRESETS, "ceiling")
        rows = [*(row for preset in presets for row in rows_of(preset)), "bound"]
        curves = {row: {"a": fast if row == better else slow} for row in rows}
        found = summary(curves, 0.99)["balloon_over_swap"]
        assert found.mean == pytest.approx(slow.rate_at(0.99) / fast.rate_at(0.99))
        assert "of_bound" in summary(curves, 0.99)
        some = {row: curves[row] for p in ("balloon", "swap") for row in rows_of(p)}
        assert summary(some, 0.99) == {"balloon_over_swap": found}
        equal = summary(curves, 0.99, equal_rows)["balloon_over_swap"]
        assert equal.mean == (found.mean if better == "swap+deadline" else pytest.approx(1.0))


def requests(n: int) -> Workload:
    found = (
        WorkloadRequest(
            id=i, at=3.0 * i, model=f"m{i % 3}", prompt_tokens=100 + i, output_tokens=50
        )
        for i in range(n)
    )
    return Workload.of("trace", found)


def test_a_trace_is_brought_to_a_rate_and_assigned_anew_by_seed() -> None:
    brought = brought_to(2.0, requests(1000))
    assert len(brought.requests) / brought.seconds == pytest.approx(2.0, rel=0.01)
    first, *others = folded(requests(30), ["x", "y", "z"], 6)
    assert all([r.at for r in w.requests] == [r.at for r in first.requests] for w in others)
    assert any(w.requests[0].model != first.requests[0].model for w in others)
    assert (first.requests[0].prompt_tokens, first.requests[0].output_tokens) == (50, 5)


def test_the_future_is_what_will_arrive_and_how_long_answers_are() -> None:
    workload = Workload.of(
        "now",
        [
            WorkloadRequest(id=i, at=at, model="a", prompt_tokens=100, output_tokens=7 + i)
            for i, at in enumerate((NOW - 1.0, NOW + 1.0, NOW + HORIZON + 1.0))
        ],
    )
    future = Future(workload, {"a": Slo(ttft=2.0, tpot=0.1)}, {"a": COSTS})
    (coming,) = future.coming(NOW)
    assert (coming.due, coming.steps) == (3.0, 1)
    assert coming.seconds == COSTS.prefill_seconds(100)
    there = decode(generated=3)._replace(order=Precedence(0, NOW - 1.0, 0))
    known = future.revealed(work("a", decodes=[there], prompts=[prompt(0, 9, 1.0)]))
    assert [d.outputs for d in known.decodes] == [7 - 3]
    assert [p.outputs for p in known.prompts] == [7]
