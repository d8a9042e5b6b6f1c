"""Cover claims for pages, first come first served, from sources in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from ballast.core.actions import Action, Activate, Evict, Offer, Preempt
from ballast.core.view import DeviceView, Residency
from ballast.policy.offers import Claim, Source


class Ground:
    """Pages that claims can still count on during one decision, and what was already taken."""

    def __init__(self, view: DeviceView) -> None:
        self.coming = view.coming
        self.free = view.free - view.promised
        self.taken: dict[str, dict[tuple[str, str], int]] = {}
        """Pages taken of each model, by kind of action and request."""
        self.evicted: set[str] = set()

    def take(self, offer: Offer) -> int:
        """Use an offer up; how many pages that adds to those taken before."""
        model = offer.action.model
        if model in self.evicted:
            return 0
        taken = self.taken.setdefault(model, {})
        if isinstance(offer.action, Evict):
            self.evicted.add(model)
            return max(0, offer.pages - sum(taken.values()))
        request = offer.action.request_id if isinstance(offer.action, Preempt) else ""
        key = (type(offer.action).__name__, request)
        if key in taken:
            return 0
        taken[key] = offer.pages
        return offer.pages

    def copy(self) -> Ground:
        """As it is now, to go back to."""
        return deepcopy(self)


def cover(view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]) -> list[Action]:
    """Actions that make room for `claims`, oldest first; a claim is covered wholly or not at all.

    A claim that cannot be covered keeps what is free from younger claims, so that it is not
    overtaken for ever. Pages that are on their way (reclaiming) count: nothing is freed twice for
    one need; such a claim simply waits.
    """
    ground = Ground(view)
    actions: list[Action] = []
    for claim in sorted(claims, key=lambda c: (c.order, c.model)):
        before = ground.copy()
        chosen: list[Action] = []
        for source in sources:
            if ground.coming >= claim.pages:
                break
            for offer in source(view, claim):
                if ground.coming >= claim.pages:
                    break
                pages = ground.take(offer)
                if pages:
                    chosen.append(offer.action)
                    ground.coming += pages
                    ground.free += pages
        if ground.coming < claim.pages:
            ground = before
            ground.coming = ground.free = 0
            continue
        actions += chosen
        if claim.activate and claim.pages <= ground.free:
            actions.append(Activate(claim.model, why="requests wait for it"))
        ground.coming -= claim.pages
        ground.free -= claim.pages
    return actions


def activation_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """Claims of absent models with waiting requests, and when the next one turns overdue.

    A claim may undo younger work once its first request has waited for `patience` of its TTFT
    service level.
    """
    claims, wake = [], None
    for m in view.models:
        if m.residency is Residency.ABSENT and m.waiting:
            first = m.waiting[0]
            overdue_at = first.order[0] + patience * m.spec.slo.ttft
            overdue = view.now >= overdue_at
            if not overdue:
                wake = overdue_at if wake is None else min(wake, overdue_at)
            pages = m.weight_pages + m.first_pages
            claims.append(Claim(m.name, first.order, pages, overdue, activate=True))
    return claims, wake


def shortage_claims(view: DeviceView, patience: float) -> tuple[list[Claim], float | None]:
    """Claims of requests that lack pages of the pool, and when the next one turns overdue.

    A running request may undo younger work at once (it holds pages and cannot go on); a waiting
    one once it is overdue.
    """
    claims, wake = [], None
    for s in view.shortages:
        if s.limited:
            continue
        m = view.model(s.model)
        for r in (*m.running, *m.waiting[:1]):
            if r.id == s.request_id:
                overdue_at = r.order[0] + patience * m.spec.slo.ttft
                urgent = r in m.running or view.now >= overdue_at
                if not urgent:
                    wake = overdue_at if wake is None else min(wake, overdue_at)
                claims.append(Claim(m.name, r.order, s.pages, urgent))
    return claims, wake


def earliest(*times: float | None) -> float | None:
    """The least of the times given, ignoring None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
