"""Sources of pages: each says what it could free, at what price, by which action.

The price of an offer is the harm expected from it, in seconds of delay to requests. Every source
has the form `offers(view, claim) -> offers`, best first by the source's own rule; sources may
be concatenated (a fixed order of remedies) or merged by price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ballast.core.actions import (
    RECALL_SECONDS,
    Compact,
    DropCache,
    Evict,
    Offer,
    Preempt,
    Recall,
)
from ballast.core.cost import copy_seconds
from ballast.core.request import Order
from ballast.core.view import DeviceView, ModelView, RequestView, Residency

REUSE = 0.05
"""Share of dropped cached prefixes assumed to be asked for again; an assumption, not measured."""


class Claim(NamedTuple):
    """A need for pages on behalf of a request: `pages` beyond what its model holds."""

    model: str
    order: Order
    pages: int
    may_preempt: bool
    """Whether work in progress of younger requests may be undone for it."""
    blocks: int = 0
    """Of a request: the blocks that those pages are for (`Shortage.blocks`)."""
    activate: bool = False
    """The model's weights are among the pages: it is to be activated once they are there."""
    first_pages: int = 0
    """Where it is: pages of these for the KV cache of its first request."""
    overdue: bool = False
    """Its request has waited longer than it should."""
    due: float = 0.0
    """When its request's first token is due, in seconds on the device's clock; matters only to
    claims that undo no work."""

    @property
    def precedence(self) -> tuple[bool, int, float, Order, str]:
        """Claims that may undo work come first, which free pages save; then those of requests whose
        first token is due earliest, as their prompts will be computed."""
        undoing = self.may_preempt
        due = 0.0 if undoing else self.due
        return not undoing, self.order.rank, due, self.order, self.model


Source = Callable[[DeviceView, Claim], Iterable[Offer]]


def reload_seconds(view: DeviceView, m: ModelView) -> float:
    """To copy a model's weights from the host again; of shared segments, its part."""
    return copy_seconds(round(m.fair_pages * view.page_bytes), view.link_bytes_per_second)


def _undoing_seconds(view: DeviceView, m: ModelView) -> float:
    """To copy a model's weights again, and to compute its running requests' KV."""
    return reload_seconds(view, m) + sum(recompute_seconds(m, r) for r in m.running)


def _copy_seconds(view: DeviceView, pages: int) -> float:
    """To copy so many pages over the link."""
    return copy_seconds(pages * view.page_bytes, view.link_bytes_per_second)


def recompute_seconds(m: ModelView, r: RequestView) -> float:
    """To compute a preempted request's KV again."""
    return m.costs.prefill_seconds(r.computed)


def cached_prefixes(view: DeviceView, claim: Claim) -> list[Offer]:
    """Cached prefixes nobody uses now, longest unused model first; not the one that the claim's own
    request goes on from."""
    found = []
    for m in view.derived(_with_cache):
        # Weights cannot lie on borrowed pages.
        pages = m.cached_pages + (0 if claim.activate else m.cached_borrowed)
        own = m.first_cached_pages if _is_first_of(m, claim) else 0
        if pages > own:
            spare = m.waiting[0].id if own else ""
            found.append(_dropping(view, m, pages - own, claim, spare))
    return found


def _with_cache(view: DeviceView) -> Sequence[ModelView]:
    """Models that have cached prefixes, longest unused first."""
    found = [m for m in view.models if m.cached_pages or m.cached_borrowed]
    return sorted(found, key=lambda m: (m.last_used, m.name))


def own_prefix(view: DeviceView, claim: Claim) -> list[Offer]:
    """The cached prefix that the claim's own request would go on from, where it takes more pages
    scattered than computed anew: the last remedy before that request fails."""
    m = view.model(claim.model)
    if not _is_first_of(m, claim):
        return []
    gained = m.first_cached_pages - max(0, m.first_pages - claim.pages)
    return [_dropping(view, m, gained, claim, "")] if gained > 0 else []


def _is_first_of(m: ModelView, claim: Claim) -> bool:
    """Whether the claim is of the model's first waiting request."""
    return bool(m.waiting) and m.waiting[0].order == claim.order


def _dropping(view: DeviceView, m: ModelView, pages: int, claim: Claim, spare: str) -> Offer:
    """So many pages of what `m` has cached."""
    tokens = pages * view.page_bytes // m.spec.kv_bytes_per_token
    action = DropCache(m.name, pages, why=f"{claim.model} needs pages", spare=spare)
    return Offer(pages, lambda: REUSE * m.costs.prefill_seconds(tokens), action, grain=m.slab_pages)


