"""List ways to free pages as priced offers: cached prefixes, weights, lent pages, preemption.

The price of an offer is the harm expected from it, in request-seconds: seconds of delay, summed
over the requests that it delays. Memory policies pass these sources to
`ballast.policy.market.cover`, concatenated (a fixed order of remedies) or merged by price.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

from ballast.core.actions import RECALL_SECONDS, Compact, DropCache, Preempt, Recall, Reside
from ballast.core.cost import copy_seconds
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.claims import BEHIND_ALL
from ballast.policy.market.starvation import starving
from ballast.policy.plans import eviction

REUSE = 0.05
"""Share of dropped cached prefixes that is expected to be requested again; an assumption, not
measured."""


def reload_seconds(view: DeviceView, m: ModelView) -> float:
    """Return the seconds to copy a model's weights from the host again, with its part of shared
    segments."""
    return copy_seconds(round(m.fair_pages * view.page_bytes), view.weights_bytes_per_second)


def return_seconds(view: DeviceView, m: ModelView) -> float:
    """Return the seconds to copy what is missing of an absent model's weights, with its part of
    shared segments."""
    pages = m.fair_pages - m.present_pages
    return copy_seconds(round(pages * view.page_bytes), view.weights_bytes_per_second)


def _undoing_seconds(view: DeviceView, m: ModelView) -> float:
    """Return the request-seconds of evicting a busy model: all of its requests wait for its weights
    to be copied again, and KV of the running ones is recomputed."""
    waiting = len(m.running) + len(m.waiting)
    return waiting * reload_seconds(view, m) + sum(recompute_seconds(m, r) for r in m.running)


def _copy_seconds(view: DeviceView, pages: int) -> float:
    """Return the seconds to copy `pages` pages over the link."""
    return copy_seconds(pages * view.page_bytes, view.link_bytes_per_second)


def recompute_seconds(m: ModelView, r: RequestView) -> float:
    """Return the request-seconds of recomputing a preempted request's KV."""
    return prefill_delay(m, r.computed)


def prefill_delay(m: ModelView, tokens: int) -> float:
    """Return the request-seconds of computing `tokens` tokens: all running requests of the model
    wait for these jobs, not only the one that they are computed for."""
    return m.costs.prefill_seconds(tokens) * max(1, len(m.running))


# -- cached prefixes ------------------------------------------------------------------------------


