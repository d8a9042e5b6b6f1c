"""List the claims for pages of a device: models to activate, and requests short of KV pages.

Memory policies pass these claims to `ballast.policy.market.cover`, which finds pages for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from ballast.core.actions import Action
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.starvation import LONGEST_WAIT, last_served
from ballast.policy.plans import activation

BEHIND_ALL = 2
"""Place in its model's queue of a request that also waits behind those of other models: it undoes
no work, and its claims come after theirs."""


def activation_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """List the claims of models with waiting requests that are absent, loading, or loaded and not
    run yet; and when the next one becomes overdue.

    An absent model's claim may undo younger work once its first request has waited for `patience`
    of its TTFT service level. A model whose weights are being copied keeps the pages that its first
    request needs until that is admitted, which may take a while if the order of compute prefers
    others.
    """
    claims: list[Claim] = []
    wake = None
    short = {s.request_id for s in view.shortages}
    for m in view.models:
        if not m.waiting or not _to_come(m):
            continue
        first = m.waiting[0]
        if first.id in short:
            continue  # it has a claim of its own
        if m.residency is not Residency.ABSENT:
            lacks = view.first_lacks(m)
            claims.append(Claim(m.name, first.order, lacks, may_preempt=False, due=_due(first)))
            continue
        kv = max(0, m.first_pages - view.borrowable(m))
        overdue, overdue_at = _overdue(view, m, first, patience)
        wake = earliest(wake, overdue_at)
        pages = m.missing_pages + kv
        claims.append(
            Claim(
                m.name,
                first.order,
                pages,
                overdue,
                weights=True,
                first_pages=kv,
                segments=m.shared,
                then=partial(_activate, view, m),
                due=_due(first),
                gain=_gain(view, m, overdue_at),
            )
        )
    return claims, wake


def _activate(view: DeviceView, m: ModelView, _: int) -> Sequence[Action]:
    return (activation(view, m, "requests wait for it"),)


def _to_come(m: ModelView) -> bool:
    """Whether a model is absent or loading, or is loaded and runs nothing yet."""
    if m.residency is Residency.RESIDENT:
        return not m.running and not m.held
    if m.residency is Residency.ACTIVATING:
        return not m.running
    return m.residency is Residency.ABSENT


def shortage_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """List the claims of requests that lack pages of the pool, and when the next one becomes
    overdue.

    A running request may undo younger work at once, as it holds pages and cannot go on; a waiting
    one once it is overdue.
    """
    claims: list[Claim] = []
    wake = None
    short = [s for s in view.shortages if not s.limited]
    if not short:
        return claims, wake
    for s in short:
        m = view.model(s.model)
        r = m.derived(_running_by_id).get(s.request_id)
        waits = r is None
        urgent = not waits
        if waits and m.waiting and m.waiting[0].id == s.request_id:
            r = m.waiting[0]
            urgent, overdue_at = _overdue(view, m, r, patience)
            wake = earliest(wake, overdue_at)
        if r is not None:
            due = 0.0 if urgent else _due(r)
            gain = math.inf if urgent else _gain(view, m, overdue_at)
            claims.append(
                Claim(
                    m.name,
                    r.order,
                    s.pages,
                    urgent,
                    s.blocks,
                    due=due,
                    gain=gain,
                    admission=waits,
                )
            )
    return claims, wake


def _running_by_id(m: ModelView) -> Mapping[str, RequestView]:
    return {r.id: r for r in m.running}


def kv_claims(
    view: DeviceView, *, waiting: bool, patience: float = math.inf
) -> tuple[list[Claim], float | None]:
    """List the claims of requests that lack pages of the pool or within their model's limit, and
    when the next one becomes overdue.

    Running requests may undo younger work at once. Waiting ones, listed if `waiting`, undo none;
    they are overdue when they have waited for `patience` of their TTFT service level.
    """
    claims: list[Claim] = []
    wake = None
    for s in view.shortages:
        m = view.model(s.model)
        r = m.derived(_running_by_id).get(s.request_id)
        if r is not None:
            claims.append(Claim(m.name, r.order, s.pages, may_preempt=True, blocks=s.blocks))
        elif waiting and not m.held and m.waiting and m.waiting[0].id == s.request_id:
            first = m.waiting[0]
            overdue, overdue_at = _overdue(view, m, first, patience)
            wake = earliest(wake, overdue_at)
            claims.append(
                Claim(
                    m.name,
                    first.order,
                    s.pages,
                    False,
                    s.blocks,
                    overdue=overdue,
                    due=_due(first),
                    gain=_gain(view, m, overdue_at),
                )
            )
    return claims, wake


def queue_claims(view: DeviceView, most: int) -> list[Claim]:
    """List the claims of requests behind a first one that lacks pages: at most `most` of each
    model, the first included, and no more than may run.

    They will lack pages as soon as the first one has its own.
    """
    claims = []
    short = {s.request_id for s in view.shortages}
    for m in view.models:
        if m.waiting and not m.held and m.waiting[0].id in short:
            for r in m.waiting[1 : max(1, min(most, m.spec.max_running - len(m.running)))]:
                blocks = m.spec.blocks_of(r.tokens)
                pages = ceil_div(blocks, m.slab_blocks) * m.slab_pages
                due = _due(r)
                claims.append(Claim(m.name, r.order, pages, False, blocks, due=due))
    return claims


def _due(r: RequestView) -> float:
    """Return when a request's first token is due, bounded so that no request is overtaken forever,
    unless an admission policy puts it behind all."""
    if r.place >= BEHIND_ALL:
        return math.inf
    return min(r.due, r.order.arrival + LONGEST_WAIT)


def _ttft(m: ModelView, r: RequestView) -> float:
    """Return the TTFT level of a request, in seconds: that of its model, or its adapter's own."""
    of_model = m.spec.slo.ttft
    is_models = r.due == r.order.arrival + of_model
    return of_model if is_models else r.due - r.order.arrival  # the difference is rounded


def _overdue(
    view: DeviceView, m: ModelView, r: RequestView, patience: float
) -> tuple[bool, float | None]:
    """Return whether a request has waited for `patience` of its TTFT service level, and else when
    it will have, if ever: one that waits behind all others has once its model starves. Negative
    `patience`: it has, whatever its place."""
    if r.place >= BEHIND_ALL and patience >= 0:
        at = m.derived(last_served) + LONGEST_WAIT
    else:
        at = r.order.arrival + patience * _ttft(m, r)
    if view.now >= at:
        return True, None
    return False, at if at < math.inf else None


def _gain(view: DeviceView, m: ModelView, overdue_at: float | None) -> float:
    """Return the request-seconds saved by covering the claim of a model's first waiting request now
    instead of when it is overdue: all requests that wait for the model wait that much less."""
    return math.inf if overdue_at is None else len(m.waiting) * (overdue_at - view.now)


def earliest(*times: float | None) -> float | None:
    """Return the earliest of the given times, ignoring None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
