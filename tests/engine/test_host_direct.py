"""Weights that passes read in host memory: no token changes, and no page is used for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.actions import Action, Decision, Reside
from ballast.core.request import Submission
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.view import DeviceView, Residency
from ballast.memory.address_space import TABLE_BYTES
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claims import earliest
from ballast.policy.plans import activation, eviction, is_activation
from ballast.policy.presets import Preset
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import make_base_and_tuned, make_llama
from tests.engine.fresh import check_views
from tests.engine.test_partial_residency import evict, rounds
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet, need


@dataclass
class RandomPlaces(MemoryPolicy):
    """Asks `policy`; half of the models that it activates are read in place, and every few
    milliseconds some go, wholly or in part, or have some of their segments elsewhere, whatever
    requests they run.

    Not pure: it draws from its own generator.
    """

    policy: MemoryPolicy
    every: float = 0.02
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    due: float = 0.0
    places: Counter[bool] = field(default_factory=Counter)
    gone: int = 0
    """Models that were read in place when they were evicted."""
    left: int = 12
    """Evictions to come."""
    moves: int = 24
    """Changes of places to come."""
    plans: dict[str, ResidencyPlan] = field(default_factory=dict)
    moved: Counter[bool] = field(default_factory=Counter)
    """Segments that were laid in host memory (True), or got pages, with requests running."""

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        actions: list[Action] = [self._placed(view, a) for a in decision.actions]
        self._count(view)
        if view.now >= self.due and self.moves > self.left:
            self.due = view.now + self.every * self.rng.uniform(0.2, 1.0)
            self.moves -= bool(self.moved[False] and self.moved[True])
            here = [m for m in view.models if m.residency is Residency.RESIDENT]
            busy = [m for m in here if m.running] or here
            if busy and not actions:
                m = self.rng.choice(busy)
                units = range(len(m.plan.units))
                read = [i for i in units if self.rng.random() < self.rng.choice((0.0, 0.5, 1.0))]
                actions.append(Reside(m.name, m.plan.reading(frozenset(read))))
        elif view.now >= self.due and self.left:
            self.due = view.now + self.every * self.rng.uniform(0.2, 2.0)
            asked_for = {getattr(a, "model", "") for a in actions}
            here = [m for m in view.models if m.residency is Residency.RESIDENT]
            wanted = [m for m in here if bool(m.plan.in_place) == self.left % 2]
            m = self.rng.choice(wanted or here or view.models)
            if m in here and m.name not in asked_for:
                part = m.idle and m.present_pages and self.rng.random() < 0.5
                pages = self.rng.randint(1, m.present_pages) if part else None
                self.gone += bool(m.plan.in_place)
                self.left -= 1
                actions.append(eviction(m, "", pages))
        wake = self.due if self.left or self.moves else None
        return replace(decision, actions=tuple(actions), wake_at=earliest(decision.wake_at, wake))

    def _count(self, view: DeviceView) -> None:
        """Count the segments of running models that have changed places since the last view."""
        for m in view.models:
            before = self.plans.get(m.name, m.plan)
            if m.running and not (before.absent or m.plan.absent):
                self.moved[True] += len(m.plan.in_place - before.in_place)
                self.moved[False] += len(before.in_place - m.plan.in_place)
            self.plans[m.name] = m.plan

    def _placed(self, view: DeviceView, action: Action) -> Action:
        if not isinstance(action, Reside) or not is_activation(view, action):
            return action
        in_place = self.places[True] <= self.places[False]
        self.places[in_place] += 1
        return activation(view, view.model(action.model), action.why, in_place=in_place)


def check(server: InProcess) -> None:
    """Validate the state once all requests have ended."""
    server.drain()
    state = server.device.state
    state.validate()
    check_views(state)
    for m in state.models.values():
        assert m.weights.range.os_backed() == m.weights.range.backed + m.weights.range.aliased
        if state.pool.vm.table_pages > 1:
            for s in m.weights.segments:  # page tables move by whole tables between the two
                assert s.address % TABLE_BYTES == s.host_address % TABLE_BYTES == 0


def check_tokens(
    server: InProcess,
    policy: RandomPlaces,
    waves: Sequence[Sequence[Submission]],
    alone: Mapping[str, Answer],
) -> None:
    """Serve `waves` while segments change places at random; every answer is as it was `alone`."""
    loop = server.device.loop
    loop.use_preset(Preset("random", policy, loop.preset.compute, loop.preset.order))
    answers = {id: a for wave in waves for id, a in server.generate(wave).items()}
    for n in range(40):  # segments come to pages when these are free, then some go
        if policy.moved[False] and policy.moved[True] and policy.gone:
            break
        wave = waves[n % len(waves)]
        answers |= server.generate([replace(r, id=f"{r.id}/{n}") for r in wave])
    policy.left = policy.moves = 0
    check(server)
    assert min(policy.places[False], policy.places[True], policy.gone) > 0
    assert min(policy.moved[False], policy.moved[True]) > 0
    for id, answer in answers.items():
        expected = alone[id.partition("/")[0]]
        assert answer.tokens == expected.tokens, id
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_no_token_changes(tmp_path: Path) -> None:
    base, tuned = make_base_and_tuned(tmp_path)
    other = make_llama(tmp_path / "other", 7, num_hidden_layers=5)
    paths = dict(zip(NAMES, (base, tuned, other), strict=True))
    settings = with_path(fleet(paths), "fused", "packed")
    waves = [[replace(r, max_tokens=24) for r in wave] for wave in rounds(4)]
    with InProcess(settings) as server:
        alone = {id: a for wave in waves for id, a in server.generate(wave).items()}
    settings = with_path(fleet(paths, need(paths)), "fused", "packed")
    with InProcess(settings) as server:
        check_tokens(server, RandomPlaces(server.device.loop.preset.memory), waves, alone)


def test_models_that_do_not_fit_are_served_together_from_host_memory(tmp_path: Path) -> None:
    paths = {n: make_llama(tmp_path / n, i, num_hidden_layers=4) for i, n in enumerate(NAMES)}
    requests = asked(2)
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
        weights = min(m.weights.pages for m in server.device.state.models.values())
    story = tmp_path / "story.jsonl"
    settings = fleet(paths, pages=weights + 4, preset="c2cserve")
    settings = with_path(settings, "generic", "plain")
    with InProcess(replace(settings, story_path=str(story))) as server:
        answers = server.generate(requests)
        state = server.device.state
        for m in state.models.values():
            assert (m.residency, m.activations) == (Residency.RESIDENT, 1)
            assert state.pool.ledger.owned(m.weights.owner) == m.weights.present_pages == 0
        report = server.device.snapshot()
        assert {m.in_place_layers for m in report.models} == {4}
        assert {m.weight_pages for m in report.models} == {0}
        evict(server)
        again = server.generate([replace(r, id=f"{r.id}+") for r in requests])
        check(server)
    for id, answer in alone.items():
        assert answers[id].tokens == again[f"{id}+"].tokens == answer.tokens, id
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
