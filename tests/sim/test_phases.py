"""What is in a job: prefill and decode of one model together, or in jobs of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ballast.core.compute import ComputeDecision, ComputeView, Phase
from ballast.core.cost import activation_bytes
from ballast.core.event import TokenOutput
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import ceil_div
from ballast.engine.lanes import Lanes
from ballast.engine.state import DeviceState
from ballast.policy import presets
from ballast.policy.base import ComputePolicy
from ballast.policy.compute.basic_orders import RoundRobin
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import books, run

REQUESTS = 6


def requests(name: str) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model=name,
            prompt=(i,) * (20 + 30 * i),
            max_tokens=20,
            ignore_eos=True,
            arrival=0.02 * i,
        )
        for i in range(REQUESTS)
    ]


def loads(fleet: FleetSettings, spec: ModelSpec) -> tuple[dict[int, JobLoad], int]:
    """What each job computed, and how many tokens clients got."""
    found: dict[int, JobLoad] = {}

    def turned(now: float, state: DeviceState) -> None:
        found.update({job.id: job.load for job in state.lanes.jobs if job is not None})

    result, _ = run(fleet, [spec], requests(spec.name), leaps=False, observe=turned)
    return found, sum(isinstance(output, TokenOutput) for _, output in result)


@pytest.mark.parametrize("kv_pages", [None, 14])
def test_separate_jobs_hold_prompts_or_decode_steps_and_everybody_is_answered(
    kv_pages: int | None,
) -> None:
    """Also where memory is short, so that a job for prompts may find none that can be admitted."""
    fleet, (spec, *_), _ = world(1, "recompute")
    if kv_pages is not None:
        device = fleet.device
        page = device.page_bytes
        pages = ceil_div(activation_bytes(spec, 32, 8), page) + weight_pages([spec], page)
        fleet = replace(fleet, device=replace(device, budget_bytes=(pages + kv_pages) * page))
    for separate in (0, 1):
        found, tokens = loads(replace(fleet, options={"separate": separate}), spec)
        mixed = [x for x in found.values() if x.prefill_chunks and x.decode_sequences]
        assert bool(mixed) is not bool(separate)
        assert tokens == 20 * REQUESTS


def test_separate_jobs_leap_to_the_same_books() -> None:
    fleet, specs, _ = world(1, "recompute")
    fleet = replace(fleet, options={"separate": 1})
    given = [r for spec in specs for r in requests(spec.name)]
    given = [replace(r, id=f"{r.model}-{r.id}") for r in given]
    (slow, one), (fast, other) = (run(fleet, specs, given, leaps=leaps) for leaps in (False, True))
    assert books(one) == books(other)
    assert slow == fast


@dataclass(frozen=True, slots=True)
class OneAtATime(ComputePolicy):
    """Begins prompts only where nothing decodes."""

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        (only,) = view.runnable
        phase = Phase.DECODE if view.work_of(only.model).decodes else Phase.PREFILL
        return ComputeDecision(only.model, phase=phase)


def test_a_policy_decides_which_phase_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "ORDERS", {**presets.ORDERS, "one": OneAtATime})
    fleet, (spec, *_), _ = world(1, "recompute")
    found, tokens = loads(replace(fleet, preset="recompute+one"), spec)
    assert tokens == 20 * REQUESTS
    first, _ = loads(replace(fleet, options={"separate": 1}), spec)
    batch, together = (max(x.decode_sequences for x in jobs.values()) for jobs in (found, first))
    assert batch < together


def test_a_job_takes_no_more_parts_than_it_was_given() -> None:
    fleet, _, _ = world(1, "recompute")
    lanes = Lanes(replace(fleet.device, lanes=2, threads=8))
    assert lanes.place(0) == (0, 8)
    assert lanes.place(1) == (0, 4)
    assert lanes.place(1, most=6) == (0, 6)
    assert lanes.place(0, most=20) == (0, 8)
    assert lanes.place(0, most=0) == (0, 1)


def test_orders_say_whether_models_come_in_turns() -> None:
    assert RoundRobin().in_turns
    assert RoundRobin(separate=1).in_turns
    assert not presets.resolve("balloon").compute.in_turns
