"""A policy that has random numbers of KV blocks staged, beside what `swiftcache` does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from ballast.core.actions import Action, Decision, Stage
from ballast.core.view import DeviceView
from ballast.policy import presets
from ballast.policy.memory.swiftcache import SwiftCache

NAME = "staging"


@dataclass(frozen=True)
class RandomStages(SwiftCache):
    """Not pure: it draws from its own generator. `every`: seconds from a decision to the next; 0:
    when something happens."""

    every: float = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = SwiftCache.__call__(self, view, memo)
        actions: list[Action] = list(decision.actions)
        for m in view.models:
            s = m.staging
            if s is not None and m.running and self.rng.random() < 0.5:
                blocks = self.rng.randint(0, s.staged + s.home)
                order = self.rng.sample([r.id for r in m.running], len(m.running))
                actions.append(Stage(m.name, blocks, "at random", tuple(order)))
        wake = view.now + self.every if self.every else decision.wake_at
        return replace(decision, actions=tuple(actions), wake_at=wake)


def add_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the policy a preset for one test; returns its name."""
    kinds = {**presets._KINDS, NAME: presets._Kind(RandomStages, "deadline")}
    monkeypatch.setattr(presets, "_KINDS", kinds)
    monkeypatch.setattr(presets, "PRESETS", tuple(kinds))
    return NAME
