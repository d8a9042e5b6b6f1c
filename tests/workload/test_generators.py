"""Generated workloads have the statistics they promise, and only one form per seed."""

from __future__ import annotations

import numpy as np
import pytest

from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.generators import (
    gamma,
    independent,
    poisson,
    power_law,
    spread_models,
)
from ballast.workload.lengths import Constant, Empirical, LengthSampler, LogNormal
from ballast.workload.stats import gap_cv
from ballast.workload.workload import WorkloadError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def names(n: int) -> list[str]:
    return [f"m{i}" for i in range(n)]


def test_poisson_rate_and_cv() -> None:
    times = poisson(5.0, 4000.0, rng())
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gap_cv(times) == pytest.approx(1.0, abs=0.03)
    assert times[0] >= 0
    assert times[-1] < 4000


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gamma_rate_and_cv(cv: float) -> None:
    times = gamma(5.0, cv, 10_000.0, rng())
    assert len(times) == pytest.approx(50_000, rel=0.05)
    assert gap_cv(times) == pytest.approx(cv, rel=0.05, abs=0.01)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(("alpha", "share"), [(0.9, 0.5), (2.1, 0.9)])
def test_power_law_of_muxserve_with_19_models(alpha: float, share: float) -> None:
    shares = power_law(19, alpha)
    assert sum(shares) == pytest.approx(1.0)
    assert sum(shares[:4]) == pytest.approx(share, abs=0.05)
    assert list(shares) == sorted(shares, reverse=True)


def test_independent_follows_popularity() -> None:
    w = independent(names(4), 4.0, 2000.0, alpha=1.0, cv=2.0, seed=5)
    counts = [sum(r.model == m for r in w.requests) for m in names(4)]
    expected = [s * 8000 for s in power_law(4, 1.0)]
    assert counts == pytest.approx(expected, rel=0.2)
    assert w.stats().rate == pytest.approx(4.0, rel=0.1)


def test_same_seed_same_workload() -> None:
    def make(seed: int) -> object:
        return independent(names(3), 2.0, 100.0, seed=seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert bursty_groups(names(5), 900.0, seed=1) == bursty_groups(names(5), 900.0, seed=1)
    assert bursty_groups(names(5), 900.0, seed=1) != bursty_groups(names(5), 900.0, seed=2)


@pytest.mark.parametrize("bad", [(0.0, 10.0), (1.0, 0.0), (float("inf"), 1.0), (-1.0, 1.0)])
def test_no_arrivals_without_rate_and_time(bad: tuple[float, float]) -> None:
    with pytest.raises(WorkloadError, match="no arrivals"):
        poisson(*bad, rng())
    with pytest.raises(WorkloadError, match="no arrivals"):
        gamma(bad[0], 1.0, bad[1], rng())


@pytest.mark.parametrize("n", [16, 24, 58, 129])
@pytest.mark.parametrize("seed", [0, 1])
def test_bursty_groups_have_the_statistics_of_prism(n: int, seed: int) -> None:
    s = bursty_groups(names(n), 2 * 3600.0, seed=seed).stats()
    assert 0.23 <= s.active.share <= 0.50
    assert 54 <= s.active.switches_per_hour <= 766
    assert 40 <= s.idle_per_hour <= 100
    assert s.volatile > 0.5
    assert s.minute_cv > 1


def test_bursty_groups_have_a_head_and_a_tail() -> None:
    w = bursty_groups(names(24), 3600.0, seed=3)
    minutes = {m: {int(r.at // 120) for r in w.requests if r.model == m} for m in names(24)}
    assert all(len(minutes[m]) == 30 for m in names(6))
    tail = sorted(len(minutes[m]) for m in names(24)[6:])
    assert tail[len(tail) // 2] <= 15


def test_bursty_knobs_are_checked() -> None:
    with pytest.raises(WorkloadError, match="spell_seconds: 0"):
        BurstyGroups(spell_seconds=0)
    with pytest.raises(WorkloadError, match="head"):
        BurstyGroups(head=1.5)
    with pytest.raises(WorkloadError, match="clump_requests"):
        BurstyGroups(clump_requests=0.5)
    with pytest.raises(WorkloadError, match="no bursty groups"):
        bursty_groups([], 10.0)


def test_few_models_change_often_enough_with_shorter_spells() -> None:
    knobs = BurstyGroups(spell_seconds=80.0, pause_seconds=500.0)
    s = bursty_groups(names(8), 3 * 3600.0, groups=knobs).stats()
    assert 54 <= s.active.switches_per_hour <= 766
    assert 0.23 <= s.active.share <= 0.50


# Lengths


def test_lognormal_has_the_published_moments() -> None:
    drawn = LogNormal.of_median(239, 172).sample(rng(), 100_000)
    assert drawn.mean() == pytest.approx(239, rel=0.02)
    assert np.median(drawn) == pytest.approx(172, rel=0.02)
    by_cv = LogNormal.of_cv(100, 0.5).sample(rng(), 100_000)
    assert by_cv.std() / by_cv.mean() == pytest.approx(0.5, rel=0.03)
    assert LogNormal.of_median(1000, 10, most=50).sample(rng(), 1000).max() == 50


def test_empirical_draws_by_weight() -> None:
    sampler = Empirical.of_pdf({0: 1.0, 50: 3.0, 70: 0.0})
    drawn = sampler.sample(rng(), 10_000)
    assert set(drawn.tolist()) == {1, 50}
    assert (drawn == 50).mean() == pytest.approx(0.75, abs=0.02)
    assert sampler.mean == pytest.approx(37.75)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Constant(0),
        lambda: LogNormal.of_median(10, 20),
        lambda: LogNormal.of_cv(0, 1),
        lambda: LogNormal(0.0, -1.0),
        lambda: Empirical([]),
        lambda: Empirical([1, 2], [1.0]),
        lambda: Empirical([1], [0.0]),
        lambda: power_law(0, 1.0),
        lambda: power_law(3, -1.0),
    ],
)
def test_impossible_parameters_are_refused(bad: object) -> None:
    assert callable(bad)
    with pytest.raises(WorkloadError):
        bad()


@pytest.mark.parametrize("sampler", [Constant(9), LogNormal.of_median(20, 9), Empirical([3, 4])])
def test_samplers_give_whole_positive_counts(sampler: LengthSampler) -> None:
    drawn = sampler.sample(rng(), 50)
    assert drawn.dtype == np.int64
    assert drawn.shape == (50,)
    assert drawn.min() >= 1
    assert str(sampler)


def test_mixes_are_labelled_synthetic() -> None:
    base = independent(["only"], 3.0, 300.0)
    spread = spread_models(base, ["a", "b"], [3.0, 1.0], seed=1)
    share = sum(r.model == "a" for r in spread.requests) / len(spread.requests)
    assert share == pytest.approx(0.75, abs=0.06)
    assert spread.labels[-1].startswith("synthetic mix")
    with pytest.raises(WorkloadError, match="one share"):
        spread_models(base, ["a"], [1.0, 2.0])
