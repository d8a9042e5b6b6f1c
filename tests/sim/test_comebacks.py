"""Evicted models that come back before they are asked for, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.scenarios import Seeded, scenario
from tests.sim.test_simulate import COSTS, OutputLog, fleet, spec, watch
from tests.sim.watching import Run

SPECS = [spec("first"), spec("second")]
PAGES = 60
"""Weights take 40; the six requests for `second` that come at once need 48 of KV."""


class Timed(OutputLog):
    """When each request's first token came, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, float] = {}

    def __call__(self, now: float, output: Output) -> None:
        super().__call__(now, output)
        if isinstance(output, TokenOutput):
            self.first.setdefault(output.request_id, now)


def ask(id: str, model: str, at: float, n: int = 20, output: int = 2) -> Submission:
    prompt = tuple(random.Random(id).choices(range(1, 512), k=n))
    return Submission(id=id, model=model, prompt=prompt, max_tokens=output, arrival=at)


def run(arrivals: list[Submission], **options: float) -> tuple[Timed, Counter[str]]:
    received = Timed()
    profile = MachineProfile(
        costs={s.name: COSTS for s in SPECS}, link=LinkRates.even(1e7), overhead=1e-4
    )
    settings = replace(fleet("balloon", SPECS, PAGES), options=options)
    entries: list[dict[str, Any]] = []
    result = simulate(settings, SPECS, arrivals, profile, received, entries.extend, observe=watch)
    assert all(isinstance(received.ended[s.id], FinishedOutput) for s in arrivals)
    acts = Counter(f"{e['action']} {e['model']}" for e in entries if e.get("action"))
    acts["preempted"] = sum(m.preemptions for m in result.state.models.values())
    result.state.validate()
    return received, acts


def test_a_model_is_there_again_when_it_is_asked_for() -> None:
    peak = [ask(f"peak{i}", "second", 1.0, n=400, output=80) for i in range(6)]
    arrivals = [ask("early", "first", 0.0), *peak, ask("late", "first", 8.0)]
    without, acts = run(arrivals)
    assert acts["Evict first"] == 1
    restored, acts = run(arrivals, restore=1)
    assert acts["Evict first"] == 1
    assert acts["Activate first"] == 2
    copy = 20 * 65536 / 1e7
    assert restored.first["late"] < without.first["late"] - 0.9 * copy
    same = [s.id for s in peak]
    assert [restored.first[id] for id in same] == [without.first[id] for id in same]


def test_nobody_waits_longer_or_is_undone_for_models_that_come_back() -> None:
    """Peaks come again and again, often while the other model is on its way."""
    arrivals = []
    for k in range(6):
        arrivals.append(ask(f"early{k}", "first", 2.1 * k))
        peak = (ask(f"peak{k}-{i}", "second", 2.1 * k + 0.9, n=400, output=80) for i in range(6))
        arrivals += peak
    without, before = run(arrivals)
    restored, after = run(arrivals, restore=1)
    assert after["Activate first"] >= before["Activate first"] > 1
    assert after["preempted"] <= before["preempted"]
    waits = [sum(h.first[s.id] - s.arrival for s in arrivals) for h in (restored, without)]
    assert waits[0] <= waits[1]


@pytest.mark.parametrize("seed", range(40, 46))
def test_random_fleets_keep_their_promises_where_models_come_back(seed: int) -> None:
    found = scenario(Seeded(random.Random(seed)), ("balloon",))
    Run(replace(found, options=(*found.options, ("restore", 1.0))))()
