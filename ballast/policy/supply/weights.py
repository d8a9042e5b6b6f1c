"""Offer weights of idle models at the harm of a request that comes before they are back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ballast.core.actions import Reside
from ballast.core.view import ModelView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.idle_segments import divided
from ballast.policy.market.offers import evictable, evicting
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.supply_curve import convex
from ballast.policy.plans import eviction
from ballast.policy.supply.cached_blocks import chances_of

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
    grains = dict(parts)
    ends = [0, *grains]
    harms = list(zip(ends, absences(ahead, m, [missing + end for end in ends]), strict=True))

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
        (away,) = absences(ahead, m, [m.own_pages])
        whole = chance * away + _cached_harm(ahead, m)
        yield evicting(m, partial(float, whole), why)._replace(for_others=True)


def absences(ahead: Outlook, m: ModelView, pages: Sequence[int]) -> list[float]:
    """Return the harm to a request that arrives while so many pages of a model's weights are
    missing, and to those that follow while they come: for each number of pages."""
    harms: list[float] = ahead.harms_on_arrival(m, ahead.absences(m, np.array(pages))).tolist()
    return harms


def _cached_harm(ahead: Outlook, m: ModelView) -> float:
    """Return the harm of losing a model's cached prefixes with its last weights."""
    tokens = m.cached_pages * ahead.view.page_bytes / m.spec.kv_bytes_per_token
    return ahead.lane_price * chances_of(ahead, m) * tokens * m.costs.per_token
