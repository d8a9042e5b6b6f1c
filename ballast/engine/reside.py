"""Carry a model's residency plan out, whole, or refuse it with a reason.

Called by `apply` and by operators' commands. A plan differs from the present one in one of four
ways: units come, units go, layers get other slots, or units are read in host memory instead of
pages, or the other way round. What has to wait for jobs and loads is ordered here and done by
`layer_remap` and `places`.
"""

from __future__ import annotations

from ballast.core.residency_plan import ResidencyPlan
from ballast.core.rotation import WHOLE
from ballast.core.view import Residency
from ballast.engine import layer_remap, places
from ballast.engine.head_start import bytes_ahead
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState

Refusal = str | None


def reside(state: DeviceState, m: ModelState, plan: ResidencyPlan) -> Refusal:
    """Carry `plan` out, or order it for the end of the job in flight; returns the reason if it is
    refused, and changes nothing then."""
    now = m.weights.plan
    if (plan.units, plan.n_layers) != (now.units, now.n_layers):
        return f"{m.spec.name} has other segments than planned"
    change = now.to(plan)
    if change.coming and change.going:
        return "parts of a model come, or go, not both at once"
    if change.coming:
        return bring(state, m, plan)
    if change.going:
        return give_up(state, m, plan)
    if plan.in_place != m.plan.in_place or (plan == m.plan and m.weights.promotion.segments):
        return places.change(state, m, plan)
    return turn(state, m, plan)


def change_tag(now: ResidencyPlan, plan: ResidencyPlan) -> str:
    """Return what a change does, for readers of stories: a tag of the file format."""
    change = now.to(plan)
    if change.coming:
        return "Activate"
    if change.going:
        return "Evict"
    turned = plan.rotation != now.rotation and plan.in_place == now.in_place
    return "Remap" if turned or plan == now else "Reside"


def bring(state: DeviceState, m: ModelState, plan: ResidencyPlan) -> Refusal:
    """Bring all units that an absent model lacks, or have them read in place."""
    if m.residency is not Residency.ABSENT:
        return f"{m.spec.name} is {m.residency.value}"
    now = m.weights.plan
    if plan.absent or plan.rotation != WHOLE:
        return "all that is missing comes at once; then layers may get slots"
    if not now.in_place <= plan.in_place <= now.in_place | now.absent:
        return "units that are there stay as they are while others come"
    if plan.in_place and not state.pool.vm.maps_host:
        return "this device does not read weights in host memory"
    transfer = state.next_transfer()
    short = m.weights.activate(transfer, bytes_ahead(state, m), plan.in_place)
    if short is not None:
        return f"short of {short.pages} pages"
    m.activations += 1
    m.for_requests = bool(m.waiting)
    if m.weights.filled:
        # Other models have brought all of it, or it is read in place.
        m.life.activate_shared(state.now)
    else:
        m.life.activate(transfer)
        m.activation_at = state.now
        state.activation_rate.begin(transfer, state.now)
        state.activating(m.spec.name)
    return None


def give_up(state: DeviceState, m: ModelState, plan: ResidencyPlan) -> Refusal:
    """Evict the units that are absent in `plan`; without any units, a model has no KV either."""
    now = m.weights.plan
    stops = m.residency is Residency.ACTIVATING and m.given_up
    rest = m.residency is Residency.ABSENT and not now.empty
    if m.residency is not Residency.RESIDENT and not (stops or rest):
        return f"{m.spec.name} is {m.residency.value}"
    if m.spec.pinned:
        return f"{m.spec.name} is pinned"
    going = plan.absent - now.absent
    if not going.issuperset(1 + layer for layer in now.rotation.layers):
        return "layers in slots go first, all of them"
    if not plan.empty and (stops or any(now.units[i].shared for i in going)):
        return "what other models contain, or is still coming, goes with all the rest"
    if stops:
        layer_remap.stop_load(state, m)
    elif rest:
        layer_remap.give_up_more(state, m, plan)
    else:
        layer_remap.request_eviction(state, m, plan)
    return None


def turn(state: DeviceState, m: ModelState, plan: ResidencyPlan) -> Refusal:
    """Have other layers pass through slots."""
    now, slots = m.plan, m.weights.slots
    if m.residency is not Residency.RESIDENT:
        return f"{m.spec.name} is {m.residency.value}"
    if plan == now:
        return "its layers are so already"
    if plan.in_place != now.in_place:
        return "units change places with all layers out of slots"
    if now.in_place:
        return "units are read in place: no layer passes through slots beside them"
    if not slots.rotatable:
        return f"layers of {m.spec.name} cannot rotate here"
    if (refused := slots.refusal(plan.rotation)) is not None:
        return refused
    short = layer_remap.remap(state, m, plan)
    return None if short is None else f"short of {short.pages} pages"
