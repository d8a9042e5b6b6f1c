"""Bound models to fair shares of KV memory while they contend for it, by holding and preempting.

One pool without shares serves requests in the order in which they ask, and under overload the model
whose requests hold most KV makes models wait that need little. Here a model may exceed its share as
long as no other model below its own share lacks pages (max-min fairness, as in weighted processor
sharing: Demers, Keshav, Shenker 1989).

Used by the memory policies `balloon`, `recompute`, `mirage` and `kvswap`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from ballast.core.actions import Action, Hold
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.market.offers import (
    until_older,
    younger_models,
    younger_requests,
    youngest_running,
)
from ballast.policy.market.starvation import starving


def fair_shares(view: DeviceView) -> Mapping[str, float]:
    """Return the fair share in KV pages of each model with requests: all pages that KV holds or
    could have at once, divided in proportion to the configured shares."""
    contending = [m for m in view.models if not m.idle and _here(m)]
    pages = view.coming + sum(m.kv_pages for m in view.models)
    total = sum(m.spec.share for m in contending)
    return {m.name: pages * m.spec.share / total for m in contending}


@dataclass(frozen=True, slots=True)
class ShareEffects:
    """Effects of fair shares on one decision: models to hold, and sources that respect shares."""

    view: DeviceView
    """The device's view once the models are held."""
    holds: Sequence[Action] = ()
    fair: bool = False
    holding: bool = False
    """Whether some models are held, until no other model lacks its share."""
    younger: Source = younger_requests
    """Source of requests that may be preempted."""
    younger_models: Source = younger_models
    """Source of models that may be evicted with their requests."""

    def claims(self, found: Sequence[Claim]) -> list[Claim]:
        """Let claims of requests that wait for admission undo work only if they are entitled to;
        one that is not becomes overdue instead, so that free pages are kept for it.

        `found`: all claims of the decision. Those more important than one that may undo work are
        unchanged: it would come before them, and take what it had undone for them before.
        """
        if not self.fair:
            return list(found)
        bounded = [self._bounded(c) if c.admission and c.may_preempt else c for c in found]
        least = max((c.order.rank for c in bounded if c.may_preempt), default=-math.inf)
        return [c if c.order.rank < least else b for c, b in zip(found, bounded, strict=True)]

    def _bounded(self, claim: Claim) -> Claim:
        view = self.view
        running = (m.running[-1] for m in view.models if m.running)
        if any(youngest.order.rank > claim.order.rank for youngest in running):
            return claim
        if _within_share(view, claim):
            return claim
        return claim._replace(may_preempt=False, overdue=True)


def share_out(view: DeviceView, *, fair: bool) -> ShareEffects:
    """Hold the models above their share while a model below its own lacks pages for its next
    request, and preempt their requests before others'.

    A model is not held if its next request is more important than those that lack pages: it would
    undo them as soon as it is not held. A model that runs nothing is not held, however much its
    next request needs, with one exception: if a request of another model that runs nothing either
    has waited longest (`_comes_first`), no other model admits requests that are not more important
    until that one has its pages, or nothing runs any more that could free them. Otherwise small
    requests would use again and again the pages that they free within their shares, and a large one
    would starve.

    For policies that hold no models for reasons of their own. Unless `fair`, there are no shares.
    """
    if not fair:
        return ShareEffects(view)
    shares = view.derived(fair_shares)
    lacking = {s.request_id for s in view.shortages if not s.limited}
    below: dict[str, int] = {}
    above: dict[str, int] = {}
    for m in view.models:
        if m.name in shares and m.waiting:
            if m.running and _used(m) + m.first_pages > shares[m.name]:
                above[m.name] = m.waiting[0].order.rank
            elif m.waiting[0].id in lacking:
                below[m.name] = m.waiting[0].order.rank
    held, why = {n for n, rank in above.items() if below and rank >= min(below.values())}, _HELD
    starved = [m for m in view.models if m.name in below and not m.running]
    starved = [m for m in starved if _comes_first(view, m)]
    if starved and any(m.running for m in view.models):
        one = min(starved, key=lambda m: m.waiting[0].order)
        others = (m for m in view.models if m.name in shares and m.waiting and m is not one)
        held = {m.name for m in others if m.waiting[0].order.rank >= one.waiting[0].order.rank}
        why = f"a request of {one.name} has waited longest"
    changed = [m for m in view.models if m.held != (m.name in held)]
    if not changed and not held:
        return _fair(view, (), holding=False)
    holds = [Hold(m.name, m.name in held, why if m.name in held else _RELEASED) for m in changed]
    models = tuple(replace(m, held=not m.held) if m in changed else m for m in view.models)
    first = {m.waiting[0].id for m in models if m.held and m.waiting}
    shortages = tuple(s for s in view.shortages if s.request_id not in first)
    left = replace(view, models=models, shortages=shortages)
    return _fair(left, holds, holding=bool(held))


def _fair(view: DeviceView, holds: Sequence[Action], *, holding: bool) -> ShareEffects:
    return ShareEffects(
        view, holds, True, holding, younger_requests_by_share, younger_models_by_share
    )


_HELD = "it has more than its share, and others lack theirs"
_RELEASED = "nobody lacks a share"


def younger_requests_by_share(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Yield the offers of `younger_requests`, those of models above their share first."""
    if not claim.may_preempt:
        return
    anybody = not claim.admission
    if anybody or _within_share(view, claim):
        above, rest = view.derived(_running_by_share)
        yield from until_older(above, claim)
    else:
        rest = view.derived(youngest_running)
    others = until_older(rest, claim)
    yield from others if anybody else takewhile(partial(_more_important, claim), others)


def younger_models_by_share(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Yield the offers of `younger_models`.

    A request that waits for admission gets only models that are less important, unless its own
    model starves.
    """
    starves = starving(view, view.model(claim.model))
    for offer in younger_models(view, claim):
        if not claim.admission or starves or _more_important(claim, offer):
            yield offer


def _running_by_share(view: DeviceView) -> tuple[Sequence[Offer], Sequence[Offer]]:
    """Return the running requests that can be preempted, youngest first: those that exceed their
    models' shares, and the others."""
    shares = view.derived(fair_shares)
    beyond = {m.name: _used(m) - shares.get(m.name, 0.0) for m in view.models}
    above: list[Offer] = []
    within: list[Offer] = []
    for offer in view.derived(youngest_running):
        if beyond[offer.owner] > 0:
            beyond[offer.owner] -= offer.pages
            above.append(offer)
        else:
            within.append(offer)
    return above, within


def _within_share(view: DeviceView, claim: Claim) -> bool:
    """Whether a model stays within its share once its next waiting request is admitted; that
    request may then undo work of models above theirs."""
    m = view.model(claim.model)
    share = view.derived(fair_shares).get(m.name, 0.0)
    return not m.running or _used(m) + m.first_pages <= share


def _comes_first(view: DeviceView, m: ModelView) -> bool:
    """Whether a model's first waiting request comes before others whatever its model's share: it
    was put first, or it got no pages for long while its model runs nothing."""
    return m.waiting[0].place < 0 or starving(view, m)


def _more_important(claim: Claim, offer: Offer) -> bool:
    return offer.undoes is not None and offer.undoes.rank > claim.order.rank


def _used(m: ModelView) -> int:
    """Return the pages of a model's KV in use, including those whose content is on the host now."""
    s = m.staging
    swapped = 0 if s is None else (s.staged - s.streamed) // m.slab_blocks * m.slab_pages
    return m.kv_pages - m.cached_pages + swapped


def _here(m: ModelView) -> bool:
    return m.residency in (Residency.RESIDENT, Residency.ACTIVATING)
