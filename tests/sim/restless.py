"""A preset that lets random layers rotate, over one that does the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ballast.core.actions import Action, Decision, Remap
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.settings import FleetSettings
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy import presets
from tests.sim.test_enough_memory import world

NAME = "restless"
BASES = ("static", "swap", "balloon")


@dataclass(frozen=True, slots=True)
class Restless:
    """What it asks for depends on all that it is told of times."""

    base: float = 0
    """A place in `BASES`."""
    every: float = 0.05
    """Most seconds until it changes its mind."""

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        inner, asked = memo if isinstance(memo, tuple) else (None, 0)
        decision = presets.resolve(BASES[int(self.base)]).device(view, inner)
        told = [(m.decode_seconds, m.prefill_seconds) for m in view.models]
        rng = random.Random(repr((asked, told)))
        there = [m for m in view.models if m.residency is Residency.RESIDENT and m.rotatable]
        remaps: list[Action] = []
        if there and rng.random() < 0.5:
            m = rng.choice(there)
            remaps.append(Remap(m.name, self._rotation(m, rng), "restless"))
        soon = view.now + rng.random() * self.every
        return replace(
            decision,
            actions=(*decision.actions, *remaps),
            memo=(decision.memo, asked + 1),
            wake_at=soon if decision.wake_at is None else min(soon, decision.wake_at),
        )

    @staticmethod
    def _rotation(m: ModelView, rng: random.Random) -> Rotation:
        n = rng.randint(1, len(m.rotatable))
        layers = tuple(sorted(rng.sample(m.rotatable, n)))
        return Rotation(layers, rng.randint(1, min(3, n - 1))) if n > 1 else WHOLE


def register(patch: pytest.MonkeyPatch) -> None:
    """It is one of the presets."""
    patch.setitem(presets._KINDS, NAME, presets._Kind(Restless))


def restless_world(
    seed: int, lanes: int = 1
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """As `world`, of models whose layers can rotate."""
    fleet, old, requests = world(seed, NAME, lanes)
    page = fleet.device.page_bytes
    specs = []
    for s in old:
        first, layer, last, _ = s.segment_bytes
        specs.append(replace(s, segment_bytes=(first, *(layer,) * s.n_layers, last)))
    largest, was = (max(weight_pages([s], page) for s in each) for each in (specs, old))
    budget = fleet.device.budget_bytes + (largest - was) * page
    device = replace(fleet.device, budget_bytes=budget)
    options = {"base": float(seed % len(BASES))}
    return replace(fleet, device=device, options=options), specs, requests
