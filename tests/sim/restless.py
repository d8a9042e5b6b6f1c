"""A preset that lets random layers of weights, and KV, rotate, over one that does the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from ballast.core.actions import Action, Decision, Stage
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.settings import FleetSettings
from ballast.core.view import DeviceView, Residency
from ballast.policy import presets
from ballast.policy.base import MemoryPolicy
from ballast.policy.plans import remap
from ballast.policy.requirements import Requirements
from tests.sim.test_enough_memory import world

NAME = "restless"
BASES = ("static", "swap", "balloon")


@dataclass(frozen=True, slots=True)
class Restless(MemoryPolicy):
    """What it asks for depends on all that it is told of times."""

    base: float = 0
    """A place in `BASES`."""
    every: float = 0.05
    """Most seconds until it changes its mind."""
    kv: float = 0
    """Whether random numbers of KV blocks are staged as well."""

    @property
    def requires(self) -> Requirements:
        return Requirements(rotation=True, kv_staging=bool(self.kv))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        inner, asked = memo if isinstance(memo, tuple) else (None, 0)
        decision = presets.resolve(BASES[int(self.base)]).memory(view, inner)
        result = [(m.decode_seconds, m.prefill_seconds) for m in view.models]
        rng = random.Random(repr((asked, result)))
        there = [m for m in view.models if m.residency is Residency.RESIDENT and m.rotatable]
        changes: list[Action] = []
        if there and rng.random() < 0.5:
            m = rng.choice(there)
            changes = [remap(m, self._rotation(m.rotatable, rng), "restless")]
        staging = [m for m in there if self.kv and m.staging is not None and m.running]
        if staging and rng.random() < 0.5:
            m = rng.choice(staging)
            assert m.staging is not None
            blocks = rng.randint(0, m.staging.staged + m.staging.home)
            changes.append(Stage(m.name, blocks, "restless"))
        soon = view.now + rng.random() * self.every
        return replace(
            decision,
            actions=(*decision.actions, *changes),
            memo=(decision.memo, asked + 1),
            wake_at=soon if decision.wake_at is None else min(soon, decision.wake_at),
        )

    @staticmethod
    def _rotation(among: Sequence[int], rng: random.Random) -> Rotation:
        n = rng.randint(1, len(among))
        layers = tuple(sorted(rng.sample(among, n)))
        return Rotation(layers, rng.randint(1, min(3, n - 1))) if n > 1 else WHOLE


def register(patch: pytest.MonkeyPatch) -> None:
    """It is one of the presets."""
    patch.setitem(presets._KINDS, NAME, presets._Kind(Restless))


def restless_world(
    seed: int, lanes: int = 1, *, kv: bool = False
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """A random world under it; `kv`: in which KV streams as well."""
    fleet, specs, requests = layered_world(seed, NAME, lanes)
    options = {"base": float(seed % len(BASES)), "kv": float(kv)}
    return replace(fleet, options=options), specs, requests


LENDING = (0, 7, 8, 13, 30, 31, 38, 43, 46)
"""Seeds of worlds in which layers lend their memory."""


def lending_world(seed: int) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """A random world with many requests, under `mirage`."""
    fleet, specs, requests = layered_world(seed, "mirage", 1 + seed // 10 % 2, together=True)
    often = [replace(r, id=f"{r.id}-{k}") for r in requests for k in range(4)]
    options = {"temporal": 1.0, "quantum": 0.1} if seed % 2 else {"cap": 0.0}
    return replace(fleet, options=options), specs, sorted(often, key=lambda r: r.arrival)


def layered_world(
    seed: int, preset: str, lanes: int = 1, *, together: bool = False
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """As `world`, of models whose layers can rotate; `together`: all of them fit."""
    fleet, old, requests = world(seed, preset, lanes)
    page = fleet.device.page_bytes
    specs = []
    for s in old:
        first, layer, last, _ = s.segment_bytes
        specs.append(replace(s, segment_bytes=(first, *(layer,) * s.n_layers, last)))
    was = max(s.weight_pages(page) for s in old)
    sizes = [s.weight_pages(page) for s in specs]
    more = (sum(sizes) if together else max(sizes)) - was
    budget = fleet.device.budget_bytes + more * page
    return replace(fleet, device=replace(fleet.device, budget_bytes=budget)), specs, requests
