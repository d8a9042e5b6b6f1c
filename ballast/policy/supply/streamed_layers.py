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
from ballast.policy.memory.layer_offers import LayerOffers, layers_of
from ballast.policy.memory.layer_reversion import give_back, off_peak
from ballast.policy.supply.weights import convex

STEPS = 6
"""Numbers of layers beyond the hidden ones at which a model's are priced."""
LEAST_STAY = 1.0
"""Seconds for which layers are lent at least, over which their copies back are spread."""
RESERVE = 0.1
"""Part of the pages beside weights in use that stays free when layers come back."""


def layer_offers(view: DeviceView) -> LayerOffers:
    """Return the layers of a device's models: those with requests lend theirs."""
    return LayerOffers(frozenset(m.name for m in view.models if m.running), (), cap=True)


def streamed_layers(ahead: Outlook, layers: LayerOffers) -> Iterator[Offer]:
    """Offer layers of models that run, a few at a time, at prices that rise."""
    for m in ahead.view.models:
        able = m.layer_pages > 0 and m.running and m.residency is Residency.RESIDENT
        if able and not m.spec.pinned and not m.plan.in_place:
            yield from _of(ahead, layers, m)


def _of(ahead: Outlook, layers: LayerOffers, m: ModelView) -> Iterator[Offer]:
    freed, top = m.rotation.n_freed, layers.bound(m)
    hidden = max(freed, layers.most(ahead.view, m))
    counts = {hidden, *(hidden + (top - hidden) * k // STEPS for k in range(1, STEPS + 1))}
    now = _harm(ahead, layers, m, freed)
    points = [
        ((n - freed) * m.layer_pages, _harm(ahead, layers, m, n) - now + _return(ahead, m, n))
        for n in sorted(counts)
        if n > freed
    ]

    def act(pages: int, claim: Claim) -> Reside:
        return layers.remap(m, freed + pages // m.layer_pages, f"{claim.model} needs pages")

    for (start, before), (end, after) in convex([(0, 0.0), *points]):
        price = partial(float, (after - before) / (end - start) * end)
        yield Offer(
            layers_of(m),
            m.name,
            end,
            price,
            act,
            grain=m.layer_pages,
            cumulative=True,
            later=True,
        )


def _harm(ahead: Outlook, layers: LayerOffers, m: ModelView, alpha: int) -> float:
    """Return the harm of a model's giving up `alpha` layers until as many pages have become free by
    themselves: in each round the lane waits for its copies."""
    waits = layers.wait_seconds(ahead.view, m, alpha)
    if waits <= 0.0:
        return 0.0
    stay = max(LEAST_STAY, ahead.coming.wait(ahead.backlog + alpha * m.layer_pages))
    return ahead.lane_price * waits * stay / (ahead.round_seconds + waits)


def _return(ahead: Outlook, m: ModelView, alpha: int) -> float:
    """Return the harm of copying layers back: one pass of the model waits for it."""
    copy = copy_seconds(m.layer_bytes, ahead.view.weights_bytes_per_second)
    return ahead.rise(m, (alpha - m.rotation.n_freed) * copy)


def layers_home(view: DeviceView, layers: LayerOffers) -> list[Action]:
    """Return layers to models while nobody lacks pages, as far as `RESERVE` of what weights leave
    stays free."""
    if not any(m.rotation.n_freed for m in view.models):
        return []
    used = sum(m.present_pages for m in view.models if not m.idle)
    budget = PageBudget(view)
    spare = budget.free - round(RESERVE * (view.total - view.arena - used))
    actions = give_back(view, budget, off_peak(view, budget, layers), spare, [])
    return layers.choose(view, actions)
