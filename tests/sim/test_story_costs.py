"""What a story says of a machine: costs of jobs, and the loop between them, found again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.story_costs import TimedJob, costs_of, jobs_of, with_loop

TRUTH = {
    "a": StepCosts(2e-3, 8e-5, 3e-4, 4e-8, 5e-9, 2e-4),
    "b": StepCosts(5e-3, 3e-4, 1e-4, 1e-6, 2e-7, 0.0),
}
WAKE, FIXED, EACH, ADMISSION = 4e-4, 3e-4, 4e-5, 2e-4
DECODES = [JobLoad(0, 0, 0, n, n * context) for n in (1, 2, 8, 16) for context in (15, 200, 500)]
PREFILLS = [JobLoad(t, p, t * t // 2, 0, 0) for t in (2, 16, 64, 128) for p in (1, 2)]
MIXED = [JobLoad(64, 1, 2080, 4, 800), JobLoad(8, 2, 20, 1, 100)]

Noise = Callable[[], float]


def story(rng: random.Random, n: int, noise: Noise = lambda: 1.0) -> list[dict[str, object]]:
    """`n` jobs as a device tells them; every tenth after a pause, and seconds times `noise`."""
    entries: list[dict[str, object]] = []
    now, before = 0.0, JobLoad(0, 0, 0, 0, 0)
    for i in range(n):
        model = rng.choice(sorted(TRUTH))
        load = rng.choice([*DECODES, *DECODES, *PREFILLS, *MIXED])
        pause = 0.05 if i % 10 == 0 else 0.0
        cold = pause or (before.prefill_chunks and not load.prefill_chunks)
        seconds = noise() * (TRUTH[model].of(load) + (WAKE if cold else 0.0))
        ended = before.decode_sequences + before.prefill_chunks
        gap = FIXED + EACH * ended + ADMISSION * load.prefill_chunks
        now += pause + gap + seconds
        result = {"at": now, "event": "JobDone", "model": model, "seconds": seconds}
        entries += [{"at": now, "event": "Arrival", "model": model}, result | load._asdict()]
        before = load
    return entries


@pytest.fixture(scope="module")
def jobs() -> list[TimedJob]:
    return jobs_of(story(random.Random(1), 600))


def test_known_costs_are_found_again(jobs: list[TimedJob]) -> None:
    wake, costs = costs_of(jobs)
    assert wake == pytest.approx(WAKE, rel=1e-3)
    for model, truth in TRUTH.items():
        for load in (*DECODES, *PREFILLS, *MIXED):
            assert costs[model].of(load) == pytest.approx(truth.of(load), rel=1e-3)


def test_what_the_loop_adds_is_found_again(jobs: list[TimedJob]) -> None:
    fixed, costs = with_loop(jobs, TRUTH)
    assert fixed == pytest.approx(FIXED, rel=1e-3)
    for model, truth in TRUTH.items():
        found = costs[model]
        assert found.per_sequence - truth.per_sequence == pytest.approx(EACH, rel=1e-3)
        assert found.per_chunk - truth.per_chunk == pytest.approx(EACH + ADMISSION, rel=1e-3)
        assert found.base == truth.base


@settings(max_examples=15)
@given(st.integers(0, 1000))
def test_noise_and_stalls_shift_no_mean(seed: int) -> None:
    """Half of the jobs take a fifth longer, some a hundred times: the costs are of a mean job."""
    rng = random.Random(seed)

    def noise() -> float:
        return 100.0 if rng.random() < 0.002 else rng.choice((1.0, 1.2))

    _, costs = costs_of(jobs_of(story(rng, 800, noise)))
    assert min(min(c.base, c.per_token, c.per_sequence, c.per_context) for c in costs.values()) >= 0
    expected = sum(truth.of(load) for truth in TRUTH.values() for load in DECODES)
    found = sum(costs[m].of(load) for m in TRUTH for load in DECODES)
    assert found == pytest.approx(1.1 * expected, rel=0.06)


def test_a_model_whose_prompts_were_all_computed_by_cold_jobs(jobs: list[TimedJob]) -> None:
    """As in short measurements: its prompts cost what they took, and others' costs do not move."""
    some = [j for j in jobs if j.model == "a" or j.cold or not j.load.prefill_chunks]
    assert any(j.model == "b" and j.load.prefill_chunks for j in some)
    _, costs = costs_of(some)
    for model, truth in TRUTH.items():
        for load in (*DECODES, *PREFILLS):
            most = 0.02 * truth.of(load) + (
                WAKE * max(1, load.prefill_chunks) if model == "b" else 0.0
            )
            assert abs(costs[model].of(load) - truth.of(load)) <= most, (model, load)


def test_what_no_job_tells_costs_nothing(jobs: list[TimedJob]) -> None:
    _, costs = costs_of([j for j in jobs if not j.load.prefill_chunks])
    for model, truth in TRUTH.items():
        assert (costs[model].per_token, costs[model].per_pair, costs[model].per_chunk) == (0, 0, 0)
        for load in DECODES:
            assert costs[model].of(load) == pytest.approx(truth.of(load), rel=1e-3)


def test_only_jobs_that_end_count() -> None:
    assert jobs_of([{"at": 0.0, "event": "Arrival"}, {"at": 1.0, "event": "Leap"}]) == []


def test_jobs_that_waited_for_weights_are_left_out() -> None:
    plain = story(random.Random(0), 3)
    ends = [e for e in plain if e.get("event") == "JobDone"]
    entries: list[dict[str, object]] = [{"at": 0.0, "event": "FirstJobReady", "transfer_id": 7}]
    for i, end in enumerate(ends):
        entries += [{"at": 0.0, "job": i, "model": end["model"]}]
        entries += [{"at": 0.0, "event": "TransferDone", "transfer_id": 7}] * (i == 0)
        entries += [{**end, "job": i}]
    assert jobs_of(entries) == jobs_of(plain)[1:]


def test_a_lone_job_says_nothing_of_the_loop() -> None:
    lone = jobs_of(story(random.Random(0), 1))
    assert with_loop(lone, TRUTH) == (0.0, TRUTH)
    _, costs = costs_of(lone)
    assert costs[lone[0].model].of(lone[0].load) == pytest.approx(lone[0].seconds, rel=1e-6)
