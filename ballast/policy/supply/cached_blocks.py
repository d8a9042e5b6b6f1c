"""Offer cached prefixes at the harm of computing them again, if they are used again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ballast.core.actions import DropCache
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook

REUSE = 0.05
"""Part of cached prefixes that is used again, as long as nothing is known."""


def cached_blocks(ahead: Outlook, view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer cached prefixes that no request uses now, but not the one that the claim's own request
    would use.

    Those of preempted requests, which need them for certain, come last, at what computing them
    again costs; of the others a part is used again.
    """
    for m in view.models:
        pages = m.cached_pages + (0 if claim.weights else m.cached_borrowed)
        own = bool(m.waiting) and m.waiting[0].order == claim.order
        spared = m.first_cached_pages if own else 0
        if pages > spared:
            spare = m.waiting[0].id if spared else ""
            yield from _by_use(ahead, m, pages - spared, spare)


def _by_use(ahead: Outlook, m: ModelView, pages: int, spare: str) -> Iterator[Offer]:
    """Yield a model's cached pages in the order in which they are dropped."""
    needed = min(pages, m.derived(_preempted_pages))
    per_page = recompute_harm(ahead, m)
    key = "cache", m.name

    def act(n: int, claim: Claim) -> DropCache:
        return DropCache(m.name, n, why=f"{claim.model} needs pages", spare=spare)

    free = (pages - needed) // m.slab_pages * m.slab_pages
    for end, price in ((free, m.traffic.reused(REUSE) * per_page), (pages, per_page)):
        if end > 0:
            total = partial(float, price * end)
            yield Offer(key, m.name, end, total, act, grain=m.slab_pages, cumulative=True)


def recompute_harm(ahead: Outlook, m: ModelView) -> float:
    """Return the harm of computing a page of a model's KV again: all requests wait for the lane."""
    tokens = ahead.view.page_bytes / m.spec.kv_bytes_per_token
    return ahead.lane_price * tokens * m.costs.per_token


def _preempted_pages(m: ModelView) -> int:
    """Return the pages of KV that preempted requests had, of which most is cached still."""
    tokens = sum(r.tokens for r in m.waiting if r.generated)
    blocks = ceil_div(tokens, m.spec.block_tokens)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages
