"""Steps that are scheduled ahead: who waits how long, and what stays in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    FinishedOutput,
    JobDoneEvent,
    Output,
    TokenOutput,
)
from ballast.core.job import Job
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import GiB, MiB
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.model_catalogue import facts
from ballast.sim.simulate import simulate
from ballast.sim.steps_ahead import StepsAheadHeap

STEP = 0.01
SPEC = facts("Qwen2.5-0.5b").spec(name="m", max_model_len=4096)
PROFILE = MachineProfile(
    costs={"m": StepCosts(STEP, 0.0, 0.0, 0.0, 0.0)}, link=LinkRates.even(1e12), overhead=0.0
)


def asked(name: str, at: float, tokens: int) -> Submission:
    prompt = tuple(range(8))
    return Submission(
        id=name, model="m", prompt=prompt, max_tokens=tokens, ignore_eos=True, arrival=at
    )


def answers(
    ahead: int, arrivals: Sequence[Submission], *, leaps: bool = True
) -> dict[str, list[float]]:
    """When each request's tokens came."""
    settings = DeviceSettings(budget_bytes=8 * GiB, page_bytes=2 * MiB)
    fleet = FleetSettings(models=(), device=settings, preset="balloon")
    times: dict[str, list[float]] = {s.id: [] for s in arrivals}
    ended = set()

    def receive(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            times[output.request_id].append(now)
        elif isinstance(output, FinishedOutput):
            ended.add(output.request_id)

    ran = simulate(fleet, [SPEC], arrivals, replace(PROFILE, ahead=ahead), receive, leaps=leaps)
    ran.state.validate()
    assert ended == set(times)
    return times


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_request_that_finds_the_device_busy_waits_so_many_steps_more(
    ahead: int, leaps: bool
) -> None:
    requests = [asked("first", 0.0, 40), asked("second", 0.195, 4)]
    times = answers(ahead, requests, leaps=leaps)
    began = next(t for t in times["first"] if t > 0.195)
    assert times["second"][0] == pytest.approx(began + (1 + ahead) * STEP)
    assert times["first"] == pytest.approx(answers(0, requests)["first"]), "nobody else waits"


def test_a_request_that_finds_the_device_idle_does_not_wait() -> None:
    alone = [asked("first", 0.0, 4), asked("second", 1.0, 4)]
    assert answers(1, alone) == answers(0, alone)


def test_leaps_change_nothing() -> None:
    requests = [asked(f"r{i}", 0.037 * i, 5 + 7 * i % 60) for i in range(40)]
    assert answers(1, requests) == answers(1, requests, leaps=False)


def test_the_last_request_is_answered_although_it_arrives_with_the_end() -> None:
    """`simulate` lets the device drain from the last arrival on."""
    times = answers(2, [asked("first", 0.0, 40), asked("last", 0.2, 3)])
    assert len(times["last"]) == 3


def test_what_follows_a_late_arrival_stays_behind_it() -> None:
    heap = StepsAheadHeap(VirtualClock(), 1)
    job, request = Job(7, 0, "m", ()), asked("late", 1.0, 4)
    heap.schedule(3.0, JobDoneEvent(job, (), 3.0))
    heap.schedule(1.0, ArrivalEvent(request))
    heap.schedule(2.0, CancelEvent("late"))
    heap.schedule(2.5, DrainEvent())
    assert heap.take(2.75) == []
    assert heap.undelivered == 1
    seen = [heap.take(None) for _ in range(3)]
    kinds = [[type(event) for event in events] for events in seen]
    assert kinds == [[JobDoneEvent], [ArrivalEvent], [CancelEvent, DrainEvent]]
    assert heap.undelivered == 0
