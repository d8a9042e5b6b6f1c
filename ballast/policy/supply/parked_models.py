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
from ballast.core.view import ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.offers import evictable
from ballast.policy.market.outlook import FOREVER, Outlook, waiting_pages
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced, by_price
from ballast.policy.plans import eviction

SEGMENTS = "segments"
"""First part of the keys of offers of a model's weights."""
MARGIN = 2.0
"""A model is parked only for one whose requests would lose this many times as much by waiting
instead, so that models that are alike do not take turns for nothing."""


class ParkedModels:
    """Models with requests to park, each with as many segments as the claim lacks pages.

    Not the model of the first of all running requests, nor one whose requests are more important
    than the claim's, nor one that would lose about as much as the claim gains. It will be absent
    for as long as models with requests lately were, and whatever makes way when it returns, in
    turn, too. A model that is absent already may miss more.
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
        """Models to park for KV of all requests that wait, and are to be expected, if these lose
        more together: each with its requests' rank, its pages, and the harm of its absence.

        Where the requests to be expected need more KV than there is room for, it stays away
        `FOREVER`, as whatever had made way for it would be missing then.
        """
        ahead = self._ahead
        here = [(m, r, m.derived(_parkable)) for m, r in self._able]
        here = [(m, r, n) for m, r, n in here if n and m.residency is not Residency.ABSENT]
        unserved = ahead.unserved()
        if unserved:
            delays = [FOREVER] * len(here)
        else:
            delays = [ahead.turn + ahead.copy_seconds(n) for _, _, n in here]
        models = [m for m, _, _ in here]
        harms = ahead.harms_of_absence(models, np.array(delays, np.float64)).tolist()
        wait = ahead.coming.wait(ahead.backlog - ahead.view.coming)
        waiting = {m.name: ahead.rise_of_waiting(m, wait) for m in ahead.view.models if _lacks(m)}
        found = []
        for (m, rank, pages), harm in zip(here, harms, strict=True):
            instead = sum(waiting.values()) - waiting.get(m.name, 0.0)
            if unserved:
                instead += FOREVER * (unserved - ahead.unserved(m, pages))
            if MARGIN * harm < instead:
                found.append((m, rank, pages, harm))
        return found

    def _relief(self, lacking: int, lacked: int) -> Iterator[Priced]:
        """Yield the offers of `_parkings`: a claim pays the part of the harm that its pages are of
        those that will be used."""
        backlog = self._ahead.backlog or 1
        found = []
        for m, rank, pages, harm in self._parkings:
            total = harm * min(1.0, lacking / min(pages, backlog))
            found.append((total / min(lacked, pages), total, m, rank, pages))
        for price, total, m, rank, pages in sorted(found, key=itemgetter(0)):
            yield price, _parking(m, pages, total, rank)


def _parkable(m: ModelView) -> int:
    """Return the pages of all segments but the last, with which the model would lose its KV."""
    return sum(m.plan.parts[:-1])


def _rank(m: ModelView) -> int:
    """Return the importance of the most important of a model's first requests."""
    return min(r.order.rank for r in (*m.running[:1], *m.waiting[:1]))


def _lacks(m: ModelView) -> bool:
    """Whether requests of a model wait for KV alone."""
    return waiting_pages(m) > 0


def _turn(ahead: Outlook, m: ModelView, claim: Claim, lacking: int) -> Iterator[Offer]:
    """Offer to park a model for weights of the claim's, if it loses less than that would."""
    pages = _segments(m, lacking)
    if pages:
        harm = _harm(ahead, m, claim, pages)
        if MARGIN * harm < claim.gain:
            yield _parking(m, pages, harm)


def _parking(m: ModelView, pages: int, harm: float, rank: float = math.inf) -> Offer:
    key, act, price = (SEGMENTS, m.name), partial(_park, m), partial(float, harm)
    return Offer(key, m.name, pages, price, act, later=m.busy, rank=rank, for_others=True)


def _park(m: ModelView, pages: int, claim: Claim) -> Reside:
    return eviction(m, f"its requests can wait until {claim.model} had its turn", pages)


def _harm(ahead: Outlook, m: ModelView, claim: Claim, pages: int) -> float:
    """Return the harm of parking a model for a turn, and of those that make way for its return."""
    back = ahead.copy_seconds(pages)
    other = ahead.view.model(claim.model)
    missing = ahead.copy_seconds(other.missing_pages)
    absent = m.residency is Residency.ABSENT
    base = ahead.copy_seconds(m.missing_pages) if absent else 0.0
    delay = ahead.turn + back
    alone = not any(o.running and o is not m and o is not other for o in ahead.view.models)
    idle = missing + back if alone else 0.0
    harm = ahead.rise(m, delay, base) + ahead.arrivals_harm(m, delay)
    return ahead.chain * (harm + ahead.lane_price * idle)


def _segments(m: ModelView, pages: int) -> int:
    """Return the pages of the fewest segments, given up in order, that have `pages`; of all but the
    last where those are fewer: with it the model would lose its KV."""
    found = 0
    for part in m.plan.parts[:-1]:
        found += part
        if found >= pages:
            break
    return found
