"""The benchmark of MuxServe's estimate: what it knows of costs, and what it makes of its runs."""

from __future__ import annotations

import pytest

from ballast.core.job import JobLoad
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import facts
from benchmarks import mux_estimator
from benchmarks.mux_estimator import Result, costs_of, estimated, summary
from benchmarks.mux_sim import ENGINE, LANES


def test_costs_on_a_share_are_those_measured_there_and_between() -> None:
    (kind,) = parse_kinds("A100-80G", LANES, ENGINE)
    spec = facts("LLaMA-7b").spec(max_model_len=2048, fingerprint="7b")
    rows = kind.profile.on_parts(spec, 1)
    assert len(rows) > 2
    costs, step = costs_of(kind, spec), JobLoad(0, 0, 0, 8, 4000)
    assert costs(1, 1.0) == kind.costs(spec)
    for share, found in rows:
        assert costs(1, share).of(step) == pytest.approx(found.of(step))
    (low, a), (high, b) = rows[0], rows[1]
    between = costs(1, (low + high) / 2).of(step)
    assert min(a.of(step), b.of(step)) <= between <= max(a.of(step), b.of(step))
    assert costs(1, low / 2).of(step) == pytest.approx(2 * a.of(step))


def test_an_estimate_is_no_more_than_what_is_asked() -> None:
    for name, unit in mux_estimator.UNITS.items():
        (kind,) = parse_kinds(f"A100-80G:tp{unit.ranks}", LANES, ENGINE)
        low, high = (estimated(unit, kind, f, 100.0) for f in (0.5, 2.0))
        for model, e in low.estimates.items():
            assert e.rate > 0, name
            assert len(low.homes[model]) == unit.ranks
        assert low.throughput < high.throughput


def test_errors_are_of_all_models_and_rates() -> None:
    rows = [("a", 1.1, 1.0), ("b", 0.8, 1.0), ("c", 1.0, 1.0)]
    results = [Result("u", f, m, 2.0, e, s) for f in mux_estimator.FACTORS for m, e, s in rows]
    result = summary(results)
    assert result["estimator_error_median_pct"] == pytest.approx(10.0)
    assert result["estimator_error_worst_pct"] == pytest.approx(20.0)
    assert set(result["by_factor"]) == {"0.5", "1", "2"}


def test_a_unit_is_estimated_and_simulated() -> None:
    (found,) = mux_estimator.measure("7b on 1", 0.5, 12.0)
    assert found.asked > 0
    assert found.simulated > 0
    assert found.estimated == pytest.approx(found.asked)
