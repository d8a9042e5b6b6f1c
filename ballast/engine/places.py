"""Change which segments a model's passes read in host memory, while the model stays resident.

Called by `reside` for plans that differ in that alone, and by `events` when copies have landed.
What is to be read in host memory gives its pages up between two passes. What is to have pages is
copied to them beside passes, which read host memory until the first moment between two of them when
all of it has landed (`weights.promotion`).
"""

from __future__ import annotations

from dataclasses import replace

from ballast.core.event import Output, TransferDoneEvent
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.rotation import WHOLE
from ballast.core.view import Residency
from ballast.engine.layer_remap import proceed
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState

Refusal = str | None


def change(state: DeviceState, m: ModelState, plan: ResidencyPlan) -> Refusal:
    """Carry out `plan`, or order it for when jobs and copies have ended; returns the reason if it
    is refused, and changes nothing then."""
    now, promotion = m.weights.plan, m.weights.promotion
    if m.residency is not Residency.RESIDENT:
        return f"{m.spec.name} is {m.residency.value}"
    if plan.rotation != m.plan.rotation:
        return "units change places, or layers get slots, not both at once"
    if now.rotation != WHOLE:
        return "layers in slots come back first"
    if not state.pool.vm.maps_host or m.weights.stream is None:
        return "this device does not read weights in host memory"
    home = now.in_place - plan.in_place
    if home and promotion.segments and (promotion.cancelled or home != promotion.segments):
        return "other units of it are being copied to pages"
    if home and not promotion.segments:
        short = promotion.begin(state.next_transfer(), m.weights.segments, home)
        if short is not None:
            return f"short of {short.pages} pages"
    if not home:
        promotion.cancel()
    m.version.n += 1
    # What has not landed is read in host memory until it has.
    in_place = plan.in_place | now.in_place if promotion.awaited else plan.in_place
    if in_place != m.plan.in_place:
        _order(state, m, in_place)
    return None


def promoted(state: DeviceState, event: TransferDoneEvent) -> list[Output]:
    """Handle the end of copies of segments to pages: between two passes they are used there."""
    models = state.models.values()
    m = next(m for m in models if m.weights.promotion.transfer_id == event.transfer_id)
    promotion = m.weights.promotion
    m.version.n += 1
    m.news.n += 1
    if promotion.ended(event.error):
        if m.residency is Residency.RESIDENT:
            _order(state, m, m.plan.in_place - promotion.segments)
        else:
            promotion.cancel()
    return []


def _order(state: DeviceState, m: ModelState, in_place: frozenset[int]) -> None:
    m.life.order_remap(replace(m.plan, in_place=in_place))
    proceed(state, m)
