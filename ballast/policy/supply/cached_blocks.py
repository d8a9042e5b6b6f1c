"""Offer cached prefixes at the harm of bringing them back, if they are used again."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter

from ballast.core.actions import DropCache
from ballast.core.cost import copy_seconds
from ballast.core.units import ceil_div
from ballast.core.view import ModelView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import ListedOffers, Priced, by_price, convex

REUSE = 0.05
"""Part of cached prefixes that is used again, as long as nothing is known."""


class CachedBlocks:
    """Cached prefixes that no request uses now, but not the one that the claim's own request would
    use.

    Those of preempted requests, which need them for certain, come last, at what bringing them
    back costs; of the others a part is used again.
    """

    def __init__(self, ahead: Outlook) -> None:
        self._ahead = ahead
        models = ahead.view.models
        self._models = {m.name: m for m in models if m.cached_pages or m.cached_borrowed}
        self._lists: dict[bool, ListedOffers] = {}
        """Offers for KV, and for weights, which cannot lie on borrowed pages."""

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Priced]:
        """As of `OfferTable`."""
        if not self._models:
            return ()
        listed = self._lists.get(claim.weights)
        if listed is None:
            offers = [o for m in self._models.values() for o in self._of(m, claim.weights)]
            listed = self._lists[claim.weights] = ListedOffers(offers)
        found = listed.cheapest(budget, claim, lacked)
        m = self._waiting_for(claim)
        if m is None:
            return found
        others = (priced for priced in found if priced[1].owner != m.name)
        shortages = self._ahead.view.shortages
        if not claim.weights and all(s.request_id != m.waiting[0].id for s in shortages):
            return others  # its claim counts its own as there
        own = by_price(budget, self._of(m, claim.weights, m.first_cached_pages), lacked)
        return heapq.merge(others, own, key=itemgetter(0))

    def is_own(self, claim: Claim) -> bool:
        """As of `OfferTable`."""
        return claim.weights or self._waiting_for(claim) is not None

    def take(self, offers: Sequence[Offer]) -> bool:
        """As of `OfferTable`."""
        changed = [listed.take(offers) for listed in self._lists.values()]
        return any(changed)

    def _waiting_for(self, claim: Claim) -> ModelView | None:
        """Return the model with cached prefixes whose first waiting request a claim is of."""
        m = self._models.get(claim.model)
        return m if m is not None and m.waiting and m.waiting[0].order == claim.order else None

    def _of(self, m: ModelView, weights: bool, spared: int = 0) -> Iterator[Offer]:
        pages = m.cached_pages + (0 if weights else m.cached_borrowed) - spared
        if pages > 0:
            yield from _by_use(self._ahead, m, pages, m.waiting[0].id if spared else "")


def _by_use(ahead: Outlook, m: ModelView, pages: int, spare: str) -> Iterator[Offer]:
    """Yield a model's cached pages in the order in which they are dropped."""
    needed = min(pages, m.derived(_preempted_pages))
    per_page = restoring_harm(ahead, m)
    key = "cache", m.name

    def act(n: int, claim: Claim) -> DropCache:
        return DropCache(m.name, n, why=f"{claim.model} needs pages", spare=spare)

    free = (pages - needed) // m.slab_pages * m.slab_pages
    for end, price in (*_by_age(ahead, m, free), (pages, 1.0)):
        if end > 0:
            total = partial(float, price * per_page * end)
            yield Offer(key, m.name, end, total, act, grain=m.slab_pages, cumulative=True)


def _by_age(ahead: Outlook, m: ModelView, pages: int) -> Iterator[tuple[int, float]]:
    """Yield the ends of parts of a model's cached pages, in the order in which they are dropped,
    and the chance that each page of the part is used again, which rises."""
    chances = m.derived(_chances) if ahead.survival else ()
    if not chances or pages < len(chances) * m.slab_pages:
        yield pages, chances_of(ahead, m)
        return
    edges = [
        round(pages * k / len(chances)) // m.slab_pages * m.slab_pages
        for k in range(len(chances) + 1)
    ]
    used = accumulate(
        (c * (b - a) for c, (a, b) in zip(chances, pairwise(edges), strict=True)), initial=0.0
    )
    for (start, before), (end, after) in convex(list(zip(edges, used, strict=True))):
        yield end, (after - before) / (end - start)


def chances_of(ahead: Outlook, m: ModelView) -> float:
    """Return the chance that a cached page of a model is used again, in the mean."""
    chances = m.derived(_chances) if ahead.survival else ()
    return sum(chances) / len(chances) if chances else m.traffic.reused(REUSE)


def _chances(m: ModelView) -> Sequence[float]:
    return m.cached_chances()


def restoring_harm(ahead: Outlook, m: ModelView) -> float:
    """Return the harm of bringing a page of a model's KV back: all requests wait for the lane that
    computes it, or, where tiers keep it and that harms less, one request for its copy."""
    page_bytes = ahead.view.page_bytes
    tokens = page_bytes / m.spec.kv_bytes_per_token
    computing = ahead.lane_price * tokens * m.costs.per_token
    if not ahead.fetch_rate:
        return computing
    return min(computing, ahead.arrival_harm(m, copy_seconds(page_bytes, ahead.fetch_rate)))


def _preempted_pages(m: ModelView) -> int:
    """Return the pages of KV that preempted requests had, of which most is cached still."""
    tokens = sum(r.tokens for r in m.waiting if r.generated)
    blocks = m.spec.blocks_of(tokens)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages
