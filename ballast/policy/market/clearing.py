"""Clear the market by harm: cover the claims that gain most, from whatever harms least.

The counterpart of `ballast.policy.market.cover`, whose claims come in order of precedence. Used by
the memory policy `arbiter`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ballast.core.actions import Action, Promise
from ballast.core.view import DeviceView
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.cover import AcceptedOffer, Actions, cover_one, promised
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import SupplyCurve

UNTAKEN = 2
"""Most offers that were not taken which an explanation names."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Result of clearing the market."""

    actions: list[Action]
    promises: tuple[Promise, ...]
    uncovered: Sequence[Claim]
    """Claims that cost more than they gain so far."""
    free: int
    """Free pages that no claim uses."""


def clear(
    view: DeviceView, claims: Iterable[Claim], supply: SupplyCurve, reserve: int = 0
) -> Cleared:
    """Cover claims in the order of their gain per page, each by the cheapest offers, and only if
    these harm less than it gains.

    A claim of infinite gain must be covered if that is possible at all. An uncovered `overdue`
    claim keeps the pages that become free, so that it is not overtaken forever; what is freed for a
    covered one is promised to it. `reserve`: coming pages that weights leave to KV, unless
    they must be covered.
    """
    budget = PageBudget(view)
    actions = Actions()
    promises: list[Promise] = []
    uncovered: list[Claim] = []
    for claim in sorted(claims, key=_order):
        needs = budget.needs(claim)
        lacked = budget.lacks(claim, needs)
        instead = False
        bounded = claim.weights and claim.gain < math.inf
        kept = min(reserve, max(0, budget.coming)) if bounded else 0
        lacked += kept
        if lacked > 0:
            find = partial(supply.cheapest, budget, claim, lacked)
            budget.coming -= kept
            chosen = cover_one(claim, find, budget, lacked, by_price=True)
            budget.coming += kept
            if chosen is None:
                uncovered.append(claim)
                if claim.overdue:
                    promises += promised(claim, budget.hold(needs))
                continue
            instead = any(accepted.offer.instead for accepted in chosen)
            supply.take([accepted.offer for accepted in chosen])
            actions.accept(_explained(claim, chosen, budget, supply, lacked))
            needs = budget.needs(claim)
        there = needs <= budget.free
        promises += promised(claim, budget.use(claim, needs))
        if there and claim.then is not None and not instead:
            actions.add(claim.then(needs))
            budget.bring(claim)
    free = 0 if uncovered else max(0, min(budget.free, budget.coming))
    return Cleared(actions.final, tuple(promises), uncovered, free)


def _order(claim: Claim) -> tuple[float, object, str]:
    return -claim.gain / max(1, claim.pages), claim.order, claim.model


def _explained(
    claim: Claim,
    chosen: Sequence[AcceptedOffer],
    budget: PageBudget,
    supply: SupplyCurve,
    lacked: int,
) -> list[AcceptedOffer]:
    """Return accepted offers whose actions say what they cost, what the claim gains, and the
    cheapest offers that were not taken."""
    taken = {accepted.offer.key for accepted in chosen}  # and those named already
    untaken: list[str] = []
    for offer in supply.cheapest(budget, claim, lacked):
        if not offer.pages or offer.key in taken or budget.used_up(offer):
            continue
        if claim.may_take(offer):
            taken.add(offer.key)
            untaken.append(supply.text(offer))
            if len(untaken) == UNTAKEN:
                break
    must = claim.gain == math.inf
    gain = "it must be done" if must else f"the claim gains {claim.gain:.2g}"
    names = f"; next best, a page: {', '.join(untaken)}" if untaken else "; nothing else is there"
    found = []
    for offer, pages, action in chosen:
        price = offer.price_of(pages)
        costs = f"costs {price:.2g} expected misses, {price / max(1, pages):.2g} a page"
        why = f"{action.why}; {costs}; {gain}{names}"
        found.append(AcceptedOffer(offer, pages, replace(action, why=why)))
    return found
