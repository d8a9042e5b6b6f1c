"""Account for the pages that claims can count on during one decision, with undo.

`ballast.policy.market.cover` takes offers from it and gives pages to claims; trials that do not
cover a claim are undone. It is plain arithmetic on a view: pages themselves do not move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from ballast.core.units import ceil_div
from ballast.core.view import DeviceView
from ballast.policy.market.claim_and_offer import Claim, Offer, RunningWork

K = TypeVar("K")
V = TypeVar("V")
_ABSENT = object()


class Mark(NamedTuple):
    """State of a budget that `PageBudget.undo` returns to."""

    changes: int
    coming: int
    free: int
    borrowed: int


class PageBudget:
    """Pages, offers and holders of shared segments in the course of one decision. All changes can
    be undone (`mark`, `undo`)."""

    def __init__(self, view: DeviceView, within: int | None = None) -> None:
        """`within`: pages for claims, all of them free; None: the device's."""
        self.coming = view.coming if within is None else within
        """Pages that are free or will be, less those that claims have got."""
        self.free = view.free - view.promised if within is None else within
        """Pages that are free once the actions planned so far are done."""
        self.borrowed = view.borrowed
        """Pages of other devices, for KV only."""
        self._models = view.by_name
        self._taken: dict[tuple[str, ...], int] = {}
        """Pages taken, by key of the offer."""
        self._taken_of: dict[str, int] = {}
        """Pages taken, by owner."""
        self._emptied: dict[str, bool] = {}
        """Owners all of whose memory was taken."""
        self._blocks: dict[str, int] = {}
        """KV blocks that each model gets back on pages that it keeps."""
        self._holders = view.derived(_holders).copy()
        """Models that hold each shared segment."""
        self._changes: list[tuple[dict[Any, Any], Any, Any]] = []
        """Journal for `undo`: the dictionary that changed, the key, and the value before."""

    # -- claims -----------------------------------------------------------------------------------

    def needs(self, claim: Claim) -> int:
        """Return the pages that a claim needs, given the offers taken and the holders of segments
        so far."""
        if claim.blocks:
            m = self._models[claim.model]
            left = claim.blocks - self._blocks.get(claim.model, 0)
            return ceil_div(left, m.slab_blocks) * m.slab_pages if left > 0 else 0
        pages = claim.pages
        for s in claim.segments:
            pages += s.pages * ((not self._holders[s.owner]) - (not s.holders))
        return pages

    def lacks(self, claim: Claim, needs: int) -> int:
        """Return by how many pages a claim's `needs` exceed those coming; none are lacking if not
        positive."""
        lacked = needs - self.coming
        return lacked - self._borrowable(claim) if self.borrowed else lacked

    def use(self, claim: Claim, needs: int) -> int:
        """Give a claim the pages that it `needs`; returns how many of these are the device's
        own."""
        if self.borrowed:
            lent = min(self._borrowable(claim), max(0, needs - max(0, self.coming)))
            self.borrowed -= lent
            needs -= lent
        self.coming -= needs
        self.free -= needs
        if blocks := self._blocks.get(claim.model, 0):
            self._set(self._blocks, claim.model, max(0, blocks - claim.blocks))
        return needs

    def use_part(self, claim: Claim) -> int:
        """Give a divisible claim free pages, in multiples of its grain, and return how many; pages
        still to come are kept for it too."""
        pages = min(claim.pages, max(0, min(self.free, self.coming)))
        pages = pages // claim.grain * claim.grain
        self.free -= pages
        self.coming -= min(claim.pages, max(0, self.coming))
        return pages

    def hold(self, needs: int) -> int:
        """Reserve up to `needs` coming pages for a claim that is not covered; returns how many."""
        pages = max(0, min(needs, self.coming))
        self.coming -= pages
        self.free -= pages
        return pages

    def bring(self, claim: Claim) -> None:
        """Record that a claim's model holds the shared segments that it loads."""
        for s in claim.segments:
            self._set(self._holders, s.owner, self._holders[s.owner] | {claim.model})

    def _borrowable(self, claim: Claim) -> int:
        """Return the pages of other devices that a claim may use: `DeviceView.borrowable`."""
        if claim.weights or self._models[claim.model].slab_pages > 1:
            return 0
        return self.borrowed

    # -- offers -----------------------------------------------------------------------------------

    def taken(self, key: tuple[str, ...]) -> int:
        """Return the pages taken under an offer's key."""
        return self._taken.get(key, 0)

    def used_up(self, offer: Offer | RunningWork) -> bool:
        """Return whether nothing of an offer is left."""
        if offer.owner in self._emptied:
            return True
        taken = self._taken.get(offer.key)
        return taken is not None and (not offer.grain or taken >= offer.pages)

    def left(self, offer: Offer, pages: int) -> int:
        """Return the pages to take of an offer that is not used up, where `pages` are lacked: all
        of an indivisible one, which may be none if it only gives blocks back."""
        if not offer.grain:
            return offer.pages
        return offer.part(pages, self._taken.get(offer.key, 0))

    def gives(self, offer: Offer, pages: int) -> int:
        """Return the pages gained by taking `pages` of an offer, a number returned by `left`."""
        if not offer.everything:
            return pages
        alone = (s.pages for s in offer.releases if self._holders[s.owner] == {offer.owner})
        return max(0, pages - self._taken_of.get(offer.owner, 0) + sum(alone))

    def accept(self, offer: Offer, pages: int) -> int:
        """Take `pages` of an offer, a number returned by `left`; returns the pages gained."""
        gained, owner = pages, offer.owner
        if offer.everything:
            gained = self.gives(offer, pages)
            self._set(self._emptied, owner, True)
            for s in offer.releases:
                self._set(self._holders, s.owner, self._holders[s.owner] - {owner})
        else:
            self._note(offer, pages)
            if offer.blocks:
                self._set(self._blocks, owner, self._blocks.get(owner, 0) + offer.blocks)
        self.coming += gained
        if not offer.later:
            self.free += gained
        return gained

    def preempt(self, work: RunningWork) -> None:
        """Take a running request for good: it cannot be undone."""
        pages, owner = work.pages, work.owner
        self._taken[work.key] = pages
        self._taken_of[owner] = self._taken_of.get(owner, 0) + pages
        if work.blocks:
            self._blocks[owner] = self._blocks.get(owner, 0) + work.blocks
        self.coming += pages
        self.free += pages

    def reserve(self, offers: Iterable[Offer], pages: int) -> None:
        """Withhold up to `pages` pages of divisible offers, at once and without undoing work, from
        later claims.

        They are kept for a claim that is not covered yet, and are not freed before it is.
        """
        for offer in offers:
            if pages <= 0:
                return
            harmless = offer.grain and offer.undoes is None and not offer.cumulative
            if harmless and not offer.later and not self.used_up(offer):
                n = self.left(offer, pages)
                self._note(offer, n)
                pages -= n

    def _note(self, offer: Offer, pages: int) -> None:
        """Count pages as taken."""
        self._add(self._taken, offer.key, pages)
        self._add(self._taken_of, offer.owner, pages)

    def in_vain(self, claim: Claim, offer: Offer) -> bool:
        """Whether a taken offer has released no segments except those that the claim's own model
        loads."""
        wanted = {s.owner for s in claim.segments}
        released = (s for s in offer.releases if offer.owner in s.holders)
        return all(s.owner in wanted for s in released if not self._holders[s.owner])

    # -- undoing ----------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Return the present state, for `undo`."""
        return Mark(len(self._changes), self.coming, self.free, self.borrowed)

    def undo(self, mark: Mark) -> None:
        """Undo all changes since the mark."""
        while len(self._changes) > mark.changes:
            table, key, before = self._changes.pop()
            if before is _ABSENT:
                del table[key]
            else:
                table[key] = before
        _, self.coming, self.free, self.borrowed = mark

    def _add(self, table: dict[K, int], key: K, pages: int) -> None:
        before = table.get(key)
        self._changes.append((table, key, _ABSENT if before is None else before))
        table[key] = pages if before is None else before + pages

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        self._changes.append((table, key, table.get(key, _ABSENT)))
        table[key] = value


def _holders(view: DeviceView) -> dict[str, frozenset[str]]:
    return {s.owner: frozenset(s.holders) for m in view.models for s in m.shared}
