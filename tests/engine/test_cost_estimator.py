"""What jobs cost is learned from those that have ended."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import UNMEASURED, StepCosts
from ballast.core.job import JobLoad
from ballast.engine.cost_estimator import CostEstimator

TRUE = StepCosts(5e-3, 2e-4, 4e-4, 4e-8, 3e-9)


def load(rng: random.Random) -> JobLoad:
    """Of a job as engines run them: decodes, and now and then a chunk of a prompt."""
    sequences = rng.randrange(0, 20)
    tokens = rng.choice([0, 0, 0, rng.randrange(2, 256)]) if sequences else rng.randrange(2, 256)
    start = rng.randrange(0, 1000)
    pairs = tokens * start + tokens * (tokens + 1) // 2
    return JobLoad(tokens, int(tokens > 0), pairs, sequences, sequences * rng.randrange(20, 800))


def learned(true: StepCosts, jobs: int, noise: float = 0.0, seed: int = 1) -> CostEstimator:
    rng = random.Random(seed)
    estimator = CostEstimator(UNMEASURED)
    for _ in range(jobs):
        job = load(rng)
        estimator.observe(job, true.of(job) * rng.lognormvariate(0.0, noise))
    return estimator


def worst(costs: StepCosts, true: StepCosts, seed: int = 2) -> float:
    """Largest relative error over jobs of the same kind."""
    rng = random.Random(seed)
    return max(abs(costs.of(job) / true.of(job) - 1) for job in (load(rng) for _ in range(300)))


@given(st.floats(0.01, 1000.0), st.integers(0, 10**6))
def test_costs_of_any_scale_are_learned(scale: float, seed: int) -> None:
    assert worst(learned(TRUE.scaled(scale), 300, seed=seed).costs, TRUE.scaled(scale)) < 0.05


def test_jobs_whose_times_scatter_are_learned_too() -> None:
    assert worst(learned(TRUE, 2000, noise=0.3).costs, TRUE) < 0.25


def test_one_job_tells_the_scale() -> None:
    estimator = CostEstimator(UNMEASURED)
    job = JobLoad(0, 0, 0, 4, 400)
    estimator.observe(job, 50 * UNMEASURED.of(job))
    assert estimator.costs.of(JobLoad(128, 1, 8256, 0, 0)) == pytest.approx(
        50 * UNMEASURED.of(JobLoad(128, 1, 8256, 0, 0)), rel=1e-6
    )


def test_a_machine_that_slows_down_is_followed() -> None:
    estimator, rng = learned(TRUE, 2000), random.Random(3)
    for _ in range(2500):
        job = load(rng)
        estimator.observe(job, 2 * TRUE.of(job))
    assert worst(estimator.costs, TRUE.scaled(2)) < 0.2


def test_jobs_all_alike_leave_no_coefficient_negative_and_keep_proportions() -> None:
    estimator = CostEstimator(UNMEASURED)
    job = JobLoad(0, 0, 0, 1, 100)
    for _ in range(200):
        estimator.observe(job, 4e-3)
    assert min(astuple(estimator.costs)) >= 0
    assert estimator.costs.of(job) == pytest.approx(4e-3, rel=0.01)
    assert estimator.costs.per_token > 0, "prompts are not thought to be free"


def test_a_job_that_took_no_time_tells_nothing() -> None:
    estimator = CostEstimator(UNMEASURED)
    estimator.observe(JobLoad(0, 0, 0, 1, 100), 0.0)
    assert estimator.costs == UNMEASURED


def test_equal_jobs_give_equal_estimates() -> None:
    assert learned(TRUE, 500, 0.2).costs == learned(TRUE, 500, 0.2).costs
    assert learned(replace(TRUE, base=1e-2), 500).costs != learned(TRUE, 500).costs


def test_jobs_that_take_longer_are_expected_again_but_not_one_alone() -> None:
    rng = random.Random(5)
    estimator = learned(TRUE, 500)
    job = load(rng)
    assert estimator.late < 1e-3
    estimator.observe(job, TRUE.of(job) + 0.04)
    assert estimator.late < 1e-3
    estimator.observe(job, TRUE.of(job) + 0.03)
    assert estimator.late == pytest.approx(0.03, rel=0.2)
    for _ in range(64):
        job = load(rng)
        estimator.observe(job, TRUE.of(job))
    assert estimator.late < 3e-3
