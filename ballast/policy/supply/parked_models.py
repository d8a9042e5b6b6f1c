"""Offer weights of models that have requests at the harm of delaying all of them for a while.

A model that is parked does not run; its requests wait, and their KV stays cached, so that no more
than the weights has to come back. Requests that are ahead of their pace lose nothing by it: models
take turns between tokens (Aegaeon, 2025), where that is cheaper than anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from ballast.core.actions import Evict
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.offers import evictable
from ballast.policy.market.outlook import Outlook, work_of

MARGIN = 2.0
"""A model is parked only for one whose requests would lose this many times as much by waiting
instead, so that models that are alike do not take turns for nothing."""


def parked_models(ahead: Outlook, view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer to park models with requests, each with as many segments as the claim lacks pages.

    Not the model of the first of all running requests, nor one whose requests are more important
    than the claim's, nor one that would lose about as much as the claim's model if that waited for
    the same time. A model that is absent already may miss more.
    """
    lacking = max(1, claim.pages - view.coming)
    for m in view.models:
        if m.idle or m.name == claim.model or not evictable(m) or ahead.holds_first(m):
            continue
        if min(r.order.rank for r in (*m.running[:1], *m.waiting[:1])) < claim.order.rank:
            continue
        if not claim.weights:
            yield from _relief(ahead, m, lacking)
            continue
        pages = _segments(m, lacking)
        if not pages:
            continue
        harm, instead = _harms(ahead, m, claim, pages)
        if claim.gain == math.inf or MARGIN * harm < instead:
            price, act = partial(float, harm), partial(_park, m.name)
            yield Offer(("segments", m.name), m.name, pages, price, act, later=m.busy)


def _relief(ahead: Outlook, m: ModelView, lacking: int) -> Iterator[Offer]:
    """Offer to park a model for KV of all requests that wait: its requests wait until these have
    ended. The claim pays the part of that harm that its pages are of those that will be used."""
    pages = sum((m.parts or ())[:-1])
    if not pages or m.residency is Residency.ABSENT:
        return
    delay = ahead.coming.wait(ahead.backlog + pages)
    harm = ahead.rise(m, delay)
    harm += m.arrival_rate(ahead.now) * delay * ahead.arrival_harm(m, delay)
    price = partial(float, MARGIN * harm * min(1.0, lacking / min(pages, ahead.backlog or 1)))
    act = partial(_park, m.name)
    yield Offer(("segments", m.name), m.name, pages, price, act, later=m.busy)


def _park(model: str, pages: int, claim: Claim) -> Evict:
    return Evict(model, f"its requests can wait until {claim.model} had its turn", pages)


def _harms(ahead: Outlook, m: ModelView, claim: Claim, pages: int) -> tuple[float, float]:
    """Return the harm of parking a model for the shortest turn of the claim's (its weights come,
    its prompts are computed, the weights of others that wait come, and these return), and that of
    the claim's model if it waited for as long instead."""
    view = ahead.view
    back = copy_seconds(pages * view.page_bytes, view.weights_bytes_per_second)
    other = view.model(claim.model)
    missing = _missing_seconds(ahead, other)
    if m.residency is Residency.ABSENT:
        delay = back
        harm = ahead.rise(m, back, _missing_seconds(ahead, m))
    else:
        waited = (o for o in view.models if o.waiting and o is not m and o is not other)
        queue = sum(_missing_seconds(ahead, o) for o in waited)
        delay = missing + _prompt_seconds(other) * ahead.stretch + queue + back
        alone = not any(o.running and o is not m and o is not other for o in view.models)
        idle = missing + back if alone else 0.0
        arrivals = m.arrival_rate(view.now) * delay
        harm = ahead.rise(m, delay) + ahead.lane_price * idle
        harm += arrivals * ahead.arrival_harm(m, delay)
    return harm, ahead.rise_of_waiting(other, delay, missing)


def _missing_seconds(ahead: Outlook, m: ModelView) -> float:
    """Return the seconds that what is missing of a model's weights takes to come."""
    if m.residency is not Residency.ABSENT:
        return 0.0
    view = ahead.view
    return copy_seconds(m.missing_pages * view.page_bytes, view.weights_bytes_per_second)


def _prompt_seconds(m: ModelView) -> float:
    """Return the seconds of the lane until a model's waiting requests have their next tokens."""
    work = m.derived(work_of)
    first = [i for i, r in enumerate(m.waiting) if r.first is None]
    return float(work.ahead[first[-1]]) if first else 0.0


def _segments(m: ModelView, pages: int) -> int:
    """Return the pages of the fewest segments, given up in order, that have `pages`; of all but the
    last where those are fewer: with it the model would lose its KV."""
    found = 0
    for part in (m.parts or ())[:-1]:
        found += part
        if found >= pages:
            break
    return found
