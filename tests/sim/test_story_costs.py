"""What a story says of a machine: costs of jobs, and the loop between them, found again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.machine_profile import RECENT
from ballast.sim.story_costs import (
    SETTLING,
    ColdSeconds,
    JobFit,
    TimedJob,
    fit_jobs,
    jobs_of,
    with_loop,
)

TRUTH = {
    "a": StepCosts(2e-3, 8e-5, 3e-4, 4e-8, 5e-9, 2e-4),
    "b": StepCosts(5e-3, 3e-4, 1e-4, 1e-6, 2e-7, 0.0),
}
WAKE, FIXED, EACH, ADMISSION = 4e-4, 3e-4, 4e-5, 2e-4
SETTLES, SWITCH, SWITCH_BACK, TURN = (6e-4, 3e-4, 2e-4, 1e-4), 7e-4, 2e-4, 9e-4
COLD = ColdSeconds(wake=WAKE, settling=SETTLES, switch=SWITCH, switch_back=SWITCH_BACK)
OF_LOOP = ColdSeconds(wake=5e-4, settling=(4e-4, 2e-4, 0.0, 0.0), switch=3e-4, switch_back=1e-4)
WARM = ColdSeconds()
DECODES = [JobLoad(0, 0, 0, n, n * context) for n in (1, 2, 8, 16) for context in (15, 200, 500)]
PREFILLS = [JobLoad(t, p, t * t // 2, 0, 0) for t in (2, 16, 64, 128) for p in (1, 2)]
MIXED = [JobLoad(64, 1, 2080, 4, 800), JobLoad(8, 2, 20, 1, 100)]

Noise = Callable[[], float]


def story(rng: random.Random, n: int, noise: Noise = lambda: 1.0) -> list[dict[str, object]]:
    """`n` jobs as a device tells them; every tenth after a pause, a request comes to the loop
    during every eleventh, and seconds are times `noise`."""
    entries: list[dict[str, object]] = []
    now, before, step, of = 0.0, JobLoad(0, 0, 0, 0, 0), SETTLING, ""
    ended: dict[str, float] = {}
    for i in range(n):
        model = rng.choice(sorted(TRUTH))
        load = rng.choice([*DECODES, *DECODES, *DECODES, *PREFILLS, *MIXED])
        pause = i % 10 == 0
        step = 0 if before.prefill_chunks else step + 1
        turns = i % 11 == 5
        done = load if pause else before  # after a pause the virtual loop pays for its own tokens
        warm = FIXED + EACH * (done.decode_sequences + done.prefill_chunks)
        warm += ADMISSION * load.prefill_chunks
        turn = now + (0.05 if pause else 0.0)
        for back in (True, False):  # the gap depends on it, and it on the gap
            beyond, of_loop = (
                _beyond(cold, load, pause, step, of, model, back) for cold in (COLD, OF_LOOP)
            )
            gap = warm + of_loop
            if (turn + gap - ended.get(model, -math.inf) < RECENT) == back:
                break
        seconds = noise() * (TRUTH[model].of(load) + beyond + TURN * turns)
        now = turn + gap + seconds
        result = {"at": now, "event": "JobDone", "job": i, "model": model, "seconds": seconds}
        entries += [{"at": turn, "event": "Arrival", "model": model, "arrival": turn}]
        entries += [{"at": turn, "job": i, "model": model}]
        if turns:
            came = now - seconds / 2
            entries += [{"at": came, "event": "Arrival", "model": model, "arrival": came - 1e-4}]
        entries += [result | load._asdict()]
        before, of = load, model
        ended[model] = now
    return entries


def _beyond(
    cold: ColdSeconds, load: JobLoad, pause: bool, step: int, of: str, model: str, back: bool
) -> float:
    """Further seconds of a job: `step` jobs after a prefill, right after a job `of` a model or
    after a pause; `back`: its own model ran a moment ago."""
    settles = cold.settling[step] if step < SETTLING and not load.prefill_chunks else 0.0
    if pause:
        return settles + cold.wake
    if of in ("", model):
        return settles
    return settles + (cold.switch_back if back else cold.switch)


@pytest.fixture(scope="module")
def jobs() -> list[TimedJob]:
    return jobs_of(story(random.Random(1), 900))


def test_known_costs_are_found_again(jobs: list[TimedJob]) -> None:
    fit = fit_jobs(jobs)
    costs = fit.costs
    assert fit.cold.wake == pytest.approx(WAKE, rel=1e-3)
    assert fit.cold.settling == pytest.approx(SETTLES, rel=1e-3)
    assert fit.cold.switch == pytest.approx(SWITCH, rel=1e-3)
    assert fit.cold.switch_back == pytest.approx(SWITCH_BACK, rel=1e-3)
    assert fit.turn == pytest.approx(TURN, rel=1e-3)
    for model, truth in TRUTH.items():
        for load in (*DECODES, *PREFILLS, *MIXED):
            assert costs[model].of(load) == pytest.approx(truth.of(load), rel=1e-3)


def test_what_the_loop_adds_is_found_again(jobs: list[TimedJob]) -> None:
    fixed, fit = with_loop(jobs, JobFit(TRUTH, COLD, TURN))
    costs = fit.costs
    assert fixed == pytest.approx(FIXED, rel=1e-3)
    both = COLD.plus(OF_LOOP)
    assert fit.cold.wake == pytest.approx(both.wake, rel=1e-3)
    assert fit.cold.settling == pytest.approx(both.settling, rel=1e-3)
    assert fit.cold.switch == pytest.approx(both.switch, rel=1e-3)
    assert fit.cold.switch_back == pytest.approx(both.switch_back, rel=1e-3)
    assert fit.turn == TURN
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

    costs = fit_jobs(jobs_of(story(rng, 800, noise))).costs
    assert min(min(c.base, c.per_token, c.per_sequence, c.per_context) for c in costs.values()) >= 0
    expected = sum(truth.of(load) for truth in TRUTH.values() for load in DECODES)
    found = sum(costs[m].of(load) for m in TRUTH for load in DECODES)
    assert found == pytest.approx(1.1 * expected, rel=0.06)


def test_a_model_whose_prompts_were_all_computed_by_cold_jobs(jobs: list[TimedJob]) -> None:
    """As in short measurements: its prompts cost what they took, and others' costs do not move."""
    some = [j for j in jobs if j.model == "a" or j.cold or not j.load.prefill_chunks]
    assert any(j.model == "b" and j.load.prefill_chunks for j in some)
    costs = fit_jobs(some).costs
    for model, truth in TRUTH.items():
        for load in (*DECODES, *PREFILLS):
            most = 0.02 * truth.of(load) + (
                WAKE * max(1, load.prefill_chunks) if model == "b" else 0.0
            )
            assert abs(costs[model].of(load) - truth.of(load)) <= most, (model, load)


