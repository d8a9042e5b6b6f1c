"""Whole runs of `mirage` in virtual time: what layers give, and that they come back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ballast.core.cost import StepCosts, activation_bytes
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.rotation import WHOLE
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.engine.state import DeviceState
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.policy.worlds import PAGE

LAYERS = 16
COSTS = StepCosts(6e-3, 4e-5, 5e-5, 2e-8, 1e-9)
LINK = 4 * PAGE / 1e-3
"""A layer of four pages takes a millisecond: six of them are hidden behind a decode step."""


def spec(name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=LAYERS,
        n_heads=4,
        kv_heads=2,
        head_dim=32,
        hidden=64,
        intermediate=64,
        vocab=512,
        dtype="float32",
        max_model_len=512,
        block_tokens=16,
        segment_bytes=(PAGE, *(4 * PAGE,) * LAYERS),
        fingerprint=name,
        eos_token_ids=(0,),
        max_running=16,
    )


def burst(n: int, at: float, rate: float, seed: int, models: str = "abc") -> list[Submission]:
    rng = random.Random(seed)
    made = []
    for i in range(n):
        at += rng.expovariate(rate)
        prompt = tuple(rng.randrange(1, 512) for _ in range(rng.randrange(20, 200)))
        length = rng.randrange(10, 60)
        made.append(
            Submission(
                id=f"q{seed}-{i}",
                model=rng.choice(models),
                prompt=prompt,
                max_tokens=length,
                arrival=at,
            )
        )
    return made


@dataclass
class Ran:
    """What came of a run."""

    state: DeviceState
    decisions: list[dict[str, Any]]
    first: dict[str, float]
    """Seconds to the first token, by request."""

    def of(self, action: str) -> list[dict[str, Any]]:
        return [d for d in self.decisions if d["action"] == action and d.get("refused") is None]

    @property
    def worst(self) -> float:
        return max(self.first.values())


def run(
    preset: str,
    options: Mapping[str, float],
    arrivals: list[Submission],
    kv_pages: int = 120,
    models: str = "abc",
) -> Ran:
    """All is answered, and in the end the books are right."""
    specs = [spec(name) for name in models]
    weights = sum(s.weight_pages(PAGE) for s in specs)
    arena = max(activation_bytes(s, 128, 16) for s in specs)
    device = DeviceSettings(
        budget_bytes=(weights + kv_pages) * PAGE + arena + PAGE,
        page_bytes=PAGE,
        step_tokens=128,
        step_logits=16,
    )
    fleet = FleetSettings(models=(), device=device, preset=preset, options=options)
    at = {s.id: s.arrival for s in arrivals}
    entries: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    ended: list[Output] = []

    def said(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            first.setdefault(output.request_id, now - at[output.request_id])
        elif isinstance(output, FinishedOutput | FailedOutput):
            ended.append(output)

    profile = MachineProfile(
        costs=dict.fromkeys(models, COSTS), link=LinkRates.even(LINK), overhead=1e-4
    )
    done = simulate(fleet, specs, arrivals, profile, said, entries.extend)
    done.state.pool.validate()
    for m in done.state.models.values():
        m.weights.validate()
        m.kv.validate([])
    assert len(ended) == len(arrivals)
    assert all(isinstance(end, FinishedOutput) for end in ended)
    return Ran(done.state, [e for e in entries if "action" in e], first)


WAYS = [{}, {"pooled": 0}, {"temporal": 1, "quantum": 0.2}]


@pytest.mark.parametrize("options", WAYS)
def test_nobody_starts_again_while_there_are_layers_to_be_had(options: dict[str, float]) -> None:
    arrivals = burst(60, 0.0, 60.0, seed=3)
    before = run("recompute", {"pooled": 1, **options}, arrivals)
    after = run("mirage", {"cap": 0, **options}, arrivals)
    assert len(before.of("Preempt")) > 0, "memory was never tight"
    lent = dict.fromkeys("abc", 0)
    for d in after.decisions:
        if d["action"] == "Remap":
            lent[str(d["model"])] = lent_by(d)
        elif d["action"] == "Preempt":
            assert set(lent.values()) == {LAYERS - 1}


def lent_by(decision: dict[str, Any]) -> int:
    rotation = decision["plan"].get("rotation", {"layers": [], "slots": 0})
    return len(rotation["layers"]) - int(rotation["slots"])


@pytest.mark.parametrize("options", WAYS)
def test_first_tokens_come_earlier_in_a_burst(options: dict[str, float]) -> None:
    """And where one pool serves all models fewer requests start again; within shares, which grow by
    what layers give up, as many do."""
    undone = {"recompute": 0, "mirage": 0}
    for seed in (4, 5, 6):
        arrivals = burst(60, 0.0, 60.0, seed=seed)
        before = run("recompute", {"pooled": 1, **options}, arrivals)
        after = run("mirage", options, arrivals)
        assert sum(after.first.values()) < sum(before.first.values())
        undone["recompute"] += len(before.of("Preempt"))
        undone["mirage"] += len(after.of("Preempt"))
    if options.get("pooled", 1):
        assert undone["mirage"] < undone["recompute"]


@pytest.mark.parametrize("options", WAYS)
def test_layers_come_back_when_the_peak_is_over(options: dict[str, float]) -> None:
    late = burst(1, 30.0, 10.0, seed=6)
    arrivals = burst(60, 0.0, 60.0, seed=5) + late
    lent = run("mirage", {**options, "reversion": 0}, arrivals)
    assert any(m.rotation.n_freed for m in lent.state.models.values())
    back = run("mirage", {**options, "cooldown": 0.5}, arrivals)
    assert all(m.rotation == WHOLE for m in back.state.models.values())
    assert all(m.kv.pages == m.kv.counts.cached_pages for m in back.state.models.values())


@pytest.mark.parametrize("options", WAYS)
def test_layers_do_not_come_and_go(options: dict[str, float]) -> None:
    """Requests come in clumps, after pauses shorter and longer than the cooldown: layers come back,
    and none that was lent within it. Without a cooldown the same requests drive them to and fro."""
    clumps = (burst(24, at, 1e4, seed) for seed, at in enumerate((0.0, 1.7, 6.7, 8.4)))
    arrivals = [request for clump in clumps for request in clump]
    cooldown = 1.0

    def returns(seconds: float) -> list[bool]:
        """For each return of layers, whether some were lent in the `cooldown` before it."""
        remaps = run("mirage", {**options, "cooldown": seconds}, arrivals).of("Remap")
        back = sorted({d["at"] for d in remaps if d["why"] == "the peak is over"})
        lent = [d["at"] for d in remaps if "needs pages" in str(d["why"])]
        return [any(at - cooldown < moment < at for moment in lent) for at in back]

    calm, hasty = returns(cooldown), returns(0.0)
    assert calm
    assert not any(calm)
    assert sum(hasty) > len(calm)
