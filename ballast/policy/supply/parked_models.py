"""Offer weights of models that have requests at the harm of delaying all of them for a while.

A model that is parked does not run; its requests wait, and their KV stays cached, so that no more
than the weights has to come back. Requests that are ahead of their pace lose nothing by it: models
take turns between tokens (Aegaeon, 2025), where that is cheaper than anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from operator import itemgetter

import numpy as np

from ballast.core.actions import Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.offers import evictable
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced, by_price
from ballast.policy.market.work_ahead import work_of
from ballast.policy.plans import eviction

SEGMENTS = "segments"
"""First part of the keys of offers of a model's weights."""
MARGIN = 2.0
"""A model is parked only for one whose requests would lose this many times as much by waiting
instead, so that models that are alike do not take turns for nothing."""


class ParkedModels:
    """Models with requests to park, each with as many segments as the claim lacks pages.

    Not the model of the first of all running requests, nor one whose requests are more important
    than the claim's, nor one that would lose about as much as the claim's model if that waited for
    the same time. A model that is absent already may miss more.
    """

    def __init__(self, ahead: Outlook) -> None:
        self._ahead = ahead
        able = (m for m in ahead.view.models if not m.idle and evictable(m))
        self._able = [(m, _rank(m)) for m in able if not ahead.holds_first(m)]

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Priced]:
        """As of `OfferTable`."""
        if not self._able:
            return ()
        lacking = max(1, claim.pages - self._ahead.view.coming)
        if claim.weights:
            rank = claim.order.rank
            able = [m for m, r in self._able if r >= rank and m.name != claim.model]
            turns = (o for m in able for o in _turn(self._ahead, m, claim, lacking))
            return by_price(budget, turns, lacked)
        return self._relief(lacking, lacked)

    def is_own(self, claim: Claim) -> bool:
        """As of `OfferTable`."""
        return claim.weights

    def take(self, offers: Sequence[Offer]) -> bool:
        """As of `OfferTable`."""
        taken = {offer.owner for offer in offers if offer.key[0] == SEGMENTS}
        if taken:
            self._able = [(m, r) for m, r in self._able if m.name not in taken]
            self._parkings = [entry for entry in self._parkings if entry[0].name not in taken]
        return bool(taken)

    @cached_property
    def _parkings(self) -> list[tuple[ModelView, int, int, float]]:
        """Models to park for KV of all requests that wait: each with its requests' rank, its pages,
        and the harm of having its requests wait until those have ended."""
        ahead = self._ahead
        here = [(m, r, m.derived(_parkable)) for m, r in self._able]
        here = [(m, r, n) for m, r, n in here if n and m.residency is not Residency.ABSENT]
        delays = ahead.coming.waits(np.array([ahead.backlog + n for _, _, n in here], np.float64))
        harms = ahead.harms_of_delays([m for m, _, _ in here], delays).tolist()
        return [(*entry, harm) for entry, harm in zip(here, harms, strict=True)]

    def _relief(self, lacking: int, lacked: int) -> Iterator[Priced]:
        """Yield the offers of `_parkings`: a claim pays the part of the harm that its pages are of
        those that will be used."""
        backlog = self._ahead.backlog or 1
        found = []
        for m, rank, pages, harm in self._parkings:
            total = MARGIN * harm * min(1.0, lacking / min(pages, backlog))
            found.append((total / min(lacked, pages), total, m, rank, pages))
        for price, total, m, rank, pages in sorted(found, key=itemgetter(0)):
            yield price, _parking(m, pages, total, rank)


def _parkable(m: ModelView) -> int:
    """Return the pages of all segments but the last, with which the model would lose its KV."""
    return sum(m.plan.parts[:-1])


def _rank(m: ModelView) -> int:
    """Return the importance of the most important of a model's first requests."""
    return min(r.order.rank for r in (*m.running[:1], *m.waiting[:1]))


def _turn(ahead: Outlook, m: ModelView, claim: Claim, lacking: int) -> Iterator[Offer]:
    """Offer to park a model for weights of the claim's, if it loses less than that would."""
    pages = _segments(m, lacking)
    if pages:
        harm, instead = _harms(ahead, m, claim, pages)
        if claim.gain == math.inf or MARGIN * harm < instead:
            yield _parking(m, pages, harm)


def _parking(m: ModelView, pages: int, harm: float, rank: float = math.inf) -> Offer:
    key, act, price = (SEGMENTS, m.name), partial(_park, m), partial(float, harm)
    return Offer(key, m.name, pages, price, act, later=m.busy, rank=rank, for_others=True)


def _park(m: ModelView, pages: int, claim: Claim) -> Reside:
    return eviction(m, f"its requests can wait until {claim.model} had its turn", pages)


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
    for part in m.plan.parts[:-1]:
        found += part
        if found >= pages:
            break
    return found