def loose_blocks(view: DeviceView, claim: Claim) -> list[Offer]:
    """Blocks scattered over more pages than they fill: moved together, they free the rest.

    A copy within the device is priced as one over the link, which is the slower.
    """
    found = []
    for m in view.derived(_with_loose_blocks):
        price = partial(_copy_seconds, view, m.loose_pages)
        action = Compact(m.name, m.loose_pages, why=f"{claim.model} needs pages")
        found.append(Offer(m.loose_pages, price, action, grain=m.slab_pages))
    return found


def _with_loose_blocks(view: DeviceView) -> Sequence[ModelView]:
    """Models whose blocks can be moved together now, those that gain most first."""
    found = [m for m in view.models if m.loose_pages > 0 and not m.busy]
    return sorted(found, key=lambda m: (-m.loose_pages, m.name))


def idle_models(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Models without a request (Prism, section 4: idle models are evicted), cheapest first.

    The next request of an evicted model waits for the copy. That harms it by as much of its TTFT
    service level as the copy eats, and the longer a model has been idle, the less likely it is
    soon: so the cheapest is a model idle for long whose copy is short beside its service level.
    """
    for price, _, m in view.derived(_idle):
        if m.name != claim.model:
            idle = max(0.0, view.now - m.last_used)
            action = Evict(m.name, why=f"idle for {idle:.1f} s, {claim.model} needs pages")
            yield Offer(m.evictable_pages, partial(float, price), action)


def _idle(view: DeviceView) -> Sequence[tuple[float, str, ModelView]]:
    """Models that may be evicted and have no request, with the price of that; cheapest first."""
    found = []
    for m in view.models:
        if _evictable(m) and m.idle:
            idle = max(0.0, view.now - m.last_used)
            copy = reload_seconds(view, m)
            found.append((copy * (copy / m.spec.slo.ttft) / (1.0 + idle), m.name, m))
    return sorted(found, key=lambda entry: entry[:2])


def lent_pages(view: DeviceView, claim: Claim) -> list[Offer]:
    """Pages lent to other devices, which bring home, or lose, the KV cache that lies on them."""
    return [
        Offer(
            pages,
            partial(_copy_seconds, view, pages),
            Recall(device, pages, RECALL_SECONDS, why=f"{claim.model} needs pages"),
            grain=1,
            later=True,
        )
        for device, pages in view.lent
    ]


def younger_requests(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Running requests that came after the claim's, youngest first.

    One whose blocks share all their pages with others' frees no page, but blocks for its model.
    """
    return _younger(view.derived(_youngest_running), claim)


def own_younger_requests(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """As `younger_requests`, of the claim's own model only: for memory that is not shared."""
    return _younger(_running_of(view.model(claim.model)), claim)


def _youngest_running(view: DeviceView) -> Sequence[tuple[RequestView, ModelView]]:
    """Running requests of resident models with what is theirs, youngest first."""
    found = [entry for m in view.models for entry in _running_of(m)]
    found.sort(key=lambda entry: entry[0].order, reverse=True)
    return found


def _running_of(m: ModelView) -> Sequence[tuple[RequestView, ModelView]]:
    """The same of one model."""
    if m.residency is not Residency.RESIDENT:
        return ()
    return [(r, m) for r in reversed(m.running) if r.pages > 0 or r.blocks > 0]


def _younger(running: Sequence[tuple[RequestView, ModelView]], claim: Claim) -> Iterator[Offer]:
    if not claim.may_preempt:
        return
    for r, m in running:
        if r.order <= claim.order:
            return
        if r.pages > 0 or m.name == claim.model:
            price = partial(recompute_seconds, m, r)
            why = f"{claim.model} comes first"
            yield Offer(r.pages, price, Preempt(m.name, r.id, why), r.blocks)


def younger_models(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Models all of whose requests came after the claim's: weights, KV and all, youngest first."""
    if not claim.may_preempt:
        return
    for first, m in view.derived(_busy_evictable):
        if first <= claim.order:
            return
        if m.name != claim.model:
            yield Offer(
                m.evictable_pages,
                partial(_undoing_seconds, view, m),
                Evict(m.name, why=f"{claim.model} comes first"),
            )


def _busy_evictable(view: DeviceView) -> Sequence[tuple[Order, ModelView]]:
    """Models that may be evicted and have requests, with the order of the oldest; youngest
    first."""
    found = [(oldest(m), m) for m in view.models if _evictable(m) and not m.idle]
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def _evictable(m: ModelView) -> bool:
    """Whether a model's weights may go."""
    return m.residency is Residency.RESIDENT and not m.spec.pinned


def oldest(m: ModelView) -> Order:
    """Order of a model's oldest request; the model must have one."""
    return min(r.order for r in (*m.running[:1], *m.waiting[:1]))
