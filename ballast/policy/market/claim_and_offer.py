"""Define claims (needs for pages) and offers (ways to free pages, with a price).

An offer declares all effects of its action, so that the code that covers claims by offers
(`ballast.policy.market.cover`) depends on no kind of action. Used by all modules of `policy.market`
and by the memory policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ballast.core.actions import Action, Preempt
from ballast.core.request import Precedence
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, SharedView


class Claim(NamedTuple):
    """A need for `pages` pages, beyond those that its model holds, on behalf of a request."""

    model: str
    order: Precedence
    pages: int
    may_preempt: bool
    """Whether work in progress of younger requests may be undone for it."""
    blocks: int = 0
    """KV blocks that the pages are for, if it is a request's claim (`Shortage.blocks`)."""
    weights: bool = False
    """Whether the pages are for weights, which cannot lie on borrowed pages."""
    first_pages: int = 0
    """Pages, of `pages`, for the KV cache of the first request of a model to be activated."""
    segments: tuple[SharedView, ...] = ()
    """Shared segments that the model loads, and then holds."""
    then: Callable[[int], Sequence[Action]] | None = None
    """Returns the actions to do once the given number of pages is free; None: none, as the loop
    sees free pages by itself."""
    grain: int = 0
    """Unit in pages in which the claim can be covered in part; 0: it is all or nothing."""
    admission: bool = False
    """Whether its request waits to be admitted: it holds no pages yet, and its model is
    resident."""
    least: int = 1
    """Least pages of a partly covered claim for which `then` has something to do."""
    overdue: bool = False
    """Whether its request has waited longer than the policy's patience."""
    due: float = 0.0
    """When its request's first token is due, in seconds on the device's clock. Orders only claims
    that undo no work."""
    undoing: Precedence | None = None
    """Precedence in place of `order` where it has work undone; None: `order`."""
    resting: bool = False
    """Whether it may also have requests preempted that are ahead of their pace, older ones too."""
    unused_only: bool = False
    """Whether it takes only memory that no request uses now."""
    gain: float = math.inf
    """Request-seconds of delay that covering it avoids: where claims are covered by price, only a
    lower price is accepted."""

    @property
    def precedence(self) -> tuple[bool, int, float, Precedence, str]:
        """Sort key of claims, the lowest first.

        Claims that may undo work come first, so that free pages save that work; then others by when
        their request's first token is due, which is the order of their prefills.
        """
        undoing = self.may_preempt
        due = 0.0 if undoing else self.due
        return not undoing, self.order.rank, due, self.order, self.model

    @property
    def grows(self) -> bool:
        """Whether its request runs: it undoes work in order to go on, and shares its offers with
        all such claims."""
        return self.may_preempt and not (self.admission or self.weights)

    def may_take(self, offer: Offer) -> bool:
        """Return whether it may have an offer: no work undone for it that is older, nothing from
        requests that are more important, and no blocks alone of other models."""
        if offer.undoes is not None and not (self.may_preempt and self._may_undo(offer)):
            return False
        if self.unused_only and (offer.in_use or offer.undoes is not None):
            return False
        if offer.owner == self.model:
            if offer.for_others:
                return False
        elif not offer.pages and not offer.everything:
            return False
        return offer.rank >= self.order.rank

    def _may_undo(self, offer: Offer) -> bool:
        assert offer.undoes is not None
        if self.resting and offer.ahead and self.order.rank <= offer.undoes.rank:
            return True
        return (self.order if self.undoing is None else self.undoing) < offer.undoes


class Offer(NamedTuple):
    """One way to free pages: how many, at what price, by which action, and with which side
    effects."""

    key: tuple[str, ...]
    """Identity of the memory offered: offers with the same key are of the same pages, which can be
    taken once in a decision."""
    owner: str
    """Owner of the memory: a model's name, or `lent:DEVICE`."""
    pages: int
    """Most pages that it frees for any use."""
    price: Callable[[], float]
    """Returns the expected harm if all is taken: seconds of delay, summed over the requests that it
    delays. A function, as fixed orders of sources need no prices."""
    act: Callable[[int, Claim], Action]
    """Returns the action that frees the given number of pages for a claim."""
    blocks: int = 0
    """KV blocks freed beside the pages, which only the owner itself can use."""
    grain: int = 0
    """Unit in pages in which it can be taken in part; 0: it is indivisible."""
    cumulative: bool = False
    """Whether `act` gets all pages taken under this key so far, and its action replaces the one
    before."""
    later: bool = False
    """Whether its pages become free only with a later event, not with the action."""
    undoes: Precedence | None = None
    """Precedence of the oldest request whose work in progress it undoes: only older claims that
    `may_preempt` can take it. None: it undoes no work."""
    everything: bool = False
    """Whether it takes all memory that is left of the owner: no other offer of that owner can
    follow."""
    releases: tuple[SharedView, ...] = ()
    """Shared segments that the owner ceases to hold: those without another holder are freed as
    well."""
    rank: float = math.inf
    """Importance of the requests that it delays (`Precedence.rank`): no claim of a less important
    request can take it."""
    for_others: bool = False
    """Whether only claims of other models than its owner can take it."""
    instead: bool = False
    """Whether its action does all that the claim is for, so that `Claim.then` need not follow."""
    in_use: bool = False
    """Whether requests that are here use the memory, though no work of theirs is undone."""
    ahead: bool = False
    """Whether the request whose work it undoes can wait without being late."""
    at_hand: bool = False
    """Whether its blocks can be used by the owner's own requests as they are, which lack them if
    the offer is taken."""

    def part(self, pages: int, pages_before: int) -> int:
        """Return the least number of pages, at least `pages`, that can be taken of a divisible
        offer after `pages_before`; all that is left if it has fewer."""
        return min(self.pages - pages_before, ceil_div(pages, self.grain) * self.grain)

    def price_of(self, pages: int) -> float:
        """Return the price of `pages` of its pages, in proportion if it is divisible."""
        price = self.price()
        return price * pages / self.pages if self.grain else price


class RunningWork(NamedTuple):
    """A running request that holds pages, and may be preempted for a claim: an offer in short, as
    there may be hundreds. Fields as of `Offer`."""

    undoes: Precedence
    price: float
    """Expected harm."""
    pages: int
    blocks: int
    owner: str
    key: tuple[str, ...]
    """Its last part is the request's id."""
    ahead: bool

    @property
    def grain(self) -> int:
        """0: it is indivisible."""
        return 0

    def preempted(self, claim: Claim) -> Preempt:
        """Return the action for a claim."""
        why = f"{claim.model} gains more than it loses"
        return Preempt(self.owner, self.key[-1], why)


Source = Callable[[DeviceView, Claim], Iterable[Offer]]
"""Yields offers for a claim, the best first by the source's own rule."""
