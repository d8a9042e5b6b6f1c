"""Check that what policies see of a device is what is true on it."""

from __future__ import annotations

from ballast.core.view import Residency
from ballast.engine.life_rules import EarlyStart, Work
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.engine.views import deferred_pages, device_view, made_anew


def check_views(state: DeviceState) -> None:
    """The snapshot of every model equals one made anew, and shows the state of its life."""
    for m, seen in zip(state.models.values(), device_view(state).models, strict=True):
        assert seen == made_anew(m), f"the snapshot of {m.life} is stale"
        assert m.deferred == deferred_pages(m)
        life = m.life
        assert seen.residency is life.residency
        assert seen.busy == (life.work is Work.BUSY) == any(r.in_flight for r in seen.running)
        assert seen.rotation == (life.remap_to or m.weights.plan).rotation
        here = life.residency in (Residency.RESIDENT, Residency.EVICTING)
        assert not seen.running or here or life.early_start is not EarlyStart.NONE
        open_here = seen.waiting or seen.running or m.paused
        here = life.residency is Residency.RESIDENT
        here |= life.residency is Residency.ABSENT and not m.weights.plan.empty
        idle = here and not open_here
        assert (seen.idle_since is not None) == idle
        for s in seen.shared:
            there = (n for n, o in state.models.items() if not leaves(o))
            assert set(s.holders) == {n for n in there if holds(state, n, s.owner)}


def leaves(m: ModelState) -> bool:
    """Whether a model is about to give up all of its weights."""
    return m.residency is Residency.EVICTING and m.weights.leaves_whole


def holds(state: DeviceState, name: str, owner: str) -> bool:
    """Whether a model that is on the device, or on its way there, uses a shared segment."""
    m = state.models[name]
    weights = m.weights
    parts = enumerate(weights.segments)
    away = weights.plan.absent | weights.plan.in_place
    return any(s.shared and s.shared.owner == owner for i, s in parts if i not in away)
