"""No request that the device could serve alone fails as `out_of_memory`, whichever jobs fail.

Nobody is held for a request that lacks pages once nothing runs that could free them: jobs that fail
preempt all of their requests where these have recurrent states. Then a model runs nothing, though
it holds most of the device, and its requests are older than the one it is held for.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from ballast.core.event import Event, FailedOutput, FinishedOutput, JobDoneEvent, JobFailedEvent
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec, StateTensor
from ballast.core.settings import DeviceSettings
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.sim.scenarios import PLACES, Ask, Model, Scenario, submission
from tests.sim.test_leap import COSTS

STEP = 0.1
"""Seconds of a job at least: of a machine that has much else to do."""


WORLDS = 6


class Failing:
    """A device some of whose jobs of several requests fail: of each model the first that ends after
    `since` seconds, and one of every `every` (0: none)."""

    def __init__(
        self, preset: str, specs: list[ModelSpec], settings: DeviceSettings, step: float = STEP
    ) -> None:
        costs = dict.fromkeys((s.name for s in specs), replace(COSTS, base=step))
        profile = MachineProfile(costs=costs, link=LinkRates.even(1e8), overhead=3e-4)
        self.ends: dict[str, FinishedOutput | FailedOutput] = {}
        self.since: dict[str, float] = {}
        self.every = 0
        self.failed: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self.sim = SimDevice(settings, specs, resolve(preset), profile, self._ended, leaps=False)
        self._schedule = self.sim._heap.schedule
        self.sim._heap.schedule = self._failing  # type: ignore[method-assign, assignment]

    def _failing(self, at: float, event: Event, *more: object) -> int:
        if isinstance(event, JobDoneEvent) and len(event.job.work) > 1:
            model = event.job.model
            self._jobs[model] += 1
            due = at >= self.since.get(model, math.inf)
            if due:
                del self.since[model]
            if due or (self.every and self._jobs[model] % self.every == 0):
                self.failed[model] += 1
                event = JobFailedEvent(event.job, "a job that fails")
        return self._schedule(at, event, *more)  # type: ignore[arg-type]

    def _ended(self, now: float, output: object) -> None:
        if isinstance(output, FinishedOutput | FailedOutput):
            self.ends[output.request_id] = output

    @staticmethod
    def may_end(end: FinishedOutput | FailedOutput) -> bool:
        """Whether it finished, or was refused on arrival, as beyond its model's share."""
        return isinstance(end, FinishedOutput) or end.code == "insufficient_memory"


def stateful(spec: ModelSpec) -> ModelSpec:
    return replace(spec, states=(StateTensor("layers.0", "recurrent", 0, (4, 4)),))


def test_models_held_for_a_request_go_on_when_nothing_else_runs() -> None:
    """`m1` runs two requests; a third, long one waits 10 s for pages which the older requests of
    `m0` and that model's weights take, and is put first. Then jobs of both models fail."""
    world = Scenario(
        preset="balloon",
        models=(Model(weight_pages=10), Model(weight_pages=2)),
        more_weights=100,
        kv_pages=18,
        acts=(),
    )
    failing = Failing("balloon", [stateful(s) for s in world.specs], world.settings, 0.5)
    small = Ask(after=0.0, model=0, prompt=16, output=60)
    for k, (model, at, ask) in enumerate(
        (
            ("m1", 0.0, small),
            ("m1", 0.0, small),
            ("m0", 0.1, small),
            ("m0", 0.1, small),
            ("m1", 0.2, replace(small, prompt=500, output=4)),
            ("m0", 12.0, replace(small, output=1)),  # the queues are looked at again
        )
    ):
        failing.sim.submit(submission(ask, model, k, at))
    failing.since = {"m1": 20.0, "m0": 20.4}
    failing.sim.finish(12.5)
    assert failing.failed == {"m0": 1, "m1": 1}
    assert all(isinstance(end, FinishedOutput) for end in failing.ends.values()), failing.ends
    assert len(failing.ends) == 6


def test_heads_of_queues_whose_models_are_in_each_others_way_do_not_fail_older_requests() -> None:
    """Two models run two late requests each; a long prompt in time waits before each model's next,
    and lacks the other's weights. Then jobs of both models fail, and nothing runs: the model with
    the oldest request stays."""
    slow = Model(weight_pages=10, ttft=30.0)
    world = Scenario(preset="balloon", models=(slow, slow), more_weights=100, kv_pages=18, acts=())
    failing = Failing("balloon", [stateful(s) for s in world.specs], world.settings, 0.5)
    small = Ask(after=0.0, model=0, prompt=16, output=60)
    long = replace(small, prompt=500, output=4)
    for k, (model, at, ask) in enumerate(
        (
            ("m0", 0.0, small),
            ("m0", 0.0, small),
            ("m1", 0.1, small),
            ("m1", 0.1, small),
            ("m0", 0.2, long),
            ("m1", 0.2, long),
        )
    ):
        failing.sim.submit(submission(ask, model, k, at))
    failing.since = {"m0": 8.0, "m1": 8.4}
    failing.sim.finish(1.0)
    assert failing.failed == {"m0": 1, "m1": 1}
    assert all(isinstance(end, FinishedOutput) for end in failing.ends.values()), failing.ends
    assert len(failing.ends) == 6


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_fails_a_request_that_fits_alone_whichever_jobs_fail(preset: str) -> None:
    """Small worlds drawn at random: all requests come at once, steps take long, so that models
    starve, and every third job of several requests fails."""
    failed = sum(_serve(preset, seed) for seed in range(WORLDS))
    assert failed > 0


@pytest.mark.parametrize("preset", ["lru", "swap", "balloon", "prism", "ballast"])
def test_models_that_starve_do_not_evict_each_other_without_end(preset: str) -> None:
    """Prompts take several steps of half a second, and four models do not fit beside each other:
    each evicted the one that had just come, before it had served anything."""
    failing = _served(preset, 5, 0.5)
    assert failing.sim.clock.now() < 300.0
    models = failing.sim.state.models.values()
    assert sum(m.activations for m in models) < 120


def _serve(preset: str, seed: int) -> int:
    """Serve a random world; return how many of its jobs failed."""
    return _served(preset, seed, STEP).failed.total()


def _served(preset: str, seed: int, step: float) -> Failing:
    """Serve a random world, whose steps take `step` seconds."""
    rng = random.Random(seed)
    models = tuple(
        Model(weight_pages=rng.randint(1, 10), kv_heads=rng.choice((1, 2)))
        for _ in range(rng.randint(2, 4))
    )
    more = 100 if preset in PLACES else rng.choice((0, 30, 100))
    kv_pages = rng.choice((60, 90)) if preset in PLACES else rng.choice((44, 60))
    world = Scenario(preset=preset, models=models, more_weights=more, kv_pages=kv_pages, acts=())
    specs = [stateful(s) if rng.random() < 0.7 else s for s in world.specs]
    failing = Failing(preset, specs, world.settings, step)
    failing.every = 3
    for k in range(12):
        long = rng.random() < 0.3
        ask = Ask(after=0.0, model=0, prompt=260 if long else 16, output=rng.choice((4, 40)))
        failing.sim.submit(submission(ask, f"m{rng.randrange(len(models))}", k, 0.01 * k))
    failing.sim.finish(1.0)
    wrong = [end for end in failing.ends.values() if not failing.may_end(end)]
    assert not wrong, f"seed {seed}: {wrong}"
    assert len(failing.ends) == 12
    return failing
