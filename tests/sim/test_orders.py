"""Orders of compute in virtual time: who is alone loses nothing, nobody starves, no lane idles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballast.bench.record import RequestRecord, RequestRecorder, prompts_of, submission_for
from ballast.bench.report import RequestStats
from ballast.core.cost import StepCosts
from ballast.core.event import FinishedOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.engine.compute_view import runnable
from ballast.engine.state import DeviceState
from ballast.policy.presets import ORDERS, shared_options
from ballast.sim.device import OnDeviceTurn
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.workload.workload import WorkloadRequest
from tests.effort import some
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import books, decisions, run
from tests.sim.test_simulate import fleet, spec

COSTS = StepCosts(8e-3, 1e-4, 2e-4, 0.0, 0.0)
"""A step takes 8 ms, however many decode."""
OVERHEAD = 1e-4
PAGES = 800
"""Beside activations: room for all that these tests serve."""


def request(id: int, model: str, at: float, prompt: int, output: int) -> WorkloadRequest:
    return WorkloadRequest(id=id, at=at, model=model, prompt_tokens=prompt, output_tokens=output)


def serve(
    preset: str,
    specs: Sequence[ModelSpec],
    requests: Sequence[WorkloadRequest],
    *,
    options: dict[str, float] | None = None,
    observe: OnDeviceTurn | None = None,
) -> tuple[list[RequestRecord], SimulatedRun]:
    """What became of requests, and of the device, which has memory for all of them."""
    setting = replace(fleet(preset, list(specs), PAGES), options=options or {})
    link = LinkRates.even(1e12)  # weights are there at once
    profile = MachineProfile(costs={s.name: COSTS for s in specs}, link=link, overhead=OVERHEAD)
    recorder, prompts = RequestRecorder(), prompts_of({s.name: s.vocab for s in specs})
    submissions = []
    for r in sorted(requests, key=lambda r: r.at):
        submission = submission_for(r, prompts(r))
        recorder.sent(r, submission.id, r.at)
        submissions.append(submission)
    done = simulate(setting, specs, submissions, profile, recorder.record, observe=observe)
    done.state.pool.validate()
    records = recorder.records()
    assert [r.error for r in records if not r.answered] == []
    assert len(records) == len(requests)
    assert not any(m.preemptions for m in done.state.models.values()), "memory was short"
    return records, done


def kept(records: Sequence[RequestRecord], specs: Sequence[ModelSpec]) -> int:
    """Requests that have kept their service levels."""
    return RequestStats.of(records, {s.name: s.slo for s in specs}).attained


def never_idle(now: float, state: DeviceState) -> None:
    """After each turn: no lane is free that a model could use which lacks nothing."""
    if state.lanes.ready:
        could = [m.spec.name for m in runnable(state) if not m.shortages]
        assert could == [], f"at {now} a lane is idle, and these could run"


# -- one model ----------------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda n: n / 200),
        st.integers(1, 250),
        st.integers(1, 60),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15)
@given(arrivals, st.sampled_from([18, 30, 200]), st.sampled_from([1e-3, 10.0]))
@example(
    [(1.34, 221, 42, 0), (1.145, 49, 59, 1), (1.585, 56, 19, 0), (1.585, 250, 60, 1)], 18, 10.0
)
def test_a_model_alone_is_served_first_come_first_served(
    asked: list[tuple[float, int, int, int]], pages: int, ttft: float
) -> None:
    """Where no level can be kept, and where none can be missed: under every order the same, to the
    last bit, however tight memory is."""
    only = replace(spec("only", 10, max_running=4), slo=Slo(ttft=ttft, tpot=ttft / 10))
    prompts = prompts_of({"only": only.vocab})
    submissions = [
        replace(
            submission_for(r := request(i, "only", at, prompt, output), prompts(r)),
            priority=priority,
        )
        for i, (at, prompt, output, priority) in enumerate(asked)
    ]
    submissions.sort(key=lambda s: s.arrival)
    (result, done), (same, also) = (
        run(fleet(f"balloon+{order}", [only], pages), [only], submissions, leaps=True)
        for order in ("round-robin", "deadline")
    )
    assert result == same
    assert books(done) == books(also)
    for order in ("fcfs", "adbs"):
        result, done = run(
            fleet(f"balloon+{order}", [only], pages), [only], submissions, leaps=True
        )
        assert result == same
        assert books(done) == books(also)
    assert {o.request_id for _, o in result if isinstance(o, FinishedOutput)} == {
        s.id for s in submissions
    }


@settings(max_examples=15)
@given(
    arrivals,
    st.sampled_from([0.05, 0.3, 1.0]),
    st.sampled_from([0.01, 0.02, 0.05]),
    st.sampled_from([0.0, 1.0]),
)
# The second can no longer be in time when the third has come, which still can, and is.
@example([(0.05, 128, 1, 0), (0.05, 160, 1, 0), (0.055, 1, 1, 0)], 0.05, 0.05, 0.0)
@example([(0.05, 128, 1, 0), (0.05, 160, 1, 0), (0.055, 1, 1, 0)], 0.05, 0.05, 1.0)
def test_a_model_alone_computes_prompts_in_their_order(
    asked: list[tuple[float, int, int, int]], ttft: float, tpot: float, late_last: float
) -> None:
    """Where streams leave time for parts of prompts alone. The order is that of the queue: of
    arrival, but that admission puts requests behind others that can no longer be in time."""
    only = replace(spec("only", 10), slo=Slo(ttft=ttft, tpot=tpot))
    requests = [
        request(i, "only", at, prompt, output)
        for i, (at, prompt, output, _) in enumerate(sorted(asked))
    ]
    options = {"late_last": late_last}
    records, done = serve("balloon+deadline", [only], requests, options=options, observe=never_idle)
    moved = [e["requests"] for e in done.story.entries if e.get("action") == "Reorder"]
    late = {id for ids in moved for id in ids}
    assert late_last or not late
    for part in (True, False):
        firsts = [
            r.first_token
            for r in sorted(records, key=lambda r: r.id)
            if (f"w{r.id}" in late) is part
        ]
        assert firsts == sorted(t for t in firsts if t is not None)


def test_a_short_answer_of_a_model_alone_does_not_wait_for_the_next_prompt() -> None:
    """Both keep their levels: the second token takes a step, 8 ms, and the prompt that has come
    meanwhile has time; a job with a whole chunk of it would take 21 ms."""
    only = replace(spec("only", 10), slo=Slo(ttft=0.5, tpot=0.015))
    requests = [request(0, "only", 0.0, 100, 2), request(1, "only", 0.01, 250, 2)]
    found = {o: kept(serve(f"balloon+{o}", [only], requests)[0], [only]) for o in ORDERS}
    assert found == {"round-robin": 1, "deadline": 2, "fcfs": 1, "adbs": 1, "chunks": 2}


# -- nobody starves -----------------------------------------------------------------------------

STREAM = 8.0
"""Seconds for which requests that can keep their levels come."""


@pytest.mark.parametrize("busy", [1, 2])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_hopeless_requests_end_within_a_bound_beside_an_endless_stream(
    busy: int, share: float
) -> None:
    """The bound: late requests have `late_share` of the lane's time while there are any. So what
    they take in all, in seconds of the lane, is there after that, divided by the share; and a
    request waits for the end of one job more, for no job is interrupted."""
    rng = random.Random(busy)
    specs = [spec(f"busy{i}", 10) for i in range(busy)]
    hopeless = replace(spec("hopeless", 10), slo=Slo(ttft=1e-4, tpot=1e-4))
    stream = [
        request(i, f"busy{i % busy}", (i + rng.random()) / 6, rng.randint(10, 60), 80)
        for i in range(6 * int(STREAM))
    ]
    wanting = [request(1000 + i, "hopeless", 1.0 + 0.1 * i, 40 + 30 * i, 4) for i in range(3)]
    ran: Counter[bool] = Counter()

    def beside(now: float, state: DeviceState) -> None:
        busy = (m for name, m in state.models.items() if name != "hopeless")
        ran[any(m.running or m.waiting for m in busy)] += 1.0 < now < STREAM

    records, done = serve(
        "balloon+deadline",
        [*specs, hopeless],
        [*stream, *wanting],
        options={"late_share": share},
        observe=beside,
    )
    assert ran[False] == 0, "the stream has pauses, in which anything can run"
    assert ran[True] > 100
    assert kept([r for r in records if r.model != "hopeless"], specs) == len(stream)
    late = done.state.models["hopeless"]
    jobs = len(wanting) * (4 + 2)  # at most: chunks of prompts, and steps
    work = late.lane_seconds + jobs * OVERHEAD
    longest = COSTS.base + 128 * COSTS.per_token + 64 * COSTS.per_sequence + OVERHEAD
    waited = [r.end - r.at for r in records if r.model == "hopeless" and r.end is not None]
    assert len(waited) == len(wanting)
    assert max(waited) <= work / share + longest
    assert work / share < STREAM / 2, "within this bound the stream would have ended anyway"


@pytest.mark.parametrize("preset", [f"balloon+{order}" for order in ORDERS])
@pytest.mark.parametrize("seed", range(3))
def test_all_requests_end_after_more_than_can_be_served(preset: str, seed: int) -> None:
    """The lane does nothing but work from the first arrival to the last answer."""
    rng = random.Random(seed)
    levels = [Slo(ttft=0.05, tpot=0.01), Slo(ttft=1.0, tpot=0.1), Slo(ttft=1e-4, tpot=1e-4)]
    specs = [replace(spec(f"m{i}", 10), slo=slo) for i, slo in enumerate(levels)]
    requests = [
        request(i, f"m{i % 3}", 2.0 * rng.random(), rng.randint(1, 200), rng.randint(1, 60))
        for i in range(90)
    ]
    records, done = serve(preset, specs, requests, observe=never_idle)
    assert kept(records, specs) < len(records) * 0.9, "no overload"
    first = min(r.at for r in requests)
    work = sum(m.lane_seconds for m in done.state.models.values()) + done.state.jobs * OVERHEAD
    assert max(r.end or 0.0 for r in records) <= first + work + 0.5


# -- work conserving ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset", ["balloon+deadline", "swap+deadline", "static+deadline", "balloon+fcfs"]
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_no_lane_is_idle_while_a_model_could_run(preset: str, lanes: int) -> None:
    seen: Counter[str] = Counter()
    seeds = some(range(12), 4)
    for seed in seeds:
        setting, specs, requests = world(seed, preset, lanes)
        specs = [
            replace(s, slo=Slo(ttft=ttft, tpot=ttft / 10))
            for s, ttft in zip(specs, (0.05, 1e-4, 1.0, 0.2), strict=False)
        ]
        requests = [replace(r, arrival=3 * r.arrival) for r in requests]
        _, done = run(setting, specs, requests, leaps=seed % 2 == 0, observe=never_idle)
        seen["jobs"] += done.state.jobs
        seen["models"] += len(specs)
    assert seen["jobs"] > 40 * len(seeds)
    assert seen["models"] > len(seeds)


# -- leaps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset", ["balloon+deadline", "static+deadline", "static+fcfs", "static+adbs"]
)
def test_leaps_change_nothing_where_models_wait_for_each_other(preset: str) -> None:
    """All models are there, and some cannot keep their levels: turns end at many a moment."""
    seen: Counter[str] = Counter()
    seeds = some(range(8), 4)
    for seed in seeds:
        rng = random.Random(seed)
        specs = [
            replace(spec(f"m{i}", 10), slo=Slo(ttft=rng.choice([1e-4, 0.3, 1.0, 5.0]), tpot=tpot))
            for i, tpot in enumerate((0.02, 0.1, 1.0)[: 2 + seed % 2])
        ]
        requests = [
            request(
                i, rng.choice(specs).name, rng.random(), rng.randint(1, 200), rng.randint(1, 60)
            )
            for i in range(16)
        ]
        prompts = prompts_of({s.name: s.vocab for s in specs})
        asked = [submission_for(r, prompts(r)) for r in sorted(requests, key=lambda r: r.at)]
        options = shared_options(preset, {"late_share": 0.1})
        setting = replace(fleet(preset, specs, PAGES), options=options)
        single, one = run(setting, specs, asked, leaps=False)
        result, done = run(setting, specs, asked, leaps=True)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        assert decisions(done) == decisions(one), f"seed {seed}"
        leaps = [e for e in done.story.entries if e.get("event") == "Leap"]
        seen["leaps"] += len(leaps)
        seen["steps"] += sum(e["steps"] for e in leaps)
        seen["jobs"] += done.state.jobs
    assert seen["steps"] > 0.3 * seen["jobs"], seen
    assert seen["leaps"] > 12 * len(seeds), seen


# -- what it is good for ------------------------------------------------------------------------


def test_deadlines_keep_levels_that_turns_by_job_cannot() -> None:
    """Four models: a step of each in turn takes longer than a token of any may, though one after
    the other they all have the time, for first tokens can wait."""
    specs = [replace(spec(f"m{i}", 10), slo=Slo(ttft=4.0, tpot=0.02)) for i in range(4)]
    requests = [request(i, f"m{i % 4}", 0.01 * (i % 4), 20 + i, 40 + i % 3) for i in range(4 * 4)]
    found = {order: kept(serve(f"balloon+{order}", specs, requests)[0], specs) for order in ORDERS}
    assert found["round-robin"] == found["adbs"] == 0
    assert found["deadline"] == len(requests)
