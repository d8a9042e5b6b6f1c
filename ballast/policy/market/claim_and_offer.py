"""Define claims (needs for pages) and offers (ways to free pages, with a price).

An offer declares all effects of its action, so that the code that covers claims by offers
(`ballast.policy.market.cover`) depends on no kind of action. Used by all modules of `policy.market`
and by the memory policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ballast.core.actions import Action
from ballast.core.request import Precedence
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, SharedView


class Claim(NamedTuple):
    """A need for pages on behalf of a request: `pages` beyond what its model holds."""

    model: str
    order: Precedence
    pages: int
    may_preempt: bool
    """Whether work in progress of younger requests may be undone for it."""
    blocks: int = 0
    """Of a request: the blocks that those pages are for (`Shortage.blocks`)."""
    weights: bool = False
    """Weights are to lie on them, which borrowed pages are not for."""
    first_pages: int = 0
    """Where the model is to come: of `pages`, those for the KV cache of its first request."""
    segments: tuple[SharedView, ...] = ()
    """Shared segments that the model brings, and then holds."""
    then: Callable[[int], Sequence[Action]] | None = None
    """What to do once so many pages are free; None: the loop will see that they are."""
    grain: int = 0
    """Pages by which a part of the claim can be covered; 0: all or nothing."""
    admission: bool = False
    """Its request waits to be admitted: it holds nothing yet, and its model is there."""
    least: int = 1
    """Where a part of it can be covered: the fewest pages for which `then` has something to do."""
    overdue: bool = False
    """Its request has waited longer than it should."""
    due: float = 0.0
    """When its request's first token is due, in seconds on the device's clock; matters only to
    claims that undo no work."""
    gain: float = math.inf
    """Request-seconds of delay that covering it avoids: where claims are covered by price, the
    price must be lower."""

    @property
    def precedence(self) -> tuple[bool, int, float, Precedence, str]:
        """Claims that may undo work come first, which free pages save; then those of requests whose
        first token is due earliest, as their prompts will be computed."""
        undoing = self.may_preempt
        due = 0.0 if undoing else self.due
        return not undoing, self.order.rank, due, self.order, self.model


class Offer(NamedTuple):
    """One way to find pages: how many, at what price, by which action, and what else it does."""

    key: tuple[str, ...]
    """What it consists of: offers with the same key are of the same pages, which can be taken once
    in a decision."""
    owner: str
    """Whose memory it is in: a model's name, or `lent:DEVICE`."""
    pages: int
    """At most, for all to use."""
    price: Callable[[], float]
    """Expected harm if all is taken: seconds of delay, summed over the requests that it delays.
    Computed on demand, as fixed orders of sources do without."""
    act: Callable[[int, Claim], Action]
    """What frees so many of the pages, for a claim."""
    blocks: int = 0
    """Beside the pages: KV blocks that only the owner itself can use."""
    grain: int = 0
    """Pages by which a part of it can be taken; 0: it is indivisible."""
    cumulative: bool = False
    """`act` is given all pages taken under this key, and replaces the action for fewer."""
    later: bool = False
    """Its pages do not come with the action, but with an event that follows."""
    undoes: Precedence | None = None
    """The oldest request whose work in progress it undoes: only older claims that `may_preempt` can
    take it. None: it undoes none."""
    everything: bool = False
    """It takes all that is left of the owner's memory: of that, nothing else can be taken after."""
    releases: tuple[SharedView, ...] = ()
    """Shared segments that the owner no longer holds then: those that nobody else holds are freed
    as well."""
    at_hand: bool = False
    """It is of blocks that the owner's own requests can use as they are: taken, they lack them."""

    def part(self, pages: int, pages_before: int) -> int:
        """Return the least number of pages of a divisible offer that is at least `pages`, beside
        those `pages_before` before; all that is left where it has fewer."""
        return min(self.pages - pages_before, ceil_div(pages, self.grain) * self.grain)

    def price_of(self, pages: int) -> float:
        """Return the price of so many of its pages: of a divisible offer in proportion."""
        price = self.price()
        return price * pages / self.pages if self.grain else price


Source = Callable[[DeviceView, Claim], Iterable[Offer]]
"""Yields offers for a claim, best first by the source's own rule."""
