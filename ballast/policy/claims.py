"""What is short of pages, as claims: models that are to come, and requests that cannot go on."""

from __future__ import annotations

from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, Residency
from ballast.policy.offers import Claim


def activation_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """Claims of absent models with waiting requests, and when the next one turns overdue.

    A claim may undo younger work once its first request has waited for `patience` of its TTFT
    service level.
    """
    claims, wake = [], None
    for m in view.models:
        if m.residency is Residency.ABSENT and m.waiting:
            first = m.waiting[0]
            overdue_at = first.order.arrival + patience * m.spec.slo.ttft
            overdue = view.now >= overdue_at
            if not overdue:
                wake = overdue_at if wake is None else min(wake, overdue_at)
            pages = m.missing_pages + max(0, m.first_pages - view.borrowed)
            claims.append(Claim(m.name, first.order, pages, overdue, activate=True))
    return claims, wake


def shortage_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """Claims of requests that lack pages of the pool, and when the next one turns overdue.

    A running request may undo younger work at once (it holds pages and cannot go on); a waiting
    one once it is overdue.
    """
    claims: list[Claim] = []
    wake = None
    short = [s for s in view.shortages if not s.limited]
    if not short:
        return claims, wake
    models = {m.name: m for m in view.models}
    running = {r.id: r for m in view.models for r in m.running}
    for s in short:
        m, r = models[s.model], running.get(s.request_id)
        urgent = r is not None
        if r is None and m.waiting and m.waiting[0].id == s.request_id:
            r = m.waiting[0]
            overdue_at = r.order.arrival + patience * m.spec.slo.ttft
            urgent = view.now >= overdue_at
            if not urgent:
                wake = overdue_at if wake is None else min(wake, overdue_at)
        if r is not None:
            claims.append(Claim(m.name, r.order, s.pages, urgent, s.blocks))
    return claims, wake


def kv_claims(view: DeviceView, *, waiting: bool) -> list[Claim]:
    """Claims of requests that lack pages, be it of the pool or within their model's limit.

    Running ones may undo younger work at once; those `waiting`, if asked for, only wait.
    """
    claims = []
    for s in view.shortages:
        m = view.model(s.model)
        claims += [
            Claim(m.name, r.order, s.pages, may_preempt=True, blocks=s.blocks)
            for r in m.running
            if r.id == s.request_id
        ]
        if waiting and not m.held and m.waiting and m.waiting[0].id == s.request_id:
            order = m.waiting[0].order
            claims.append(Claim(m.name, order, s.pages, may_preempt=False, blocks=s.blocks))
    return claims


def queue_claims(view: DeviceView, most: int) -> list[Claim]:
    """Claims of those that wait behind a request which lacks pages: of each model at most so many,
    and no more than may run.

    They will lack theirs as soon as it has its own.
    """
    claims = []
    short = {s.request_id for s in view.shortages}
    for m in view.models:
        if m.waiting and not m.held and m.waiting[0].id in short:
            for r in m.waiting[1 : max(1, min(most, m.spec.max_running - len(m.running)))]:
                blocks = ceil_div(r.tokens, m.spec.block_tokens)
                pages = ceil_div(blocks, m.slab_blocks) * m.slab_pages
                claims.append(Claim(m.name, r.order, pages, may_preempt=False, blocks=blocks))
    return claims


def earliest(*times: float | None) -> float | None:
    """The least of the times given, ignoring None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
