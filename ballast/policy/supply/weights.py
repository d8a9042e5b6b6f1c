"""Offer weights of idle models at the harm of a request that comes before they are back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from ballast.core.actions import Reside
from ballast.core.view import ModelView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.idle_segments import divided
from ballast.policy.market.offers import evictable, evicting
from ballast.policy.market.outlook import Outlook
from ballast.policy.plans import eviction

STAY = 10.0
"""Seconds for which pages that weights gave up are taken to be used otherwise."""


def idle_weights(ahead: Outlook) -> Iterator[Offer]:
    """Offer the weights of models without requests segment by segment, the last layers first, at
    prices that rise.

    The next request of the model waits for what is missing; how likely it comes within `STAY` falls
    with the model's idle time. Segments that other models contain go with all others.
    """
    for m in ahead.view.models:
        if m.idle and evictable(m):
            yield from _by_parts(ahead, m)


def _by_parts(ahead: Outlook, m: ModelView) -> Iterator[Offer]:
    """Yield a model's weights in the order in which they are given up."""
    view = ahead.view
    idle = max(0.0, view.now - m.last_used)
    why = f"idle for {idle:.1f} s, {{}} needs pages"
    missing = m.plan.missing_pages
    total, rest = m.present_pages, bool(m.shared or m.kv_pages)
    chance = m.traffic.chance(view.now, STAY)
    parts = m.derived(divided)
    harms = [(0, absence(ahead, m, missing))]
    harms += [(end, absence(ahead, m, missing + end)) for end, _ in parts]
    grains = dict(parts)

    def act(n: int, claim: Claim) -> Reside:
        whole = n >= total and not rest
        return eviction(m, why.format(claim.model), None if whole else n)

    for (start, before), (end, after) in convex(harms):
        price = partial(float, chance * (after - before) / (end - start) * end)
        key = "segments", m.name
        yield Offer(
            key, m.name, end, price, act, grain=grains[end], cumulative=True, for_others=True
        )
    if rest:
        whole = chance * absence(ahead, m, m.own_pages) + _cached_harm(ahead, m)
        yield evicting(m, partial(float, whole), why)._replace(for_others=True)


def absence(ahead: Outlook, m: ModelView, pages: int) -> float:
    """Return the harm to a request that arrives while `pages` of a model's weights are missing, and
    to those that follow while they come."""
    if pages <= 0:
        return 0.0
    delay = ahead.absence(m, pages)
    return ahead.arrival_harm(m, delay) + ahead.arrivals_harm(m, delay)


def _cached_harm(ahead: Outlook, m: ModelView) -> float:
    """Return the harm of losing a model's cached prefixes with its last weights."""
    tokens = m.cached_pages * ahead.view.page_bytes / m.spec.kv_bytes_per_token
    return ahead.lane_price * m.traffic.reused(0.05) * tokens * m.costs.per_token


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
