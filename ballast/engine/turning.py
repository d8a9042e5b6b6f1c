"""Models whose layers shall rotate, or that shall go, once no job and no load is in the way."""

from __future__ import annotations

from ballast.core.actions import Short
from ballast.core.event import Output, Settled
from ballast.core.rotation import Rotation
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def remap(state: DeviceState, m: ModelState, wanted: Rotation) -> Short | None:
    """These layers of a resident model rotate as soon as nothing stands in the way. Pages that
    it takes more are promised to it now, or nothing changes."""
    owner = m.weights.owner
    state.pool.withdraw(owner)
    back = (m.weights.slots.rotation.lent - wanted.lent) * m.weights.slots.layer_pages
    short = state.pool.promise(owner, max(0, back))
    if short is not None:
        if m.turning is not None:  # what was promised for that is not taken by anybody
            state.pool.promise(owner, max(0, m.pages_to_take))
        return short
    m.turning = wanted
    if m.job is None and not m.settling:
        make_way(state, m)
    state.touch(m)
    return None


def drive_out(state: DeviceState, m: ModelState) -> None:
    """Evict a model as soon as no job, and no load of a layer, stands in the way."""
    m.turning = None
    state.pool.withdraw(m.weights.owner)
    if m.job is not None or m.weights.stirred:
        state.become(m, Residency.EVICTING)
    if m.job is None:
        make_way(state, m)


def make_way(state: DeviceState, m: ModelState) -> None:
    """No job is in flight; once no load is either, the model turns, or goes."""
    if m.weights.rotor is None or not (m.weights.stirred or m.turning is not None):
        state.evict(m)
    elif not m.settling:
        m.settling = True
        m.weights.rotor.settle()


def settled(state: DeviceState, event: Settled) -> list[Output]:
    """No load is in flight any more: the model turns, or goes."""
    m = state.models.get(event.model)
    if m is None or not m.settling:
        return []
    m.settling = False
    if m.residency is Residency.EVICTING:
        state.evict(m)
    elif m.turning is not None:
        _turn(state, m, m.turning)
    state.touch(m)
    state.asking = True
    return []


def _turn(state: DeviceState, m: ModelState, wanted: Rotation) -> None:
    m.turning = None
    if m.weights.turn(wanted) is not None:
        # Its promise is worth less than it was: pages that others were to give back are not
        # there yet. The policy will see, and may ask again; layers stay as they are.
        m.weights.turn(m.weights.slots.rotation)
    state.pool.withdraw(m.weights.owner)
    state.freed += 1
