"""Offer weights of models that have requests at the harm of delaying all of them for a while.

A model that is parked does not run; its requests wait, and their KV stays cached, so that no more
than the weights has to come back. Requests that are ahead of their pace lose nothing by it: models
take turns between tokens (Aegaeon, 2025), where that is cheaper than anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from ballast.core.actions import Reside
from ballast.core.lazy_property import lazy_property
from ballast.core.view import ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.coming_pages import FOREVER
from ballast.policy.market.harm import TIE
from ballast.policy.market.offers import evictable
from ballast.policy.market.outlook import Outlook, waiting_pages
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced, PricedOrBound, by_price
from ballast.policy.plans import eviction

SEGMENTS = "segments"
"""First part of the keys of offers of a model's weights."""
MARGIN = 2.0
"""A model is parked only for one whose requests would lose this many times as much by waiting
instead, so that models that are alike do not take turns for nothing."""
ROUNDING = 0.9
"""Factor by which a bound is less than what it bounds, whatever is rounded."""


class ParkedModels:
    """Offers to park models that have requests, each with as many segments as a claim lacks pages.

    Three kinds of models are not offered: that of the oldest running request (unless the claim is
    of a starving model whose request is older still), those whose requests are more important than
    the claim's, and those that would lose about as much as the claim gains. A parked model is
    expected to be absent for as long as parked models lately were, and so is each model that makes
    way when it returns. A model of which a part is absent already may give up more.
    """

    def __init__(self, ahead: Outlook) -> None:
        self._ahead = ahead

    @lazy_property
    def _able(self) -> list[tuple[ModelView, int]]:
        """Models with requests whose weights may go, with the rank of their requests."""
        return [(m, m.derived(_rank)) for m in self._ahead.work.models if m.derived(evictable)]

    def cheapest(
        self, budget: PageBudget, claim: Claim, lacked: int
    ) -> Iterable[Priced] | Iterable[PricedOrBound]:
        """As of `OfferTable`."""
        lacking = max(1, claim.pages - self._ahead.view.coming)
        if claim.weights:
            rank = claim.order.rank
            able = [m for m, r in self._able if r >= rank and m.name != claim.model]
            if claim.gain < math.inf:
                able = [m for m in able if m.name not in self._ahead.staying]
            if not (claim.may_preempt and self._ahead.comes_first(claim.order)):
                able = [m for m in able if not self._ahead.holds_first(m)]
            return by_price(budget, _turns(self._ahead, able, claim, lacking), lacked)
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

    @lazy_property
    def _parkings(self) -> list[tuple[ModelView, int, int, float]]:
        """Models to park so that waiting and expected requests of others get KV, if these lose more
        by waiting: (model, rank of its requests, pages, harm of its absence).

        Where expected requests need more KV than there is room for, the absence counts as
        `FOREVER`: bringing the model back would take the pages from them again.
        """
        ahead = self._ahead
        unserved = ahead.unserved
        lacking = [m for m in ahead.work.models if m.waiting and _lacks(m)]
        wait = ahead.coming.wait(ahead.backlog - ahead.view.coming) if lacking else 0.0
        waiting = {m.name: ahead.rise_of_waiting(m, wait) for m in lacking}
        lost = sum(waiting.values())
        if not (lost or unserved):
            return []
        here = [
            (m, r, n)
            for m, r in self._able
            if (n := m.derived(_parkable))
            and m.residency is not Residency.ABSENT
            and not ahead.holds_first(m)
            and m.name not in ahead.staying
        ]
        gains = [lost - waiting.get(m.name, 0.0) for m, _, _ in here]
        if unserved:
            still = ahead.unserved_without((m.name, pages) for m, _, pages in here)
            gains = [g + FOREVER * (unserved - n) for g, n in zip(gains, still, strict=True)]
        worth = [(*entry, gain) for entry, gain in zip(here, gains, strict=True) if gain > 0]
        turn, copy = ahead.parked, ahead.copy_seconds
        delays = [FOREVER if unserved else turn + copy(pages) for _, _, pages, _ in worth]
        models = [m for m, *_ in worth]
        harms = ahead.harms_of_absence(models, np.array(delays, np.float64)).tolist()
        each = zip(worth, harms, strict=True)
        return [(m, r, pages, harm) for (m, r, pages, gain), harm in each if MARGIN * harm < gain]

    def _relief(self, lacking: int, lacked: int) -> Iterator[PricedOrBound]:
        """Yield a lower bound of all prices, then the offers of `_parkings` by price. A claim pays
        for its share of the pages that will be used."""
        backlog = self._ahead.backlog or 1
        yield self._least_harm * min(1.0, lacking / backlog) / lacked, None
        found = []
        for m, rank, pages, harm in self._parkings:
            total = harm * min(1.0, lacking / min(pages, backlog))
            found.append((total / min(lacked, pages), total, m, rank, pages))
        for price, total, m, rank, pages in sorted(found, key=itemgetter(0)):
            yield price, _parking(m, pages, total, rank)

    @property
    def _least_harm(self) -> float:
        """A lower bound of the harm of each of `_parkings`: all requests of a model are delayed
        for a turn at least."""
        ahead = self._ahead
        return ROUNDING * TIE * min(FOREVER, ahead.parked) * ahead.work.least_weight()


