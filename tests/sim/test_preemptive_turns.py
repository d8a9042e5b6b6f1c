"""Whole runs in preemptive turns: nobody waits for others to finish, and nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from ballast.core.cost import activation_bytes
from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import SimulatedRun, simulate
from tests.policy.worlds import PAGE
from tests.sim.test_mirage_runs import COSTS, LINK, burst, spec

MODELS = "abc"
TURNS = {"temporal": 1.0, "quantum": 0.1}
PREEMPTIVE = {**TURNS, "preemptive": 1.0}
TimedOutputs = dict[str, list[tuple[float, int]]]


def served(
    preset: str,
    options: Mapping[str, float],
    arrivals: list[Submission],
    kv_pages: int = 120,
    leaps: bool = True,
) -> tuple[SimulatedRun, TimedOutputs, list[dict[str, Any]]]:
    """Each request's tokens and when they came, and what was decided; all are answered in full."""
    specs = [spec(name) for name in MODELS]
    weights = sum(s.weight_pages(PAGE) for s in specs)
    arena = max(activation_bytes(s, 128, 16) for s in specs)
    device = DeviceSettings(
        budget_bytes=(weights + kv_pages) * PAGE + arena + PAGE,
        page_bytes=PAGE,
        step_tokens=128,
        step_logits=16,
    )
    fleet = FleetSettings(models=(), device=device, preset=preset, options=dict(options))
    tokens: TimedOutputs = {s.id: [] for s in arrivals}
    ended: list[str] = []
    entries: list[dict[str, Any]] = []

    def said(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            tokens[output.request_id].append((now, output.token))
        else:
            assert isinstance(output, FinishedOutput), output
            ended.append(output.request_id)

    profile = MachineProfile(
        costs=dict.fromkeys(MODELS, COSTS), link=LinkRates.even(LINK), overhead=1e-4
    )
    done = simulate(fleet, specs, arrivals, profile, said, entries.extend, leaps=leaps)
    done.state.pool.validate()
    for m in done.state.models.values():
        m.weights.validate()
        m.kv.validate([])
        assert not m.running
    assert sorted(ended) == sorted(tokens)
    assert all(len(tokens[s.id]) == s.max_tokens for s in arrivals)
    return done, tokens, [e for e in entries if "action" in e]


PRESETS = ("recompute", "mirage", "kvswap")
SHARINGS = ({"pooled": 0.0}, {"pooled": 1.0})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_pause_changes_no_token(preset: str, sharing: dict[str, float]) -> None:
    arrivals = burst(40, 0.0, 60.0, seed=3)
    _, alone, _ = served(preset, sharing, arrivals)
    _, frozen, decisions = served(preset, {**sharing, **PREEMPTIVE}, arrivals)
    assert any(d["action"] == "Hold" and d["frozen"] for d in decisions)
    assert {i: [t for _, t in of] for i, of in frozen.items()} == {
        i: [t for _, t in of] for i, of in alone.items()
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_leaps_change_nothing_in_preemptive_turns(preset: str, sharing: dict[str, float]) -> None:
    arrivals = burst(40, 0.0, 60.0, seed=5)
    (_, one, a), (_, other, b) = (
        served(preset, {**sharing, **PREEMPTIVE}, arrivals, leaps=leaps) for leaps in (True, False)
    )
    assert one == other
    assert a == b


def test_a_first_token_waits_for_turns_and_not_for_answers() -> None:
    """One request of each model at once, in memory enough: the last one's first token comes after
    two turns and two jobs, where draining makes it wait for two whole answers."""
    arrivals = [
        Submission(id=name, model=name, prompt=(1, 2, 3), max_tokens=200, arrival=0.0)
        for name in MODELS
    ]
    first = {}
    for name, options in (("drains", TURNS), ("ends", PREEMPTIVE)):
        _, tokens, decisions = served("recompute", options, arrivals)
        assert not any(d["action"] == "Preempt" for d in decisions)
        first[name] = max(of[0][0] for of in tokens.values())
    assert first["ends"] < 2 * TURNS["quantum"] + 0.05
    assert first["drains"] > 2 * 200 * COSTS.base


def test_one_model_runs_at_a_time_and_each_again_and_again() -> None:
    arrivals = burst(40, 0.0, 200.0, seed=3)
    _, tokens, _ = served("recompute", {**PREEMPTIVE, "pooled": 0}, arrivals, kv_pages=600)
    model = {s.id: s.model for s in arrivals}
    order = [m for _, m in sorted((at, model[i]) for i, of in tokens.items() for at, _ in of)]
    changes = sum(a != b for a, b in pairwise(order))
    seconds = max(at for of in tokens.values() for at, _ in of)
    assert changes <= seconds / TURNS["quantum"] + len(arrivals)
    assert changes > len(MODELS)


def test_turns_do_not_idle_while_paused_requests_hold_the_memory() -> None:
    """A model that can admit nothing leaves its turn to the one whose requests could go on."""
    large = [
        Submission(id=f"a{i}", model="a", prompt=(1 + i,) * 400, max_tokens=100, arrival=0.0)
        for i in range(2)
    ]
    waits = Submission(id="b", model="b", prompt=(3,) * 300, max_tokens=1, arrival=0.05)
    ends = []
    for arrivals in (large, [*large, waits]):
        _, tokens, decisions = served("recompute", PREEMPTIVE, arrivals, kv_pages=130)
        assert not any(d["action"] == "Preempt" for d in decisions)
        ends.append(max(tokens[s.id][-1][0] for s in large))
    assert any(d["action"] == "Hold" and d["model"] == "a" and d["frozen"] for d in decisions)
    assert ends[1] < ends[0] + 0.01
