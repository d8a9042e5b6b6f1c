"""Cover claims for pages in order of precedence, from sources in a fixed order or by price.

The core of all memory policies: it chooses which offers to take and returns their actions, and the
promises that keep freed pages for their claims. It applies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ballast.core.actions import Action, Promise
from ballast.core.view import DeviceView
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.market.page_budget import Mark, PageBudget
from ballast.policy.market.supply_curve import unit_price


class AcceptedOffer(NamedTuple):
    """A part of an offer taken for a claim, with its action."""

    offer: Offer
    pages: int
    action: Action


@dataclass(frozen=True, slots=True)
class CoverResult:
    """Result of covering claims."""

    budget: PageBudget
    """Pages and offers that are left."""
    actions: list[Action]
    promises: tuple[Promise, ...]
    """Pages kept for claims until all of theirs have come, in order of precedence."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Pages that each divisible claim got, by model."""


def cover(
    view: DeviceView,
    claims: Iterable[Claim],
    sources: Sequence[Source],
    budget: PageBudget | None = None,
    *,
    by_price: bool = False,
) -> CoverResult:
    """Make room for `claims` in order of precedence, each wholly or, if it is indivisible, not at
    all.

    First come claims that may undo work, so that free pages save that work; then those that only
    wait, by when their first token is due.

    Pages freed for a claim are promised to it, so that no other takes them before the rest has
    come. Pages on their way (reclaiming, recalled) count: nothing is freed twice for one need, and
    such a claim simply waits. A claim that cannot be covered keeps no pages from later ones, whose
    work is undone for it as soon as that covers it. But an `overdue` claim that may not undo work
    keeps free pages, and those that could be freed without harm to work (cached prefixes, scattered
    blocks), so that it is not overtaken forever. Once it is covered it keeps its model's scattered
    blocks, as it needs blocks at hand beside the pages.

    `budget`: what earlier claims of the same decision have left. `by_price`: take the offers of all
    sources cheapest first, for each claim only as long as they cost less than it gains; else take
    source after source, and ignore prices.
    """
    budget = PageBudget(view) if budget is None else budget
    actions = Actions()
    promises: list[Promise] = []
    parts: dict[str, int] = {}
    for claim in sorted(claims, key=attrgetter("precedence")):
        if claim.grain:
            actions.accept(_gather(view, claim, sources, budget))
            parts[claim.model] = pages = budget.use_part(claim)
            if pages >= claim.least and claim.then is not None:
                actions.add(claim.then(pages))
            continue
        needs = budget.needs(claim)
        lacked = budget.lacks(claim, needs)
        if lacked > 0:
            find = partial(_found, view, claim, sources, budget, lacked, by_price)
            chosen = cover_one(claim, find, budget, lacked, by_price=by_price)
            if chosen is None:
                if claim.overdue and not claim.may_preempt:
                    held = budget.hold(needs)
                    promises += promised(claim, held)
                    budget.reserve(_offers(view, claim, sources), needs - held)
                continue
            actions.accept(chosen)
            needs = budget.needs(claim)
        if claim.overdue and not claim.may_preempt:
            own = [o for o in _offers(view, claim, sources) if o.at_hand and o.owner == claim.model]
            budget.reserve(own, sum(offer.pages for offer in own))
        there = needs <= budget.free
        promises += promised(claim, budget.use(claim, needs))
        if there and claim.then is not None:
            actions.add(claim.then(needs))
            budget.bring(claim)
    return CoverResult(budget, actions.final, tuple(promises), parts)


def gather(
    view: DeviceView, claim: Claim, sources: Sequence[Source], budget: PageBudget | None = None
) -> list[Action]:
    """Return the actions that free as much of a claim as possible, where no other claim needs
    pages."""
    budget = PageBudget(view) if budget is None else budget
    return [accepted.action for accepted in _gather(view, claim, sources, budget)]


class Actions:
    """The actions of a decision, in order. An action of a cumulative offer replaces those before it
    under the same key."""

    def __init__(self) -> None:
        self._actions: list[tuple[tuple[str, ...] | None, Action]] = []
        self._last: dict[tuple[str, ...], Action] = {}

    def add(self, actions: Iterable[Action]) -> None:
        """Append actions."""
        self._actions += [(None, action) for action in actions]

    def accept(self, chosen: Iterable[AcceptedOffer]) -> None:
        """Append the actions of accepted offers."""
        for accepted in chosen:
            key = accepted.offer.key if accepted.offer.cumulative else None
            self._actions.append((key, accepted.action))
            if key is not None:
                self._last[key] = accepted.action

    @property
    def final(self) -> list[Action]:
        """Actions that no later one replaces."""
        if not self._last:
            return [action for _, action in self._actions]
        return [a for key, a in self._actions if key is None or a is self._last[key]]


def promised(claim: Claim, pages: int) -> list[Promise]:
    """Return the promise of `pages` to a claim: for weights first, if its model is to be
    activated."""
    if pages <= 0:
        return []
    kv = min(pages, claim.first_pages) if claim.weights else pages
    return [Promise(claim.model, pages - kv, kv)]


