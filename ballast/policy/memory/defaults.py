"""Decide what all memory policies decide alike unless one overrides it.

Make room for a new model's activations and for KV that leaves borrowed pages, evict models whose
time to live is over, keep models within their `limit`, answer an operator's order to lend pages,
and choose the last resort when no request can go on. `ballast.policy.base.MemoryPolicy` has these
as its defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import RECALL_SECONDS, Action, DropCache, Preempt, Recall, Refuse, Reside
from ballast.core.model import kv_room
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.plans import eviction

ACTIVATIONS_GROW = "jobs of a new model take larger activations"
KV_COMES_HOME = "KV comes home from borrowed pages"
"""Reasons of actions, as recorded in the story."""


def caches_in_order(view: DeviceView, pages: int, why: str = ACTIVATIONS_GROW) -> Sequence[Action]:
    """Drop `pages` of cached prefixes, model after model in the fleet's order, or all that are
    cached if these are fewer."""
    drops = []
    for m in view.models:
        if pages > 0 and m.cached_pages:
            drops.append(DropCache(m.name, pages, why))
            pages -= m.cached_pages
    return drops


def caches_for(view: DeviceView, model: str, own: int, pages: int) -> Sequence[Action]:
    """Drop `pages` of cached prefixes, at least `own` of them from `model`, as its limit requires.

    The rest comes from the models unused for longest. Drops nothing if all caches together are too
    few.
    """
    cached = {m.name: m.cached_pages for m in view.models}
    missing = max(own, pages)
    if own > cached[model] or missing > sum(cached.values()):
        return ()
    drops = [DropCache(model, own, KV_COMES_HOME)] if own > 0 else []
    cached[model] -= max(0, own)
    missing -= max(0, own)
    for m in sorted(view.models, key=lambda m: (m.last_used, m.name)):
        n = min(missing, cached[m.name])
        if n > 0:
            drops.append(DropCache(m.name, n, KV_COMES_HOME))
            missing -= n
    return drops


@dataclass(frozen=True, slots=True)
class LendAnswer:
    """Answer to an operator's order to lend pages.

    Only pages that are free after the `actions` are lent. The order is refused if they are too few,
    or for the reason in `refusal`.
    """

    actions: Sequence[Action] = ()
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Expiry:
    """Evictions of models whose time to live is over or that are given up, and when the next is
    due."""

    evictions: tuple[Reside, ...] = ()
    wake_at: float | None = None
    """When the next idle model's time to live ends; None: no idle model has one that is not
    over."""


def expire(view: DeviceView, *, give_up: bool = True) -> Expiry:
    """Evict every idle model that has been without a request for its `ttl`, and, with `give_up`,
    those whose requests have all left while they were brought onto the device. Pinned models
    stay.

    A load that is in flight goes on unless others wait for memory or the link: a client that asks
    again, as after a time-out, then finds it further on.
    """
    evictions: list[Reside] = []
    later: list[float] = []
    for m in view.models:
        if give_up and m.given_up and not m.spec.pinned:
            if m.residency is Residency.RESIDENT or _is_awaited(view):
                evictions.append(eviction(m, why="the requests that waited for it have left"))
            continue
        ttl = m.spec.ttl
        if not ttl or m.idle_since is None or m.spec.pinned:
            continue
        at = m.idle_since + ttl
        if at <= view.now:
            evictions.append(eviction(m, why=f"no request for {ttl:g} s, its ttl"))
        else:
            later.append(at)
    return Expiry(tuple(evictions), min(later, default=None))


def _is_awaited(view: DeviceView) -> bool:
    """Whether requests wait for memory, or for a model's weights."""
    return bool(view.shortages) or any(m.waiting for m in view.models)


def within_caps(view: DeviceView) -> list[Action]:
    """Preempt the youngest request of each model that may have no more KV, by its `limit` in the
    fleet file, where a running request needs it and is older. Only those younger make way: others
    have nothing that it may have."""
    actions: list[Action] = []
    for s in view.shortages:
        m = view.model(s.model)
        if not s.limited or m.cap is None or m.kv_pages - m.cached_pages + s.pages <= m.cap:
            continue
        short = next((r for r in m.running if r.id == s.request_id), None)
        if short is not None and m.running[-1].order > short.order:
            why = f"{m.name} may have no more memory, and an older request needs it"
            actions.append(Preempt(m.name, m.running[-1].id, why))
    return actions


def last_resort(view: DeviceView) -> Sequence[Action]:
    """Recall all pages lent to other devices; if none are lent, fail one request."""
    if view.lent:
        why = "requests find no memory"
        return [Recall(device, None, RECALL_SECONDS, why) for device, _ in view.lent]
    m, r, why = choose_victim(view)
    return [Refuse(m.name, r.id, why)]


def choose_victim(view: DeviceView) -> tuple[ModelView, RequestView, str]:
    """Return the request to fail, its model, and the reason. The view must have a request.

    First choice: the oldest request that the device could not serve alone, even with all pages that
    others can give up. Second: the newest request that holds pages, except the oldest of all, which
    is never undone; its pages then serve those before it. Third: the oldest, as no request holds
    pages and still it was not served.
    """
    hopeless = unservable(view)
    if hopeless is not None:
        return hopeless
    requests = _by_order(view)
    for m, r in reversed(requests[1:]):
        if r.pages or r.blocks:
            return m, r, "its pages serve requests that came before it"
    m, r = requests[0]
    return m, r, "no other request holds any"


def unservable(view: DeviceView) -> tuple[ModelView, RequestView, str] | None:
    """Return the oldest request that the device could not serve alone; None: there is none."""
    for m, r in _by_order(view):
        needed, room = pages_alone(m, r), _room_alone(view, m)
        if needed > room:
            return m, r, f"it needs {needed} pages of KV cache, and alone it would have {room}"
    return None


def _by_order(view: DeviceView) -> list[tuple[ModelView, RequestView]]:
    """Return all requests with their models, oldest first."""
    found = ((m, r) for m in view.models for r in (*m.running, *m.waiting))
    return sorted(found, key=lambda mr: mr[1].order)


def pages_alone(m: ModelView, r: RequestView) -> int:
    """Pages of KV cache that the request needs in order to go on."""
    if r.streams:
        return m.slab_pages
    return ceil_div(m.spec.blocks_of(r.tokens), m.slab_blocks) * m.slab_pages


def _room_alone(view: DeviceView, m: ModelView) -> int:
    """Pages of KV cache that one request of `m` has with the device to itself."""
    here = () if view.weights_in_place else view.models
    there = [o.spec for o in here if o.spec.pinned or o is m]
    room = kv_room(view.total - view.arena, there, view.page_bytes, m.limit)
    return m.guaranteed_pages + (room if m.cap is None else min(room, m.cap))
