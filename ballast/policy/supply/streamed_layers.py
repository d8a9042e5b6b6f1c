"""Offer memory of layers of running models, whose passes then read them through slots (MIRAGE).

Layers whose loads a pass hides cost next to nothing; beyond that each pass waits for copies. All
requests of the device wait with it, as models share the lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ballast.core.actions import Action, Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import convex
from ballast.policy.memory.layer_offers import LayerOffers, layers_of
from ballast.policy.memory.layer_reversion import give_back, off_peak
from ballast.policy.supply.weights import STAY

STEPS = 6
"""Numbers of layers beyond the hidden ones at which a model's are priced."""
RESERVE = 0.1
"""Part of the pages beside weights in use that stays free when layers come back."""


def layer_offers(view: DeviceView) -> LayerOffers:
    """Return the layers of a device's models: those with requests lend theirs."""
    return LayerOffers(frozenset(m.name for m in view.models if m.running), (), cap=True)


def streamed_layers(ahead: Outlook, layers: LayerOffers) -> Iterator[Offer]:
    """Offer layers of models that run, a few at a time, at prices that rise."""
    view = ahead.view
    able = [m for m in view.models if m.layer_pages > 0 and m.residency is Residency.RESIDENT]
    waits = {m.name: layers.wait_seconds(view, m, m.rotation.n_freed) for m in able}
    for m in able:
        if m.running and not m.spec.pinned and not m.plan.in_place:
            others = sum(waits.values()) - waits[m.name]
            yield from _of(ahead, layers, m, others)


def _of(ahead: Outlook, layers: LayerOffers, m: ModelView, others: float) -> Iterator[Offer]:
    """Offer one model's layers; `others`: seconds for which a round waits for other models'."""
    freed, top = m.rotation.n_freed, layers.bound(m)
    hidden = max(freed, layers.most(ahead.view, m))
    counts = {hidden, *(hidden + (top - hidden) * k // STEPS for k in range(1, STEPS + 1))}
    now = _harm(ahead, layers, m, freed, others)
    points = [(0, 0.0)]
    for n in sorted(counts):
        if n > freed:
            harm = _harm(ahead, layers, m, n, others) - now + _return(ahead, m, n)
            points.append(((n - freed) * m.layer_pages, harm))

    def act(pages: int, claim: Claim) -> Reside:
        return layers.remap(m, freed + pages // m.layer_pages, f"{claim.model} needs pages")

    key, grain = layers_of(m), m.layer_pages
    for (start, before), (end, after) in convex(points):
        price = partial(float, (after - before) / (end - start) * end)
        offer = Offer(key, m.name, end, price, act, grain=grain, cumulative=True, later=True)
        yield offer._replace(in_use=True)


def _harm(ahead: Outlook, layers: LayerOffers, m: ModelView, alpha: int, others: float) -> float:
    """Return the harm of a model's giving up `alpha` layers: in each round the lane waits for their
    copies, and so does the prefill of a request that comes. No pages are sure to be free before the
    requests that run have ended."""
    waits = layers.wait_seconds(ahead.view, m, alpha)
    coming = m.arrival_rate(ahead.now) * STAY * ahead.arrival_harm(m, waits)
    return ahead.lane_waits_harm(others + waits) + coming


def _return(ahead: Outlook, m: ModelView, alpha: int) -> float:
    """Return the harm of copying layers back: one pass of the model waits for it."""
    copy = copy_seconds(m.layer_bytes, ahead.view.weights_bytes_per_second)
    return ahead.rise(m, (alpha - m.rotation.n_freed) * copy)


def layers_home(view: DeviceView, layers: LayerOffers, free: int) -> list[Action]:
    """Return layers to models on `free` pages that nobody claims, as far as `RESERVE` of what
    weights leave stays free."""
    if not any(m.rotation.n_freed for m in view.models):
        return []
    used = sum(m.present_pages for m in view.models if not m.idle)
    spare = free - round(RESERVE * (view.total - view.arena - used))
    budget = PageBudget(view, within=max(0, spare))
    home = give_back(view, budget, off_peak(view, budget, layers), spare, [])
    return layers.choose(view, home)
