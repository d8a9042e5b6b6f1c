"""What was accepted fits: however tight memory is, every preset answers it in full."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ballast.core.cost import UNMEASURED, activation_bytes
from ballast.core.event import FailedOutput, FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, ceil_div
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.effort import some

LONGEST = 180
"""Tokens of prompt and output."""


def world(
    seed: int, preset: str, lanes: int = 1
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """A few models, room for the largest of them and few requests, and a burst of requests."""
    rng = random.Random(seed)
    page = rng.choice([16, 64, 256]) * KiB
    specs = [
        ModelSpec(
            name=f"m{i}",
            n_layers=rng.choice([2, 3, 5]),
            n_heads=4,
            kv_heads=rng.choice([1, 2, 4]),
            head_dim=32,
            hidden=64,
            intermediate=64,
            vocab=256,
            dtype="float32",
            max_model_len=512,
            block_tokens=rng.choice([4, 16]),
            segment_bytes=tuple(rng.randint(1, 6) * page // 2 for _ in range(4)),
            fingerprint=str(i),
            max_running=8,
        )
        for i in range(rng.randint(1, 4))
    ]
    arena = max(ceil_div(activation_bytes(s, 32, 8), page) + 1 for s in specs)
    weights = max(weight_pages([s], page) for s in specs)
    kv = max(ceil_div(LONGEST * s.kv_bytes_per_token, page) + 1 for s in specs)
    pages = lanes * arena + weights + rng.randint(1, 5) * kv
    device = DeviceSettings(
        budget_bytes=pages * page, page_bytes=page, step_tokens=32, step_logits=8, lanes=lanes
    )
    models = tuple(ModelSettings(name=s.name, path="") for s in specs)
    requests = [
        Submission(
            id=f"r{i}",
            model=rng.choice(specs).name,
            prompt=tuple(rng.randrange(256) for _ in range(rng.randint(1, 120))),
            max_tokens=rng.randint(1, 60),
            arrival=rng.choice([0.0, 0.3 * rng.random()]),
            ignore_eos=True,
            priority=rng.choice([0, 0, 0, 2, -1]),
        )
        for i in range(rng.randint(2, 12))
    ]
    requests.sort(key=lambda r: r.arrival)
    return FleetSettings(models=models, device=device, preset=preset), specs, requests


SEEDS = [(0, 1), (350, 1), (550, 1), (0, 2), (350, 3)]


@pytest.mark.parametrize("preset", ["balloon", "swap"])
@pytest.mark.parametrize(("first", "lanes"), SEEDS)
def test_accepted_requests_are_answered(preset: str, first: int, lanes: int) -> None:
    answered(preset, {}, first, lanes)


TURNS = {"temporal": 1, "quantum": 0.1}


@pytest.mark.parametrize("preset", ["recompute", "mirage"])
@pytest.mark.parametrize(
    "options",
    [
        {"pooled": 0},
        {"pooled": 1},
        {"pooled": 1, **TURNS},
        {"pooled": 0, **TURNS, "preemptive": 1},
        {"pooled": 1, **TURNS, "preemptive": 1},
    ],
)
@pytest.mark.parametrize(("first", "lanes"), SEEDS[:1] + SEEDS[-1:])
def test_accepted_requests_are_answered_by_models_that_keep_their_places(
    preset: str, options: Mapping[str, float], first: int, lanes: int
) -> None:
    answered(preset, options, first, lanes, worlds=20)


def answered(
    preset: str, options: Mapping[str, float], first: int, lanes: int, worlds: int = 50
) -> None:
    """In worlds from seed `first` on all that was accepted ends well, though memory is tight."""
    preempted = 0
    for seed in some(range(first, first + worlds), 20):
        fleet, specs, requests = world(seed, preset, lanes)
        fleet = replace(fleet, options=options)
        costs = {s.name: UNMEASURED for s in specs}
        profile = MachineProfile(costs=costs, link=LinkRates.even(1e9), overhead=1e-3)
        said: list[Output] = []
        done = simulate(fleet, specs, requests, profile, lambda _, o, said=said: said.append(o))
        done.state.pool.validate()
        ends = [o for o in said if isinstance(o, FinishedOutput | FailedOutput)]
        assert len(ends) == len(requests)
        for end in ends:
            # Refused on arrival is another matter: it could never fit.
            answered = isinstance(end, FinishedOutput) or end.code == "insufficient_memory"
            assert answered, f"seed {seed}: {end}"
        preempted += sum(m.preemptions for m in done.state.models.values())
    assert preempted > 0, "memory was never tight"
