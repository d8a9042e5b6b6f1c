"""Have a device carry out plans: activate, evict and remap, as a policy would ask for it."""

from __future__ import annotations

from ballast.core.actions import Reside
from ballast.core.rotation import Rotation
from ballast.engine.apply import apply
from ballast.engine.state import DeviceState


def activate(state: DeviceState, name: str) -> str | None:
    """Bring what a model lacks; returns why that is refused."""
    plan = state.models[name].plan
    return apply(state, Reside(name, plan.completed(in_place=state.weights_in_place)), [])


def evict(state: DeviceState, name: str, pages: int | None = None) -> str | None:
    """Give up at least so many pages of a model; None: all."""
    return apply(state, Reside(name, state.models[name].weights.plan.without(pages)), [])


def remap(state: DeviceState, name: str, rotation: Rotation) -> str | None:
    """Have these layers of a model rotate, and no others."""
    return apply(state, Reside(name, state.models[name].plan.turned(rotation)), [])