def _parkable(m: ModelView) -> int:
    """Return the pages of all segments but the last: with that the model would lose its KV."""
    return sum(m.plan.parts[:-1])


def _rank(m: ModelView) -> int:
    """Return the importance of the most important of a model's first requests."""
    return min(r.order.rank for r in (*m.running[:1], *m.waiting[:1]))


def _lacks(m: ModelView) -> bool:
    """Whether requests of a model wait for KV alone."""
    return waiting_pages(m) > 0


def _turns(
    ahead: Outlook, able: Sequence[ModelView], claim: Claim, lacking: int
) -> Iterator[Offer]:
    """Yield offers to park models for the weights of the claim's model: those whose harm, times
    `MARGIN`, is less than what the claim gains."""
    parts = [(m, pages) for m in able if (pages := _segments(m, lacking))]
    for (m, pages), harm in zip(parts, _harms(ahead, parts, claim), strict=True):
        if MARGIN * harm < claim.gain:
            yield _parking(m, pages, harm)


def _parking(m: ModelView, pages: int, harm: float, rank: float = math.inf) -> Offer:
    key, act, price = (SEGMENTS, m.name), partial(_park, m), partial(float, harm)
    return Offer(
        key, m.name, pages, price, act, later=m.busy, rank=rank, for_others=True, in_use=True
    )


def _park(m: ModelView, pages: int, claim: Claim) -> Reside:
    return eviction(m, f"its requests can wait until {claim.model} had its turn", pages)


def _harms(ahead: Outlook, parts: Sequence[tuple[ModelView, int]], claim: Claim) -> Iterator[float]:
    """Yield the harm of parking each (model, pages) for one turn, that of making way for its return
    included."""
    models, copy = [m for m, _ in parts], ahead.copy_seconds
    absent = (m.residency is Residency.ABSENT for m in models)
    bases = [copy(m.missing_pages) if gone else 0.0 for m, gone in zip(models, absent, strict=True)]
    backs = [copy(pages) for _, pages in parts]
    harms = ahead.harms_of_a_turn(models, ahead.parked, np.array(backs), np.array(bases))
    other = ahead.view.model(claim.model)
    missing = copy(other.missing_pages)
    running = [o for o in ahead.view.models if o.running and o is not other]
    for m, back, harm in zip(models, backs, harms, strict=True):
        alone = not running or running == [m]
        idle = missing + back if alone else 0.0
        yield ahead.chain * (harm + ahead.lane_price * idle)


def _segments(m: ModelView, pages: int) -> int:
    """Return the pages of the fewest segments, in their order, that have at least `pages` together.
    The last segment is never counted: with it the model would lose its KV."""
    found = 0
    for part in m.plan.parts[:-1]:
        found += part
        if found >= pages:
            break
    return found