def _offers(view: DeviceView, claim: Claim, sources: Sequence[Source]) -> Iterable[Offer]:
    return chain.from_iterable(source(view, claim) for source in sources)


def _accept(
    budget: PageBudget, claim: Claim, offer: Offer, pages: int
) -> tuple[int, AcceptedOffer]:
    """Take a part of an offer for a claim; returns the pages gained, and the accepted part."""
    gained = budget.accept(offer, pages)
    n = budget.taken(offer.key) if offer.cumulative else pages
    return gained, AcceptedOffer(offer, pages, offer.act(n, claim))


def _gather(
    view: DeviceView, claim: Claim, sources: Sequence[Source], budget: PageBudget
) -> list[AcceptedOffer]:
    """Take offers until the pages of a divisible claim are coming, or no offer is left."""
    found: list[AcceptedOffer] = []
    for offer in _offers(view, claim, sources):
        lacked = claim.pages - budget.coming
        if lacked <= 0:
            break
        if not budget.used_up(offer) and claim.may_take(offer):
            pages = budget.left(offer, lacked)
            gained, accepted = _accept(budget, claim, offer, pages)
            if gained:
                found.append(accepted)
    return found


def _found(
    view: DeviceView,
    claim: Claim,
    sources: Sequence[Source],
    budget: PageBudget,
    lacked: int,
    by_price: bool,
) -> Iterable[Offer]:
    """Return the offers for a claim, in the order of the sources or by price."""
    offers = _offers(view, claim, sources)
    if not by_price:
        return offers
    return sorted(offers, key=lambda offer: unit_price(budget, offer, lacked))


def cover_one(
    claim: Claim,
    find: Callable[[], Iterable[Offer]],
    budget: PageBudget,
    lacked: int,
    *,
    by_price: bool,
) -> list[AcceptedOffer] | None:
    """Take offers that cover one claim, in the order in which `find` returns them; None, with
    nothing taken, if they do not suffice, or with `by_price` cost as much as the claim gains.

    A model whose weights are shared may free nothing alone but much together with other holders, so
    it is evicted on trial; offers that turn out to be in vain are spared in another try. Where a
    model with requests has to go, requests are spared whose pages are not needed beside its own.
    """
    before = budget.mark()
    spared: set[tuple[str, ...]] = set()
    while True:
        offers = find()
        if spared:
            offers = (offer for offer in offers if offer.key not in spared)
        chosen, trials = _try(claim, offers, budget, lacked)
        if chosen is None:
            budget.undo(before)
            return None
        vain = {offer.key for offer in trials if budget.in_vain(claim, offer)}
        if not vain:
            break
        budget.undo(before)
        spared |= vain
    if len(chosen) > 1:
        ousts = any(accepted.offer.everything and accepted.offer.undoes for accepted in chosen)
        if by_price or ousts:
            chosen = _needed(claim, chosen, budget, before)
    if by_price and claim.gain < math.inf and sum(map(_price, chosen)) >= claim.gain:
        budget.undo(before)
        return None
    return chosen


def _try(
    claim: Claim, offers: Iterable[Offer], budget: PageBudget, lacked: int
) -> tuple[list[AcceptedOffer] | None, list[Offer]]:
    """Take offers in turn until a claim lacks nothing; None if they do not suffice. Returns also
    the offers that were taken on trial."""
    chosen: list[AcceptedOffer] = []
    trials: list[Offer] = []
    for offer in offers:
        if budget.used_up(offer) or not claim.may_take(offer):
            continue
        pages = budget.left(offer, lacked)
        _, accepted = _accept(budget, claim, offer, pages)
        lacks = budget.lacks(claim, budget.needs(claim))
        gained, lacked = lacks < lacked, lacks
        for_itself = offer.blocks > 0 and offer.owner == claim.model
        if gained or offer.everything or for_itself:
            chosen.append(accepted)
        if offer.everything and not gained:
            trials.append(offer)
        if lacked <= 0:
            return chosen, trials
    return None, trials


def _needed(
    claim: Claim, chosen: Sequence[AcceptedOffer], budget: PageBudget, before: Mark
) -> list[AcceptedOffer]:
    """Give back accepted offers, the most expensive first, without which the claim is still
    covered."""

    def lacks_with(kept: Sequence[AcceptedOffer]) -> int:
        budget.undo(before)
        for accepted in kept:
            budget.accept(accepted.offer, accepted.pages)
        return budget.lacks(claim, budget.needs(claim))

    kept = list(chosen)
    for accepted in sorted(chosen, key=_price, reverse=True):
        rest = [other for other in kept if other is not accepted]
        if lacks_with(rest) <= 0:
            kept = rest
    lacks_with(kept)
    return kept


def _price(accepted: AcceptedOffer) -> float:
    return accepted.offer.price_of(accepted.pages)
