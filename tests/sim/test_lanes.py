"""Lanes in virtual time: what jobs that run together take, and when they end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.event import JobDoneEvent, Output, TokenOutput
from ballast.core.job import Job, JobLoad
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from ballast.sim.event_heap import EventHeap
from ballast.sim.lanes import SimLanes, guessed, measured, measured_seconds, rates
from ballast.sim.machine_profile import MachineProfile, OnParts, unmeasured
from ballast.sim.profile import device_profile
from ballast.sim.simulate import simulate
from tests.policy import worlds

seconds = st.floats(1e-6, 1.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4), st.floats(0.5, 4))
def test_together_they_use_no_more_than_there_is(
    jobs: list[tuple[float, float]], reach: float
) -> None:
    share = 1 / len(jobs)
    result = rates([guessed(share, c, m, reach) for c, m in jobs])
    assert sum(r * m for r, (_, m) in zip(result, jobs, strict=True)) <= 1 + 1e-6
    for rate, (c, m) in zip(result, jobs, strict=True):
        assert 0 < rate <= 1 / (c / share + m) + 1e-6, "no faster than with all the bandwidth"


def test_alone_on_the_whole_device_a_job_takes_what_it_takes() -> None:
    assert rates([guessed(1.0, 0.2, 0.3, 1.0)]) == [pytest.approx(1 / 0.5)]


@given(st.builds(JobLoad, st.integers(0, 900), st.integers(0, 3), st.integers(0, 9000),
                 st.integers(0, 90), st.integers(0, 9000)))  # fmt: skip
def test_arithmetic_and_reading_make_up_a_job(load: JobLoad) -> None:
    costs = StepCosts(8e-3, 4e-5, 1.1e-5, 3e-8, 1e-9, floor=9e-3, hidden=2e-3, per_tile=1e-3)
    compute, reading = costs.split(load)
    assert compute >= 0
    assert reading >= 0
    assert compute + reading == pytest.approx(costs.of(load))


def test_ends_move_when_others_begin_and_end() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    lanes = SimLanes(heap, clock, 0.5)
    lanes.start(
        clock.now(), Job(1, 0, "a", (), 1), guessed(0.5, 1.0, 0.0, 1.0), ()
    )  # arithmetic alone: 2 s of half of it
    clock.advance_to(1.0)
    lanes.start(
        clock.now(), Job(2, 1, "b", (), 1), guessed(0.5, 0.0, 1.0, 1.0), ()
    )  # reads at half the bandwidth: 2 s
    (first,) = heap.take(None)
    assert isinstance(first, JobDoneEvent)
    assert (first.job.id, first.seconds, clock.now()) == (1, pytest.approx(2), pytest.approx(2.5))
    (second,) = heap.take(None)
    assert isinstance(second, JobDoneEvent)
    assert (second.job.id, second.seconds, clock.now()) == (2, pytest.approx(2), pytest.approx(3.5))


COSTS = StepCosts(0.01, 1e-3, 1e-5, 1e-8, 1e-9)


def served(lanes: int, reach: float, on_parts: OnParts = unmeasured) -> dict[str, list[float]]:
    """One model decodes, another has long prompts: when the tokens of each came."""
    specs: list[ModelSpec] = [replace(worlds.spec(n), max_model_len=4096) for n in ("a", "b")]
    models = tuple(ModelSettings(name=s.name, path="") for s in specs)
    device = DeviceSettings(budget_bytes=512 * MiB, page_bytes=worlds.PAGE, lanes=lanes)
    # In turns a prefill is not cut to the slack of who decodes.
    fleet = FleetSettings(models=models, device=device, preset="balloon+round-robin")
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs},
        link=LinkRates.even(1e12),
        overhead=0,
        reach=reach,
        on_parts=on_parts,
    )
    requests = [
        Submission(id="a", model="a", prompt=(1,), max_tokens=200, arrival=0.0, ignore_eos=True),
        *(
            Submission(
                id=f"b{i}",
                model="b",
                prompt=(7,) * (1000 + i),
                max_tokens=1,
                arrival=0.5 + i,
                ignore_eos=True,
            )
            for i in range(3)
        ),
    ]
    result: dict[str, list[float]] = defaultdict(list)

    def said(at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            result[output.request_id[0]].append(at)

    done = simulate(fleet, specs, requests, profile, said)
    done.state.pool.validate()
    return result


def test_decodes_go_on_beside_a_prefill() -> None:
    one, two = served(1, 2.0), served(2, 2.0)
    gaps = {n: max(b - a for a, b in zip(t["a"], t["a"][1:], strict=False)) for n, t in
            ((1, one), (2, two))}  # fmt: skip
    assert gaps[2] < gaps[1] / 5, "a decode step need not wait for a prefill chunk"
    assert len(two["b"]) == len(one["b"]) == 3
    assert two["a"][-1] < one["a"][-1]


def test_without_reach_nothing_is_gained_by_running_decodes_together() -> None:
    (alone,) = rates([guessed(1.0, 0.0, 0.01, 1.0)])
    together = rates([guessed(0.5, 0.0, 0.01, 1.0)] * 2)
    assert sum(together) == pytest.approx(alone)


def test_what_was_measured_on_a_part_takes_what_it_took_there() -> None:
    whole, half, third = (StepCosts(s, 0, 0, 0, 0) for s in (1.0, 1.4, 1.8))
    step = JobLoad(0, 0, 0, 1, 1)
    seen = [(0.3, third), (0.5, half), (1.0, whole)]
    taken = [measured_seconds(seen, step, share) for share in (1.0, 0.5, 0.3)]
    assert taken == pytest.approx([1.0, 1.4, 1.8])
    assert 1.4 < measured_seconds(seen, step, 0.4) < 1.8
    assert measured_seconds(seen, step, 0.15) == pytest.approx(3.6)
    (alone,) = rates([measured(0.5, 1.4, 0.9, 2.0)])
    assert alone == pytest.approx(1 / 1.4)
    beside = rates([measured(0.5, 1.4, 0.9, 2.0)] * 2)
    assert sum(0.9 * rate for rate in beside) == pytest.approx(1.0), "all of the bandwidth, no more"


def test_an_a100_has_measured_lanes_where_its_engine_was() -> None:
    """A prefill on half of the multiprocessors takes 1.7 times as long, where the guess says 2."""
    profile = device_profile("A100-80G@eager")
    seen = profile.on_parts("Llama-7b")
    assert [share for share, _ in seen] == sorted({share for share, _ in seen})
    assert len(seen) >= 2
    prompt = JobLoad(512, 1, 512 * 512 // 2, 0, 0)
    whole = profile.costs("Llama-7b").of(prompt)
    measured_there = [*seen, (1.0, profile.costs("Llama-7b"))]
    assert 1.5 < measured_seconds(measured_there, prompt, 0.5) / whole < 1.9
    assert device_profile("A100-80G").on_parts("Llama-7b") == []
    assert device_profile("H100-80G@eager").on_parts("Llama-7b") == []


def test_lanes_take_what_was_measured_on_their_parts() -> None:
    """What half of a device was seen to do as quickly as the whole is not slowed down."""
    guess, seen = served(2, 1.0), served(2, 1.0, lambda spec: [(0.5, COSTS)])
    assert seen["b"][0] < guess["b"][0]
    alone = served(1, 1.0)["a"]
    assert seen["a"][20] - seen["a"][10] == pytest.approx(alone[20] - alone[10])
