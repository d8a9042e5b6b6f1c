"""Offer the weights of idle models segment by segment, each at its marginal price.

Used by the memory policies of an elastic pool, in place of `offers.idle_models`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

from ballast.core.actions import Reside
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.offers import absence_harm, evictable, evicting
from ballast.policy.plans import eviction

PARTS = 8
"""Prices at which the weights of an idle model are offered, from the last layers to all of them."""


def idle_segments(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer the weights of models without requests segment by segment, at marginal prices, the
    cheapest first.

    The harm of a missing part is the part of a request's TTFT service level that its copy takes,
    times that copy: it grows with the square of what is missing. So many models that miss little
    are cheaper than one that misses all; but the longer a model has been idle, the less likely soon
    is its next request. Segments that other models contain go with all others.
    """
    models = view.derived(_idle_models)
    offers = (_by_parts(view, m) for m in models if m.name != claim.model)
    return (offer for _, _, offer in heapq.merge(*offers, key=itemgetter(0, 1)))


def _idle_models(view: DeviceView) -> Sequence[ModelView]:
    """Return the models without requests that have weights to give up."""
    return [m for m in view.models if m.idle and evictable(m)]


def _by_parts(view: DeviceView, m: ModelView) -> Iterator[tuple[float, str, Offer]]:
    """Yield the offers of one idle model's weights, each with its price per page; prices rise."""
    idle = max(0.0, view.now - m.last_used)
    why = f"idle for {idle:.1f} s, {{}} needs pages"
    missing = m.plan.missing_pages
    total = m.present_pages
    rest = m.shared or m.kv_pages
    before = 0

    def act(n: int, claim: Claim) -> Reside:
        whole = n >= total and not rest
        return eviction(m, why.format(claim.model), None if whole else n)

    for end, grain in m.derived(divided):
        copies = (missing + before + missing + end) * view.page_bytes
        per_page = _harm_of_copy(view, m, copies, idle) * view.page_bytes
        price = partial(float, per_page * end)
        key = "segments", m.name
        offer = Offer(key, m.name, end, price, act, grain=grain, cumulative=True)
        yield per_page, m.name, offer
        before = end
    if rest:
        whole = evicting(m, partial(float, absence_harm(view, m, idle)), why)
        yield math.inf, m.name, whole


def _harm_of_copy(view: DeviceView, m: ModelView, n_bytes: int, idle: float) -> float:
    """Return the slope, per byte, of the harm of bytes that are missing, where twice the mean of
    them is `n_bytes`."""
    rate = view.weights_bytes_per_second
    return n_bytes / rate**2 / m.spec.slo.ttft / (1.0 + idle)


def divided(m: ModelView) -> Sequence[tuple[int, int]]:
    """Return the ends of the offers of a model's segments, in pages from the first one given up,
    each with the pages of its segments."""
    found: list[tuple[int, int]] = []
    end = 0
    for pages, alike in groupby(m.plan.parts):
        n = len(list(alike))
        each = ceil_div(n, PARTS)
        found += [(end + pages * min(n, k + each), pages) for k in range(0, n, each) if pages]
        end += pages * n
    return found