def test_a_few_short_prompts_that_found_the_engine_busy_do_not_stand_for_all(
    jobs: list[TimedJob],
) -> None:
    """As where a step holds a whole burst: nearly every prefill comes after a pause."""
    short = [j for j in jobs if j.load.prefill_tokens == 2 and not j.cold]
    some = [j for j in jobs if not j.load.prefill_chunks or j.after_pause]
    assert {j.model for j in short} == set(TRUTH)
    costs = fit_jobs([*some, *short]).costs
    for model, truth in TRUTH.items():
        for load in (*DECODES, *PREFILLS):
            assert costs[model].of(load) == pytest.approx(truth.of(load), rel=0.03)


def test_what_no_job_tells_costs_nothing(jobs: list[TimedJob]) -> None:
    costs = fit_jobs([j for j in jobs if not j.load.prefill_chunks]).costs
    for model, truth in TRUTH.items():
        assert (costs[model].per_token, costs[model].per_pair, costs[model].per_chunk) == (0, 0, 0)
        for load in DECODES:
            assert costs[model].of(load) == pytest.approx(truth.of(load), rel=1e-3)


def test_a_model_all_of_whose_jobs_ran_beside_turns(jobs: list[TimedJob]) -> None:
    """They are all that is known of it."""
    fit = fit_jobs([job for job in jobs if job.model == "a" or job.turns])
    assert fit.costs["a"].of(DECODES[0]) == pytest.approx(TRUTH["a"].of(DECODES[0]), rel=1e-3)
    (found, truth) = (costs["b"].of(DECODES[0]) for costs in (fit.costs, TRUTH))
    assert truth < found < truth + 2 * TURN
    assert fit_jobs([job for job in jobs if job.turns]).costs.keys() == TRUTH.keys()


