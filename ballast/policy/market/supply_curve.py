"""Merge what sources offer, the cheapest page first, for all claims of one decision.

What does not depend on a claim is computed and sorted once: a source is a table of offers, asked by
each claim that lacks pages. Offers that were taken change places; all others keep theirs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import Protocol

from ballast.core.request import Precedence
from ballast.policy.market.claim_and_offer import Claim, Offer, RunningWork
from ballast.policy.market.page_budget import PageBudget

Priced = tuple[float, Offer]
"""An offer with its price per page that a claim can use."""
PricedOrBound = tuple[float, Offer | None]
"""The same; or a price that none of the offers that follow is below (None), so that these are
computed only where a claim comes to them."""
_NAMES = {
    "in place": "reading in host memory",
    "cache": "cached prefixes of",
    "lent": "pages lent to",
    "loose": "scattered blocks of",
    "layers": "layers of",
    "model": "all of",
    "request": "request",
    "segments": "weights of",
    "staged": "blocks to the host of",
}
"""What operators call the memory of offers, by the first part of their keys."""


def memory_of(key: Sequence[str]) -> str:
    """Return what an operator calls the memory of the offers with a key."""
    kind, *rest = key
    return f"{_NAMES.get(kind, kind)} {' of '.join(reversed(rest))}"


class OfferTable(Protocol):
    """What one source offers in one decision."""

    def cheapest(
        self, budget: PageBudget, claim: Claim, lacked: int
    ) -> Iterable[Priced] | Iterable[PricedOrBound]:
        """Return offers for a claim that lacks so many pages, and perhaps others that it may not
        take (`Claim.may_take`); prices rise."""
        ...

    def is_own(self, claim: Claim) -> bool:
        """Return whether a claim is offered anything else than others of as many pages are."""
        ...

    def take(self, offers: Sequence[Offer]) -> bool:
        """Note that offers, of any source, were taken for good; return whether prices of others
        have changed."""
        ...


class WorkTable(OfferTable, Protocol):
    """Running requests in one decision."""

    def by_price(self, lacked: int) -> Iterator[tuple[float, RunningWork]]:
        """Yield those that hold pages, with their prices per page that a claim which lacks so many
        can use; prices rise."""
        ...


class SupplyCurve:
    """What all sources offer in one decision, by marginal price.

    A curve is followed as far as a claim needs, and kept for those that come after.
    """

    def __init__(self, tables: Sequence[OfferTable], running: WorkTable | None = None) -> None:
        """`running`: the source that comes after all others of the same price."""
        self._others, self._running = tables, running
        self._tables = tables if running is None else (*tables, running)
        self._curves: dict[tuple[int, int], _Curve] = {}
        """By a claim's pages, and those that it lacks."""
        self._work: dict[tuple[int, int], CheapestWork] = {}
        """By the same."""

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Offer]:
        """Return offers for a claim that lacks so many pages, the cheapest page first."""
        if not claim.grows and any(table.is_own(claim) for table in self._tables):
            return _Curve(_merged(self._tables, budget, claim, lacked))
        curve = self._curves.get((claim.pages, lacked))
        if curve is None:
            curve = _Curve(_merged(self._tables, budget, claim, lacked))
            self._curves[claim.pages, lacked] = curve
        return curve

    def running(self, budget: PageBudget, claim: Claim, lacked: int) -> CheapestWork:
        """Return the running requests that cost less than all else, for a growth that lacks so many
        pages."""
        work = self._work.get((claim.pages, lacked))
        if work is None:
            others = _merged(self._others, budget, claim, lacked)
            running = self._running.by_price(lacked) if self._running else iter(())
            work = self._work[claim.pages, lacked] = CheapestWork(running, others)
        return work

    def take(self, offers: Sequence[Offer]) -> None:
        """Note that offers were taken for good; that of a request changes no other's price."""
        alone = len(offers) == 1 and offers[0].undoes is not None
        if not alone or offers[0].grain or offers[0].everything:
            changed = [table.take(offers) for table in self._tables]
            if any(changed):
                self._curves.clear()
                self._work.clear()
        for curve in self._curves.values():
            curve.drop(offers)


def _merged(
    tables: Sequence[OfferTable], budget: PageBudget, claim: Claim, lacked: int
) -> Iterator[PricedOrBound]:
    offered: list[Iterable[PricedOrBound]]
    offered = [table.cheapest(budget, claim, lacked) for table in tables]
    return heapq.merge(*offered, key=itemgetter(0))


