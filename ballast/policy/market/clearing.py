"""Clear the market by harm: cover the claims that gain most, from whatever harms least.

The counterpart of `ballast.policy.market.cover`, whose claims come in order of precedence. Used by
the memory policy `arbiter`.
"""

from __future__ import annotations

import math
from collections import UserString
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from ballast.core.actions import Action, Promise, explained
from ballast.core.request import Precedence
from ballast.core.view import DeviceView
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.cover import AcceptedOffer, Actions, cover_one, promised
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import SupplyCurve, memory_of

UNTAKEN = 2
"""Most offers that were not taken which an explanation names."""
LEAST_SHOWN = 0.001
"""Expected late requests below which an explanation gives no figure."""

_Untaken = tuple[tuple[str, ...], float]
"""Key of an offer, and its price a page."""


@dataclass(frozen=True, slots=True)
class MarketResult:
    """Result of clearing the market."""

    actions: list[Action]
    promises: tuple[Promise, ...]
    uncovered: Sequence[Claim]
    """Claims that cost more than they gain so far."""
    free: int
    """Free pages that no claim uses."""


def clear(
    view: DeviceView, claims: Iterable[Claim], supply: SupplyCurve, reserve: int = 0
) -> MarketResult:
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
    ordered = sorted(claims, key=_order)
    for claim in _beyond_growths(ordered, budget, supply, actions, promises):
        needs = budget.needs(claim)
        lacked = budget.lacks(claim, needs)
        instead = False
        must = claim.gain == math.inf
        kept = min(reserve, max(0, budget.coming)) if claim.weights and not must else 0
        lacked += kept
        if lacked > 0:
            asked = _Asked(partial(supply.cheapest, budget, claim, lacked))
            budget.coming -= kept
            chosen = cover_one(claim, asked, budget, lacked, by_price=True)
            budget.coming += kept
            if chosen is None:
                uncovered.append(claim)
                if claim.overdue:
                    promises += promised(claim, budget.hold(needs))
                continue
            instead = any(accepted.offer.instead for accepted in chosen)
            _explain(claim, chosen, budget, asked.all)
            actions.accept(chosen)
            supply.take([accepted.offer for accepted in chosen])
            needs = budget.needs(claim)
        there = needs <= budget.free
        promises += promised(claim, budget.use(claim, needs))
        if there and claim.then is not None and not instead:
            actions.add(claim.then(needs))
            budget.bring(claim)
    free = 0 if uncovered else max(0, min(budget.free, budget.coming))
    return MarketResult(actions.final, tuple(promises), uncovered, free)


class _Asked:
    """The offers for a claim, as far as they were looked at, and those that follow."""

    def __init__(self, find: Callable[[], Iterable[Offer]]) -> None:
        self._find = find
        self._seen: list[Offer] = []
        self._rest: Iterator[Offer] = iter(())

    def __call__(self) -> Iterator[Offer]:
        """Return the offers from the first one on."""
        self._seen, self._rest = [], iter(self._find())
        for offer in self._rest:
            self._seen.append(offer)
            yield offer

    @property
    def all(self) -> Iterator[Offer]:
        """All that were offered last, the cheapest page first."""
        return chain(self._seen, self._rest)


def _beyond_growths(
    claims: Iterable[Claim],
    budget: PageBudget,
    supply: SupplyCurve,
    actions: Actions,
    promises: list[Promise],
) -> Iterator[Claim]:
    """Cover growths for which pages that are free or one running request suffice, as long as that
    is cheapest, without trial; yield all other claims, in their order."""
    for claim in claims:
        if not claim.grows or budget.borrowed:
            yield claim
            continue
        needs = budget.needs(claim)
        if needs > budget.coming:
            undone = _undo_work(claim, budget, supply, needs - budget.coming)
            if undone is None:
                yield claim
                continue
            actions.add((undone,))
            needs = budget.needs(claim)
        budget.use(claim, needs)
        promises += promised(claim, needs)


def _undo_work(claim: Claim, budget: PageBudget, supply: SupplyCurve, lacked: int) -> Action | None:
    """Take the cheapest offer that a growth may take, if that is running work that suffices alone,
    and return its action; None, with nothing taken, if it is not."""
    work = supply.running(budget, claim, lacked)
    found = work.first(1 + UNTAKEN, claim.undoing or claim.order, budget)
    if not found or found[0].pages < lacked:
        return None
    taken, *others = found
    budget.preempt(taken)
    work.take(taken)
    action = taken.preempted(claim)
    untaken = [(other.key, other.price / other.pages) for other in others]
    why = Explanation(str(action.why), taken.price, taken.pages, claim.gain, untaken)
    return explained(action, why)


def _order(claim: Claim) -> tuple[float, bool, Precedence, str]:
    """Return the sort key: the most gain a page first; of those that must be covered, those owed
    only memory that nobody uses last."""
    return -claim.gain / max(1, claim.pages), claim.unused_only, claim.order, claim.model


class Explanation(UserString):
    """Why an offer was taken, what it costs, what its claim gains, and the cheapest that were not.

    The text is made when it is first read; until then it holds nothing of the view.
    """

    def __init__(
        self, reason: str, price: float, pages: int, gain: float, untaken: Sequence[_Untaken]
    ) -> None:
        self._facts = reason, price, pages, gain, untaken

    def __getattr__(self, name: str) -> str:
        """Make the text (`data`), which is not there before it is read."""
        if name != "data":
            raise AttributeError(name)
        reason, price, pages, gain, untaken = self._facts
        without = "it must be done" if gain == math.inf else f"{_number(gain)} without it"
        late = f"expected late requests: {_number(price)} by it, {without}"
        names = ", ".join(f"{memory_of(key)} {_number(pages * each)}" for key, each in untaken)
        others = f"next best for as many pages: {names}" if names else "nothing else is there"
        self.data = f"{reason}; {late}; {others}"
        return self.data


def _number(late: float) -> str:
    """Show how many requests are expected to be late."""
    return f"{late:.2g}" if late >= LEAST_SHOWN or not late else f"under {LEAST_SHOWN:g}"


def _explain(
    claim: Claim, chosen: Sequence[AcceptedOffer], budget: PageBudget, asked: Iterable[Offer]
) -> None:
    """Have the actions of accepted offers explain themselves; `asked`: all that were offered."""
    taken = {accepted.offer.key for accepted in chosen}  # and those named already
    untaken: list[_Untaken] = []
    for offer in asked:
        if not offer.pages or offer.key in taken or budget.used_up(offer):
            continue
        if claim.may_take(offer):
            taken.add(offer.key)
            untaken.append((offer.key, offer.price() / offer.pages))
            if len(untaken) == UNTAKEN:
                break
    for offer, pages, action in chosen:
        price = offer.price_of(pages)
        explained(action, Explanation(str(action.why), price, pages, claim.gain, untaken))
