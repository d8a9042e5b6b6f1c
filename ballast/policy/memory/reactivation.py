"""Bring evicted models back before they are requested, while pages are free.

Used by the memory policy `balloon` with option `restore`. It preempts no request and evicts only
idle models that are worth less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

from ballast.core.actions import Action, Reside
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.market.cover import cover
from ballast.policy.market.offers import (
    cached_prefixes,
    idle_models,
    loose_blocks,
    reload_seconds,
    return_seconds,
)
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.plans import activation, is_activation, is_eviction

HORIZON = 10.0
"""Seconds ahead for which an activated model is expected to stay; an assumption."""
MARGIN = 2.0
"""An idle model is evicted only for one worth more than this many times as much, so that models of
about the same worth do not replace each other."""


def evicted(view: DeviceView, before: Collection[str], actions: Iterable[Action]) -> frozenset[str]:
    """Return the models that the policy has evicted and that have not been on the device since:
    those of earlier decisions (`before`), and of the `actions` of this one."""
    away = (Residency.ABSENT, Residency.EVICTING)
    plans = [a for a in actions if isinstance(a, Reside)]
    coming = {a.model for a in plans if is_activation(view, a)}
    gone = {m.name for m in view.models if m.name in before and m.residency in away}
    return frozenset((gone - coming) | {a.model for a in plans if is_eviction(a)})


def come_back(view: DeviceView, names: Collection[str], reserve: float) -> Sequence[Action]:
    """Return the actions that activate one of these absent models: the one worth most per page that
    fits; none if none fits.

    No work is undone for it, and nothing is done while a request lacks pages. It takes free pages
    and those of cached prefixes, or else of idle models that are worth less. Of the pages that
    weights then leave to KV caches, `reserve` stay free or cached.
    """
    moving = (Residency.ACTIVATING, Residency.EVICTING)
    if not names or view.shortages or any(m.residency in moving for m in view.models):
        return ()  # one at a time: copies share the link
    found = [m for m in view.models if m.name in names and m.residency is Residency.ABSENT]
    gains = [(gain, m) for m in found if not m.waiting and (gain := absence_seconds(view, m)) > 0]
    gains.sort(key=lambda gm: (-gm[0] / max(1, gm[1].missing_pages), gm[1].name))
    weights = sum(m.present_pages for m in view.models if m.residency is Residency.ABSENT)
    weights += sum(m.own_pages for m in view.models if m.residency is Residency.RESIDENT)
    weights += sum({s.owner: s.pages for m in view.models for s in m.shared if s.holders}.values())
    cached = sum(m.cached_pages for m in view.models)
    for gain, m in gains:
        kept = math.ceil(reserve * max(0, view.total - view.arena - weights - m.missing_pages))
        claim = Claim(
            m.name,
            Precedence(0, view.now, 0),
            m.missing_pages,
            may_preempt=False,
            weights=True,
            segments=m.shared,
            then=partial(_activate, view, m),
            gain=gain,
        )
        actions: Sequence[Action] = ()
        if view.free - view.promised + cached - kept >= m.missing_pages:
            actions = _covering(view, claim, [cached_prefixes, loose_blocks], 0)
        if actions := actions or _covering(view, claim, [_worth_less], max(0, kept - cached)):
            return actions
    return ()


def _covering(
    view: DeviceView, claim: Claim, sources: Sequence[Source], kept: int
) -> Sequence[Action]:
    """Return the actions that cover a claim from `sources`, by price, while `kept` pages stay
    free."""
    budget = PageBudget(view)
    budget.free -= kept
    budget.coming = budget.free
    return cover(view, [claim], sources, budget, by_price=True).actions


def absence_seconds(view: DeviceView, m: ModelView) -> float:
    """Return the request-seconds of delay expected from a model's absence: of the next request, if
    one comes within `HORIZON`, and of those that arrive while its weights are copied."""
    absent = m.residency is Residency.ABSENT
    rate, copy = m.arrival_rate(view.now), (return_seconds if absent else reload_seconds)(view, m)
    return -math.expm1(-rate * HORIZON) * copy * (1 + rate * copy / 2)


def _worth_less(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer idle models at the price of their absence."""
    for offer in idle_models(view, claim):
        price = MARGIN * absence_seconds(view, view.model(offer.owner))
        yield offer._replace(price=partial(float, price))


def _activate(view: DeviceView, m: ModelView, _: int) -> Sequence[Action]:
    return (activation(view, m, "memory is free, requests for it are expected"),)