class CheapestWork:
    """Running requests up to the first that costs as much as anything else, known as far as claims
    have come."""

    def __init__(
        self, running: Iterator[tuple[float, RunningWork]], others: Iterator[PricedOrBound]
    ) -> None:
        self._rest, self._others = running, others
        self._other = next(others, None)
        """The cheapest of what else is offered."""
        self._known: list[RunningWork] = []

    def first(self, n: int, order: Precedence, budget: PageBudget) -> list[RunningWork]:
        """Return the `n` cheapest that come after `order` and were not taken: all, if there is
        nothing else; fewer or none, if anything else is as cheap."""
        found: list[RunningWork] = []
        for work in chain(self._known, self._further()):
            if order < work.undoes and not budget.used_up(work):
                found.append(work)
                if len(found) == n:
                    return found
        return [] if self._is_offered(math.inf) else found

    def take(self, work: RunningWork) -> None:
        """Forget one that was taken."""
        self._known.remove(work)

    def _further(self) -> Iterator[RunningWork]:
        known = self._known
        for price, work in self._rest:
            if self._is_offered(price):
                self._rest = chain([(price, work)], self._rest)
                return
            known.append(work)
            yield work

    def _is_offered(self, price: float) -> bool:
        """Whether anything else is offered at a price, or less."""
        while (other := self._other) is not None and other[0] <= price:
            if other[1] is not None:
                return True
            self._other = next(self._others, None)
        return False


class _Curve:
    """Offers by price, known as far as claims have come."""

    def __init__(self, priced: Iterator[PricedOrBound]) -> None:
        self._rest = priced
        self._known: dict[int, Offer] = {}
        """By identity, in order."""

    def __iter__(self) -> Iterator[Offer]:
        known = self._known
        yield from known.values()
        for _, offer in self._rest:
            if offer is not None:
                known[id(offer)] = offer
                yield offer

    def drop(self, offers: Sequence[Offer]) -> None:
        """Forget indivisible offers that were taken."""
        for offer in offers:
            if not offer.grain:
                self._known.pop(id(offer), None)


class ListedOffers:
    """Offers that do not depend on the claim."""

    def __init__(self, offers: Iterable[Offer]) -> None:
        self._steady: list[_Placed] = []
        """Offers of owners of which nothing was taken: their prices stay."""
        self._touched: list[_Placed] = []
        for placed in enumerate(offers):
            (self._touched if placed[1].everything else self._steady).append(placed)
        self._sorted: dict[int, list[tuple[float, int, Offer]]] = {}
        """Steady offers by price, for each number of pages lacked."""

    def __bool__(self) -> bool:
        return bool(self._steady or self._touched)

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Priced]:
        """As of `OfferTable`."""
        known = self._sorted.get(lacked)
        if known is None:
            known = self._sorted[lacked] = _by_price(budget, self._steady, lacked)
        if self._touched:
            touched = _by_price(budget, self._touched, lacked)
            known = list(heapq.merge(known, touched, key=itemgetter(0, 1)))
        return ((price, offer) for price, _, offer in known)

    def is_own(self, claim: Claim) -> bool:
        """As of `OfferTable`."""
        return False

    def take(self, offers: Sequence[Offer]) -> bool:
        """As of `OfferTable`."""
        owners = {offer.owner for offer in offers}
        touched = [placed for placed in self._steady if placed[1].owner in owners]
        if touched:
            self._touched += touched
            self._steady = [placed for placed in self._steady if placed[1].owner not in owners]
            self._sorted.clear()
        return any(placed[1].owner in owners for placed in self._touched)


_Placed = tuple[int, Offer]
"""An offer with its place in its source's list."""


def _by_price(
    budget: PageBudget, offers: Iterable[_Placed], lacked: int
) -> list[tuple[float, int, Offer]]:
    priced = ((unit_price(budget, offer, lacked), place, offer) for place, offer in offers)
    return sorted(priced, key=itemgetter(0, 1))


def by_price(budget: PageBudget, offers: Iterable[Offer], lacked: int) -> list[Priced]:
    """Return offers with their prices for a claim that lacks so many pages, ascending."""
    priced = [(unit_price(budget, offer, lacked), offer) for offer in offers]
    priced.sort(key=itemgetter(0))
    return priced


def unit_price(budget: PageBudget, offer: Offer, lacked: int) -> float:
    """Return an offer's price per page that a claim which lacks so many can use; inf: none."""
    if budget.used_up(offer):
        return math.inf
    pages = budget.left(offer, lacked)
    useful = min(lacked, budget.gives(offer, pages))
    return offer.price_of(pages) / useful if useful > 0 else math.inf


def convex(points: Sequence[tuple[int, float]]) -> Iterator[tuple[tuple[int, float], ...]]:
    """Yield the edges of the lower convex hull of (pages, harm), pages ascending: the marginal
    prices of the edges rise."""
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return pairwise(hull)


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else math.inf
