"""What a device does when a model's layers are to rotate, or the model is to go.

When that may happen follows from the model's life (`ballast.engine.life`): neither a job nor a load
of a layer is in the way.
"""

from __future__ import annotations

from ballast.core.actions import Short
from ballast.core.event import Output, RotationSettledEvent
from ballast.core.rotation import Rotation
from ballast.core.view import Residency
from ballast.engine.life_rules import Step
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def remap(state: DeviceState, m: ModelState, wanted: Rotation) -> Short | None:
    """Let these layers of a resident model rotate as soon as nothing stands in the way. Pages that
    it takes more are promised to it now, or nothing changes."""
    back = (m.weights.slots.rotation.n_freed - wanted.n_freed) * m.weights.slots.layer_pages
    short = state.pool.replace_promise(m.weights.owner, max(0, back))
    if short is not None:
        return short
    m.life.order_turn(wanted)
    proceed(state, m)
    return None


def drive_out(state: DeviceState, m: ModelState) -> None:
    """Evict a model as soon as no job, and no load of a layer, stands in the way."""
    m.life.order_eviction()
    m.weights.announce_eviction()
    state.pool.replace_promise(m.weights.owner, 0)
    proceed(state, m)


def proceed(state: DeviceState, m: ModelState) -> list[Output]:
    """Take the next step of a model's life, if one is due; what clients are to be told."""
    step = m.life.due(stirred=m.weights.may_be_loading)
    if step is Step.FAIL:
        assert m.life.load_failed is not None, "it says why"
        return state.fail_load(m, m.life.load_failed)
    if step is Step.EVICT:
        state.evict(m)
    elif step is Step.SETTLE:
        assert m.weights.rotor is not None, "layers of other models neither turn nor stir"
        m.life.settle()
        m.weights.rotor.settle()
    return []


def settled(state: DeviceState, event: RotationSettledEvent) -> list[Output]:
    """Turn a model, or let it go: no load is in flight any more."""
    m = state.models.get(event.model)
    if m is None or not m.life.settling:
        return []
    wanted = m.life.settled()
    if m.residency is Residency.EVICTING:
        state.evict(m)
    elif wanted is not None:
        _turn(state, m, wanted)
    return []


def _turn(state: DeviceState, m: ModelState, wanted: Rotation) -> None:
    if m.weights.remap(wanted) is not None:
        # Its promise is worth less than it was: pages that others were to give back are not
        # there yet. The policy will see, and may ask again; layers stay as they are.
        m.weights.remap(m.weights.slots.rotation)
    state.pool.replace_promise(m.weights.owner, 0)
