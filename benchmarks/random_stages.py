"""A policy that changes at random how many KV blocks are on the host, beside one that serves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ballast.core.actions import Action, Decision, Stage
from ballast.core.view import DeviceView
from ballast.policy.base import MemoryPolicy


@dataclass
class RandomStages(MemoryPolicy):
    """Asks `policy`, and with every decision has more or fewer blocks of running requests staged,
    where they may be.

    Not pure: it draws from its own generator.
    """

    policy: MemoryPolicy
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        actions: list[Action] = [a for a in decision.actions if not isinstance(a, Stage)]
        for m in view.models:
            s = m.staging
            if s is not None and not s.moving and m.running:
                blocks = self.rng.randint(0, s.staged + s.home)
                actions.append(Stage(m.name, blocks, "at random"))
        return replace(decision, actions=tuple(actions), wake_at=view.now + 0.003)
