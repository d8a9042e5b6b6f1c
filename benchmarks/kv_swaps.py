"""A policy that changes at random which layers' KV is swapped, beside one that serves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ballast.core.actions import Action, Decision, Reside
from ballast.core.kv_swap import spread
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.view import DeviceView, Residency
from ballast.policy.base import MemoryPolicy


@dataclass
class RandomSwaps(MemoryPolicy):
    """Asks `policy`, and with every decision swaps KV of more or fewer layers than before, where it
    may.

    Not pure: it draws from its own generator.
    """

    policy: MemoryPolicy
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        actions: list[Action] = list(decision.actions)
        for m in view.models:
            now = m.kv_rotation
            if m.residency is not Residency.RESIDENT or m.kv_swapping or now is None:
                continue
            n = self.rng.randint(0, m.spec.n_layers)
            slots = self.rng.randint(1, 3)
            wanted = Rotation(spread(m.spec.n_layers, n), slots) if n > slots else WHOLE
            actions.append(Reside(m.name, replace(m.plan, kv=wanted), "at random"))
        return replace(decision, actions=tuple(actions), wake_at=view.now + 0.003)
