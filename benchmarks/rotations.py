"""A policy that changes where layers are at random, every few steps, beside one that serves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ballast.core.actions import Action, Decision
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.view import DeviceView, Residency
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claims import earliest
from ballast.policy.plans import eviction, remap


@dataclass
class RandomRotations(MemoryPolicy):
    """Asks `policy`, and every `every` seconds for another rotation of each model on the device;
    instead, `evictions` times in all, now and then for the eviction of a part of it.

    Not pure: it draws from its own generator.
    """

    policy: MemoryPolicy
    every: float = 0.005
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    due: float = 0.0
    evictions: int = 0

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        actions: list[Action] = list(decision.actions)
        if view.now >= self.due:
            self.due = view.now + self.every * self.rng.uniform(0.2, 2.0)
            for m in view.models:
                if m.residency is not Residency.RESIDENT or not m.rotatable:
                    continue
                if self.evictions and self.rng.random() < 0.05:
                    self.evictions -= 1
                    pages = self.rng.randint(1, m.present_pages)
                    actions.append(eviction(m, "at random", pages))
                elif self.rng.random() < 0.7:
                    actions.append(remap(m, self.draw(m.rotatable), "at random"))
        return replace(
            decision, actions=tuple(actions), wake_at=earliest(decision.wake_at, self.due)
        )

    def draw(self, rotatable: tuple[int, ...]) -> Rotation:
        """Any number of layers, each in any of any number of slots."""
        m = self.rng.randint(1, len(rotatable))
        if m == 1:
            return WHOLE
        layers = self.rng.sample(rotatable, m)
        slots = self.rng.randint(1, m - 1)
        stated = [*range(slots), *self.rng.choices(range(slots), k=m - slots)]
        return Rotation.of(dict(zip(layers, stated, strict=True)))