def test_only_jobs_that_end_count() -> None:
    arrival = {"at": 0.0, "event": "Arrival", "arrival": 0.0}
    assert jobs_of([arrival, {"at": 1.0, "event": "Leap"}]) == []


def test_jobs_that_waited_for_weights_are_left_out() -> None:
    plain = story(random.Random(0), 3)
    entries: list[dict[str, object]] = [{"at": 0.0, "event": "FirstJobReady", "transfer_id": 7}]
    for entry in plain:
        entries += [entry]
        if entry.get("job") == 0 and "event" not in entry:
            entries += [{"at": 0.0, "event": "TransferDone", "transfer_id": 7}]
    assert jobs_of(entries) == jobs_of(plain)[1:]


def test_jobs_beside_receipts_that_the_loop_took_later_are_left_out() -> None:
    """The server has worked for the request while the job ran; the loop, after it."""
    plain = story(random.Random(0), 60)
    entries = list(plain)
    for job in (20, 40):
        (start,) = (i for i, e in enumerate(entries) if e.get("job") == job and "event" not in e)
        came = float(str(entries[start]["at"])) + 1e-4
        (end,) = (e for e in entries if e.get("job") == job and "event" in e)
        arrival = {"at": end["at"], "event": "Arrival", "model": "a", "arrival": came}
        entries.insert(start + 1, arrival)
    every = jobs_of(plain)
    assert jobs_of(entries) == [job for i, job in enumerate(every) if i not in (20, 40)]


def test_a_lone_job_says_nothing_of_the_loop() -> None:
    lone = jobs_of(story(random.Random(0), 1))
    known = JobFit(TRUTH, WARM)
    assert with_loop(lone, known) == (0.0, known)
    costs = fit_jobs(lone).costs
    assert costs[lone[0].model].of(lone[0].load) == pytest.approx(lone[0].seconds, rel=1e-6)


def test_a_slow_turn_of_the_loop_is_no_pause() -> None:
    """Sixteen prompts are admitted before a job: the loop worked. A pause is when nothing came."""
    paused = [job for job in jobs_of(_jobs(0.008, idle=0.02)) if job.before is not None]
    assert [round(job.idle, 6) for job in paused] == [0.02] * 3
    assert all(job.after_pause for job in paused)
    slow = [job for job in jobs_of(_jobs(0.008)) if job.before is not None]
    assert [round(job.gap, 6) for job in slow] == [0.008] * 3
    assert not any(job.after_pause for job in slow)
    assert with_loop(slow, JobFit(TRUTH, WARM))[0] > 0.005


def _jobs(delay: float, idle: float = 0.0) -> list[dict[str, object]]:
    """Jobs each of which begins `delay` seconds after a turn, that `idle` after the last job."""
    load = JobLoad(0, 0, 0, 1, 15)._asdict()
    entries: list[dict[str, object]] = []
    now = 1.0
    for job in range(4):
        now += idle
        entries.append({"at": now, "job": job, "model": "a"})
        now += delay + 0.05
        entries.append(
            {"at": now, "event": "JobDone", "job": job, "model": "a", "seconds": 0.05, **load}
        )
    return entries
