"""Remap a model's layers (change which of them rotate or are read in place), or evict the model,
when it is safe.

Used by `apply`, by commands, and at the end of jobs and loads. A remap or eviction is ordered at
once but carried out only when neither a job nor a load of a layer of the model is in flight, as
the model's `Life` tracks.
"""

from __future__ import annotations

from ballast.core.actions import Short
from ballast.core.event import Output, RotationSettledEvent
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.view import Residency
from ballast.engine.life_rules import Step
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def remap(state: DeviceState, m: ModelState, wanted: ResidencyPlan) -> Short | None:
    """Order that other layers of a resident model rotate, as in `wanted`. Additional pages that it
    needs are promised to it now; if they are not free, returns the shortage and changes nothing."""
    slots = m.weights.slots
    back = (slots.rotation.n_freed - wanted.rotation.n_freed) * slots.layer_pages
    short = state.pool.replace_promise(m.weights.owner, max(0, back))
    if short is not None:
        return short
    m.life.order_remap(wanted)
    proceed(state, m)
    return None


def request_eviction(state: DeviceState, m: ModelState, after: ResidencyPlan | None = None) -> None:
    """Order the eviction of a model, or of the parts that are absent in the plan `after`; carried
    out as soon as no job and no load is in flight."""
    m.life.order_eviction()
    m.weights.announce_eviction(after)
    state.pool.replace_promise(m.weights.owner, 0)
    proceed(state, m)


def give_up_more(state: DeviceState, m: ModelState, after: ResidencyPlan) -> None:
    """Evict more of an absent model of which parts are on the device."""
    m.weights.announce_eviction(after)
    state.free(m)


def stop_load(state: DeviceState, m: ModelState) -> None:
    """Stop the load of a model's weights, and order the eviction of what has come."""
    transfer = m.life.transfer_id
    assert transfer is not None, "they are loading"
    m.life.stop_load()
    m.weights.announce_eviction()
    state.link.stop(transfer)


def load_stopped(state: DeviceState, m: ModelState, error: str | None) -> list[Output]:
    """Evict a model whose load was stopped and has ended; `error`: None if all of it came."""
    if error is None:
        m.weights.transfer_landed()
    else:
        m.weights.transfer_stopped()
    m.life.load_stopped()
    return proceed(state, m)


def proceed(state: DeviceState, m: ModelState) -> list[Output]:
    """Carry out the next step of a model's life, if one is due; return outputs for clients."""
    step = m.life.due(stirred=m.weights.may_be_loading)
    if step is Step.FAIL:
        assert m.life.load_failed is not None, "it says why"
        return state.fail_load(m, m.life.load_failed)
    if step is Step.EVICT:
        state.evict(m)
    elif step is Step.SETTLE:
        assert m.weights.stream is not None, "layers of other models neither turn nor stir"
        m.life.settle()
        m.weights.stream.settle()
    return []


def settled(state: DeviceState, event: RotationSettledEvent) -> list[Output]:
    """Remap or evict a model whose loads have all ended."""
    m = state.models.get(event.model)
    if m is None or not m.life.settling:
        return []
    wanted = m.life.settled()
    if m.residency is Residency.EVICTING:
        state.evict(m)
    elif wanted is not None:
        _turn(state, m, wanted)
    return []


def _turn(state: DeviceState, m: ModelState, wanted: ResidencyPlan) -> None:
    moves = wanted.in_place != m.weights.plan.in_place
    if moves:
        m.weights.read_in_place(wanted.in_place)
    turns = wanted.rotation != m.weights.slots.rotation or not moves
    if turns and not m.weights.plan.in_place and m.weights.remap(wanted.rotation) is not None:
        # Its promise is worth less than it was: pages that others were to give back are not
        # there yet. The policy will see, and may ask again; layers stay as they are.
        m.weights.remap(m.weights.slots.rotation)
    state.pool.replace_promise(m.weights.owner, 0)
