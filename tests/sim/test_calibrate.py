"""The fit of job costs, and the engine's overhead read from a story."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ballast.core.cost import StepCosts
from ballast.core.event import JobDone
from ballast.core.job import Job, SequenceWork
from ballast.core.request import Sampling
from ballast.core.story import Story
from ballast.sim.calibrate import fit, in_service, overhead_of, relative_errors


def job(*shape: tuple[int, int]) -> Job:
    work = tuple(
        SequenceWork(f"q{i}", [0] * tokens, start, [], Sampling())
        for i, (tokens, start) in enumerate(shape)
    )
    return Job(0, 0, "m", work)


JOBS = [
    job((16, 0)),
    job((128, 0)),
    job((512, 0)),
    job((256, 256)),
    job((1, 15)),
    job((1, 500)),
    job(*[(1, 15)] * 8),
    job(*[(1, 500)] * 8),
    job((64, 0), *[(1, 200)] * 4),
]


def test_the_fit_recovers_known_coefficients() -> None:
    truth = StepCosts(2e-3, 8e-5, 3e-4, 4e-8, 5e-9)
    found = fit([(j, truth.seconds(j)) for j in JOBS])
    assert max(relative_errors(found, [(j, truth.seconds(j)) for j in JOBS])) < 1e-6
    assert found.base == pytest.approx(truth.base, rel=1e-4)


def test_the_fit_is_never_negative_and_forgives_noise() -> None:
    truth = StepCosts(2e-3, 8e-5, 3e-4, 0.0, 0.0)
    rng = random.Random(0)
    points = [(j, truth.seconds(j) * rng.uniform(0.95, 1.05)) for j in JOBS]
    found = fit(points)
    assert min(found.base, found.per_token, found.per_sequence) > 0
    assert min(found.per_context, found.per_pair) >= 0
    assert max(relative_errors(found, points)) < 0.12


def test_overhead_is_the_gap_between_back_to_back_jobs() -> None:
    ends = [(1.0, 0.2), (1.25, 0.2), (1.5, 0.2), (9.0, 0.2)]
    entries = [{"event": "JobDone", "at": at, "seconds": s} for at, s in ends]
    assert overhead_of([{"at": 0.0, "event": "Arrival"}, *entries]) == pytest.approx(0.05)
    assert overhead_of([]) == 0.0


def test_service_scales_what_was_measured_alone() -> None:
    alone = StepCosts(1e-2, 1e-4, 1e-4, 0.0, 0.0)
    truth = StepCosts(2e-2, 2e-4, 2e-4, 0.0, 0.0, per_chunk=5e-3)
    story = Story()
    for j in JOBS[:-1]:
        story.event(0.0, JobDone(j, (), truth.seconds(j)))
    found = in_service({"m": alone}, list(story.entries))["m"]
    assert found.base == pytest.approx(truth.base)
    assert found.per_chunk == pytest.approx(truth.per_chunk)
    assert max(relative_errors(found, [(j, truth.seconds(j)) for j in JOBS])) < 1e-6
    assert in_service({"m": alone}, []) == {"m": alone}
    baseless = replace(alone, base=0.0)
    assert in_service({"m": baseless}, list(story.entries))["m"].per_chunk == 0