def cached_prefixes(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer cached prefixes that no request uses now, of the longest unused model first; but not
    the prefix that the claim's own request would reuse."""
    for m in view.derived(_with_cache):
        # Weights cannot lie on borrowed pages.
        pages = m.cached_pages + (0 if claim.weights else m.cached_borrowed)
        own = 0
        if _is_first_of(m, claim):
            # Where it has not been tried to admit it, its claim counts them as there.
            uses = not (claim.weights or _is_short(view, m))
            own = pages if uses else m.first_cached_pages
        if pages > own:
            yield _dropping(view, m, pages - own, m.waiting[0].id if own else "")


def _with_cache(view: DeviceView) -> Sequence[ModelView]:
    """Return the models that have cached prefixes, longest unused first; those before all others of
    whose prefixes such of a tenant would go first that has more than its share on the device."""
    found = [m for m in view.models if m.cached_pages or m.cached_borrowed]
    over = _over_shares(found)
    return sorted(found, key=lambda m: (_first_to_lose(m) not in over, m.last_used, m.name))


def _over_shares(models: Sequence[ModelView]) -> set[str]:
    """Return the tenants that have more than an equal share of the cached prefixes."""
    held: Counter[str] = Counter()
    for m in models:
        held.update(dict(m.cached_of))
    return {tenant for tenant, pages in held.items() if pages * len(held) > held.total()}


def _first_to_lose(m: ModelView) -> str | None:
    """Return the tenant that has most of a model's cached prefixes."""
    return max(m.cached_of, key=lambda of: of[1], default=(None, 0))[0]


def own_prefix(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer the cached prefix that the claim's own request would reuse, if its scattered blocks
    take more pages than computing it anew: the last remedy before that request fails."""
    m = view.model(claim.model)
    if _is_first_of(m, claim):
        gained = m.first_cached_pages - max(0, m.first_pages - claim.pages)
        if gained > 0:
            yield _dropping(view, m, gained, "")


def _is_short(view: DeviceView, m: ModelView) -> bool:
    """Whether a model's first waiting request was refused admission."""
    return any(s.request_id == m.waiting[0].id for s in view.shortages)


def _is_first_of(m: ModelView, claim: Claim) -> bool:
    """Whether the claim is of the model's first waiting request."""
    return bool(m.waiting) and m.waiting[0].order == claim.order


def _dropping(view: DeviceView, m: ModelView, pages: int, spare: str) -> Offer:
    """Offer `pages` pages of a model's cached prefixes, except the one that the request `spare`
    would reuse."""

    def price() -> float:
        tokens = pages * view.page_bytes // m.spec.kv_bytes_per_token
        return REUSE * prefill_delay(m, tokens)

    def act(n: int, claim: Claim) -> DropCache:
        return DropCache(m.name, n, why=f"{claim.model} needs pages", spare=spare)

    return Offer(("cache", m.name), m.name, pages, price, act, grain=m.slab_pages)


# -- scattered blocks -----------------------------------------------------------------------------


def loose_blocks(view: DeviceView, claim: Claim) -> Iterable[Offer]:
    """Offer to compact blocks that are scattered over more pages than they fill.

    A copy within the device is priced as one over the link, which is the slower.
    """
    return view.derived(compactions)


def compactions(view: DeviceView) -> Sequence[Offer]:
    """Offer compaction of each model whose blocks can be moved now, the largest gain first."""
    found = [m for m in view.models if m.loose_pages > 0 and not m.busy]
    found.sort(key=lambda m: (-m.loose_pages, m.name))
    return [
        Offer(
            ("loose", m.name),
            m.name,
            m.loose_pages,
            partial(_copy_seconds, view, m.loose_pages),
            partial(_compact, m.name),
            grain=m.slab_pages,
            at_hand=True,
        )
        for m in found
    ]


def _compact(model: str, pages: int, claim: Claim) -> Compact:
    return Compact(model, pages, why=f"{claim.model} needs pages")


# -- weights --------------------------------------------------------------------------------------


def idle_models(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer eviction of models without requests (Prism, section 4), cheapest first.

    The next request of an evicted model waits for the copy of its weights. The harm is the part of
    its TTFT service level that the copy takes, and it is less likely soon the longer a model has
    been idle: so the cheapest is a model idle for long whose copy is short relative to its service
    level.
    """
    return (offer for offer in view.derived(_idle) if offer.owner != claim.model)


def _idle(view: DeviceView) -> Sequence[Offer]:
    """Offer eviction of each unpinned resident model without requests, cheapest first."""
    found = []
    for m in view.models:
        if evictable(m) and m.idle:
            idle = max(0.0, view.now - m.last_used)
            found.append((absence_harm(view, m, idle), m.name, idle, m))
    found.sort(key=lambda entry: entry[:2])
    return [
        evicting(m, partial(float, price), f"idle for {idle:.1f} s, {{}} needs pages")
        for price, _, idle, m in found
    ]


def absence_harm(view: DeviceView, m: ModelView, idle: float) -> float:
    """Return the harm of a model's absence: the part of a request's service level that the copy of
    its weights takes, times that copy; less for one that has been `idle` for longer."""
    copy = reload_seconds(view, m)
    return copy * (copy / m.spec.slo.ttft) / (1.0 + idle)


def younger_models(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer eviction, with weights and KV, of models all of whose requests came after the claim's
    or wait behind all others, youngest first. For a claim of a model that starves, requests of
    others that only wait do not count: they have no work to lose."""
    if claim.may_preempt:
        starves = starving(view, view.model(claim.model))
        order = claim.order if claim.undoing is None else claim.undoing
        for offer in view.derived(_busy_at_work if starves else _busy):
            if offer.undoes is None or offer.undoes <= order:
                return
            if offer.owner != claim.model:
                yield offer


def _busy(view: DeviceView) -> Sequence[Offer]:
    """Offer eviction of each unpinned resident model with requests, youngest first; not of one that
    starves: it has just come, and would evict in turn what had it evicted before it ran."""
    busy = (m for m in view.models if _has_work(m) and not starving(view, m))
    return _evicting_busy(view, [(m.derived(_first_served), m) for m in busy])


def _busy_at_work(view: DeviceView) -> Sequence[Offer]:
    """Offer the same as `_busy`, by the oldest running request of each model that does not
    starve."""
    busy = filter(_has_work, view.models)
    return _evicting_busy(view, [(_first_at_work(view, m), m) for m in busy])


def _evicting_busy(view: DeviceView, found: list[tuple[Precedence, ModelView]]) -> Sequence[Offer]:
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [
        evicting(m, partial(_undoing_seconds, view, m), "{} comes first", first)
        for first, m in found
    ]


def _has_work(m: ModelView) -> bool:
    """Whether a model has requests, and its weights may be evicted."""
    return not m.idle and evictable(m)


def evictable(m: ModelView) -> bool:
    """Whether a model's weights, or what is left of them on the device, may be evicted."""
    here = m.residency is Residency.RESIDENT
    here |= m.residency is Residency.ABSENT and m.present_pages > 0
    return here and not m.spec.pinned


def evicting(
    m: ModelView, price: Callable[[], float], why: str, undoes: Precedence | None = None
) -> Offer:
    """Offer a model's weights and KV; `why` is a format of the claim's model."""

    def act(_: int, claim: Claim) -> Reside:
        return eviction(m, why.format(claim.model))

    return Offer(
        ("model", m.name),
        m.name,
        m.present_pages + m.kv_pages,
        price,
        act,
        undoes=undoes,
        everything=True,
        releases=m.shared,
    )


def _first_served(m: ModelView) -> Precedence:
    """Return the precedence of a model's oldest request; one after all of its priority, if the
    model runs nothing and its requests wait behind all others."""
    first = m.derived(oldest)
    behind = not m.running and m.waiting[0].place >= BEHIND_ALL
    return first._replace(arrival=math.inf) if behind else first


def _first_at_work(view: DeviceView, m: ModelView) -> Precedence:
    """Return the precedence of a model's oldest running request; one after all of its priority if
    it runs nothing, unless it starves: of models that starve and wait behind all others, each would
    evict the one that has just come, before that runs anything."""
    if m.running:
        return m.running[0].order
    first = m.derived(oldest)
    return first if starving(view, m) else first._replace(arrival=math.inf)


def oldest(m: ModelView) -> Precedence:
    """Return the precedence of a model's oldest request; the model must have one."""
    return min(r.order for r in (*m.running[:1], *m.waiting))


# -- pages lent to other devices ------------------------------------------------------------------


def lent_pages(view: DeviceView, claim: Claim) -> Iterable[Offer]:
    """Offer to recall pages lent to other devices; the KV on them is moved by the borrower, or
    lost."""
    return view.derived(recalls) if view.lent else ()


def recalls(view: DeviceView) -> Sequence[Offer]:
    """Offer to recall the pages lent to each device."""
    return [
        Offer(
            ("lent", device),
            f"lent:{device}",
            pages,
            partial(_copy_seconds, view, pages),
            partial(_recall, device),
            grain=1,
            later=True,
        )
        for device, pages in view.lent
    ]


def _recall(device: str, pages: int, claim: Claim) -> Recall:
    return Recall(device, pages, RECALL_SECONDS, why=f"{claim.model} needs pages")


# -- work in progress -----------------------------------------------------------------------------


def younger_requests(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer preemption of running requests that came after the claim's, youngest first.

    One whose blocks share all their pages with others' frees no page, but blocks for its model.
    """
    return until_older(view.derived(youngest_running), claim)


def own_younger_requests(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Yield the offers of `younger_requests` that are of the claim's own model.

    Used where models do not share memory.
    """
    return until_older(view.model(claim.model).derived(_preemptible), claim)


def until_older(running: Iterable[Offer], claim: Claim) -> Iterator[Offer]:
    """Yield the preemptions, youngest request first, that a claim may have and gains from."""
    if claim.may_preempt:
        for offer in running:
            if offer.undoes is None or offer.undoes <= claim.order:
                return
            if offer.pages > 0 or offer.owner == claim.model:
                yield offer


def youngest_running(view: DeviceView) -> Sequence[Offer]:
    """Offer preemption of all running requests, youngest first."""
    offers = chain.from_iterable(m.derived(_preemptible) for m in view.models)
    return sorted(offers, key=attrgetter("undoes"), reverse=True)


def _preemptible(m: ModelView) -> Sequence[Offer]:
    """Offer preemption of a resident model's running requests that hold pages or blocks, youngest
    first."""
    if m.residency is not Residency.RESIDENT:
        return ()
    return [
        Offer(
            ("request", m.name, r.id),
            m.name,
            r.pages,
            partial(recompute_seconds, m, r),
            partial(_preempt, m.name, r.id),
            r.blocks,
            undoes=r.order,
        )
        for r in reversed(m.running)
        if r.pages > 0 or r.blocks > 0
    ]


def _preempt(model: str, request_id: str, _: int, claim: Claim) -> Preempt:
    return Preempt(model, request_id, why=f"{claim.model} comes first")
