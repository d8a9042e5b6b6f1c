"""How often models come and go under `ballast`, however they are asked: the bound of
docs/presets.md."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.engine.state import DeviceState
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, PAGE, fleet, spec

MODELS = ("a", "b", "c")
WEIGHTS = 40
"""Pages of each; the device holds one and a half."""
PAGES = 66
LINK = 1e8
"""Bytes per second: a copy takes less time than a prompt."""
LEVELS = Slo(ttft=0.5, tpot=0.01)
Arrivals = Callable[[random.Random, int, float], Iterator[Submission]]


def cyclic(rng: random.Random, n: int, gap: float) -> Iterator[Submission]:
    """Each for the model that was asked longest ago: the worst case of recency."""
    at = 0.0
    for i in range(n):
        at += rng.uniform(0.2, 1.0) * gap
        yield asked(i, MODELS[i % len(MODELS)], at, rng.randrange(4, 60))


def streams(rng: random.Random, n: int, gap: float) -> Iterator[Submission]:
    """Long answers of all models at once: none is ever idle."""
    for i in range(n):
        yield asked(i, MODELS[i % len(MODELS)], gap * (i // len(MODELS)), 300)


def asked(i: int, model: str, at: float, output: int) -> Submission:
    prompt = tuple((7 * i + k) % 500 + 1 for k in range(40))
    return Submission(id=f"q{i}", model=model, prompt=prompt, max_tokens=output, arrival=at)


@pytest.mark.parametrize(("arrivals", "gap"), [(cyclic, 0.3), (cyclic, 3.0), (streams, 3.0)])
def test_a_model_that_came_gives_a_token_before_it_goes(arrivals: Arrivals, gap: float) -> None:
    tokens: Counter[str] = Counter()
    since: dict[str, int] = {}
    came: Counter[str] = Counter()
    ended: set[str] = set()
    model_of: dict[str, str] = {}
    in_vain: list[str] = []

    def received(now: float, output: Output) -> None:
        assert isinstance(output, TokenOutput | FinishedOutput)
        if isinstance(output, TokenOutput):
            tokens[model_of[output.request_id]] += 1
        else:
            ended.add(output.request_id)

    def observe(now: float, state: DeviceState) -> None:
        for name, m in state.models.items():
            if m.activations > came[name]:
                if came[name] and tokens[name] == since[name]:
                    in_vain.append(name)
                came[name], since[name] = m.activations, tokens[name]

    parts = tuple(n * PAGE for n in (8, 16, 16))
    specs = [replace(spec(n, WEIGHTS), slo=LEVELS, segment_bytes=parts) for n in MODELS]
    requests = list(arrivals(random.Random(int(gap * 100)), 30, gap))
    model_of |= {r.id: r.model for r in requests}
    costs = {s.name: COSTS for s in specs}
    profile = MachineProfile(costs=costs, link=LinkRates.even(LINK), overhead=1e-4)
    simulate(fleet("ballast", specs, PAGES), specs, requests, profile, received, observe=observe)
    assert len(ended) == len(requests)
    assert came.total() > len(MODELS), "models come and go"
    assert not in_vain
    assert came.total() <= len(requests) + len(MODELS)
