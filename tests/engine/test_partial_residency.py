"""Parts of idle models' weights go and come back while others are served: no token changes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Action, Decision, EvictCommand
from ballast.core.request import Submission
from ballast.core.view import DeviceView, Residency
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claims import earliest
from ballast.policy.plans import eviction
from ballast.policy.presets import Preset
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import make_base_and_tuned, make_llama
from tests.engine.fresh import check_views
from tests.engine.test_rotating import with_path
from tests.live.test_command_executor import ordered
from tests.live.test_live_device import NAMES, asked, fleet, need


@dataclass
class RandomEvictions(MemoryPolicy):
    """Asks `policy`, and every few milliseconds evicts some parts of models that are idle.

    Not pure: it draws from its own generator.
    """

    policy: MemoryPolicy
    every: float = 0.01
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    due: float = 0.0
    parts: Counter[str] = field(default_factory=Counter)

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        actions: list[Action] = list(decision.actions)
        if view.now >= self.due:
            self.due = view.now + self.every * self.rng.uniform(0.2, 2.0)
            asked_for = {getattr(a, "model", "") for a in actions}
            for m in view.models:
                here = m.residency in (Residency.RESIDENT, Residency.ABSENT) and m.present_pages
                if here and m.idle and m.name not in asked_for:
                    self.parts[m.name] += 1
                    actions.append(eviction(m, "", self.rng.randint(1, m.present_pages)))
        return replace(
            decision, actions=tuple(actions), wake_at=earliest(decision.wake_at, self.due)
        )


def evict(server: InProcess, pages: int | None = None) -> None:
    """Evict part of model a, or all that is left of it, and wait for that."""
    assert ordered(server, EvictCommand("a", pages=pages)).code is None


def rounds(n: int) -> list[list[Submission]]:
    """Requests of one or two models at a time, so that others are idle meanwhile."""
    rng = random.Random(n)
    return [
        [
            replace(r, id=f"{r.id}-{i}", max_tokens=6)
            for r in asked(2, 0.8 * (i % 2), models=tuple(rng.sample(NAMES, rng.randint(1, 2))))
        ]
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("model_impl", "linear", "tight"), [("generic", "plain", False), ("fused", "packed", True)]
)
def test_no_token_changes(tmp_path: Path, model_impl: str, linear: str, tight: bool) -> None:
    paths = {n: make_llama(tmp_path / n, i, num_hidden_layers=4 + i) for i, n in enumerate(NAMES)}
    settings = with_path(fleet(paths), model_impl, linear)
    waves = rounds(8)
    with InProcess(settings) as server:
        alone = {id: a for wave in waves for id, a in server.generate(wave).items()}
    if tight:
        settings = with_path(fleet(paths, need(paths)), model_impl, linear)
    story = tmp_path / "story.jsonl"
    with InProcess(replace(settings, story_path=str(story))) as server:
        loop, state = server.device.loop, server.device.state
        policy = RandomEvictions(loop.preset.memory)
        loop.use_preset(Preset("random", policy, loop.preset.compute, loop.preset.order))
        answers = {id: a for wave in waves for id, a in server.generate(wave).items()}
        policy.due = 1e9
        server.drain()
        state.validate()
        check_views(state)
        for m in state.models.values():
            assert m.weights.range.os_backed() == m.weights.range.backed + m.weights.range.aliased
        moved = sum(m.activations for m in state.models.values())
    assert policy.parts.total() > 3
    assert moved > len(NAMES)
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)


def test_models_with_shared_segments_change_no_token(tmp_path: Path) -> None:
    base, tuned = make_base_and_tuned(tmp_path)
    paths = dict(zip(NAMES, (base, tuned, base), strict=True))
    waves = rounds(8)
    with InProcess(fleet(paths)) as server:
        alone = {id: a for wave in waves for id, a in server.generate(wave).items()}
        loop, state = server.device.loop, server.device.state
        policy = RandomEvictions(loop.preset.memory)
        loop.use_preset(Preset("random", policy, loop.preset.compute, loop.preset.order))
        again = [[replace(r, id=f"{r.id}+") for r in wave] for wave in waves]
        answers = {id: a for wave in again for id, a in server.generate(wave).items()}
        policy.due = 1e9
        server.drain()
        state.validate()
        check_views(state)
    for id, answer in alone.items():
        assert answers[f"{id}+"].tokens == answer.tokens, id


def test_cached_prefixes_outlive_the_loss_of_a_part(tmp_path: Path) -> None:
    paths = {n: make_llama(tmp_path / n, i, num_hidden_layers=4) for i, n in enumerate(NAMES)}
    settings = fleet(paths)
    settings = replace(settings, device=replace(settings.device, prefix_cache=True))
    story = tmp_path / "story.jsonl"
    (request,) = asked(2, models=("a",))[1:]
    long = replace(request, prompt=request.prompt * 3)
    with InProcess(replace(settings, story_path=str(story))) as server:
        first = server.generate([long])[long.id]
        m = server.device.state.models["a"]
        evict(server, pages=1)
        assert m.residency is Residency.ABSENT
        assert 0 < m.weights.present_pages < m.weights.pages
        report = server.device.snapshot().models[0]
        assert (report.weight_pages, report.whole_pages) == (
            m.weights.present_pages,
            m.weights.pages,
        )
        assert report.absent_layers == 1
        cached = m.kv.counts.cached_pages
        assert cached > 0
        again = server.generate([replace(long, id="again")])["again"]
        assert m.cached_tokens > 0
        evict(server, pages=1)
        evict(server)
        assert m.weights.plan.empty
        assert m.kv.pages == 0
        server.drain()
        server.device.state.validate()
    assert again.tokens == first.tokens
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
