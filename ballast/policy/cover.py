"""Cover claims for pages, in order of precedence, from sources in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from ballast.core.actions import (
    Action,
    Activate,
    Evict,
    ModelAction,
    Offer,
    Preempt,
    Promise,
    Recall,
    Remap,
)
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView
from ballast.policy.offers import Claim, Source

K = TypeVar("K")
V = TypeVar("V")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment to which a ground can be taken back."""

    changes: int
    coming: int
    free: int
    borrowed: int


class Ground:
    """Pages that claims can still count on during one decision, and what was already taken."""

    def __init__(self, view: DeviceView) -> None:
        self.coming = view.coming
        self.free = view.free - view.promised
        self.borrowed = view.borrowed
        """For KV only."""
        self.taken: dict[tuple[str, str, str], int] = {}
        """Pages taken, by model, kind of action and request."""
        self.taken_of: dict[str, int] = {}
        """The same, by model."""
        self.recalled: dict[str, int] = {}
        """Pages recalled from each device."""
        self.blocks: dict[str, int] = {}
        """Blocks that each model gets back on pages that it keeps."""
        self.evicted: dict[str, bool] = {}
        """Models that go."""
        self.holders = view.derived(_holders).copy()
        """Models that use each shared segment."""
        self._models = view.by_name
        self._changes: list[tuple[dict[Any, Any], Any, Any]] = []
        """Dictionaries that have changed: which, at which key, what was there before."""

    def mark(self) -> Mark:
        """This moment."""
        return Mark(len(self._changes), self.coming, self.free, self.borrowed)

    def undo(self, mark: Mark) -> None:
        """Take back what has happened since."""
        while len(self._changes) > mark.changes:
            table, key, before = self._changes.pop()
            if before is _ABSENT:
                del table[key]
            else:
                table[key] = before
        self.coming, self.free, self.borrowed = mark.coming, mark.free, mark.borrowed

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        self._changes.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def _add(self, table: dict[K, int], key: K, more: int) -> None:
        self._set(table, key, table.get(key, 0) + more)

    def needs(self, claim: Claim) -> int:
        """Pages of the claim, given who has come and gone since the view was taken."""
        m = self._models[claim.model]
        if claim.activate and not m.shared:
            return claim.pages
        if claim.activate:
            there = (not self.holders[s.owner] for s in m.shared)
            before = (not s.holders for s in m.shared)
            return claim.pages + sum(
                s.pages * (now - then) for s, now, then in zip(m.shared, there, before, strict=True)
            )
        if not claim.blocks:
            return claim.pages
        left = max(0, claim.blocks - self.blocks.get(claim.model, 0))
        return ceil_div(left, m.slab_blocks) * m.slab_pages

    def lacks(self, claim: Claim) -> int:
        """Pages that the claim needs beyond what is coming; none where this is not positive."""
        return self.needs(claim) - self.coming - self._borrowable(claim)

    def left_of(self, offer: Offer, pages: int) -> Offer | None:
        """The part of an offer that is not taken yet, no more than `pages` ask for; None if
        nothing of it is left."""
        taken = self._taken_of(offer)
        if not offer.grain:
            return offer
        if taken >= offer.pages:
            return None
        return offer.part(pages, taken)

    def take(self, offer: Offer) -> int:
        """Use an offer up; how many pages that adds to those taken before."""
        action = offer.action
        if isinstance(action, Recall):
            self._add(self.recalled, action.to, offer.pages)
            return offer.pages
        model = action.model
        if model in self.evicted:
            return 0
        if isinstance(action, Evict):
            return max(0, self._evict(self._models[model]) - self.taken_of.get(model, 0))
        key = _key(action)
        before = self.taken.get(key)
        if isinstance(action, Remap):
            m = self._models[model]
            pages = action.rotation.lent * m.layer_pages - m.lent_pages - (before or 0)
            return self._took(key, max(0, pages))
        if offer.grain:
            return self._took(key, offer.pages)
        if before is not None:
            return 0
        self._add(self.blocks, model, offer.blocks)
        return self._took(key, offer.pages)

    def _took(self, key: tuple[str, str, str], pages: int) -> int:
        self._add(self.taken, key, pages)
        self._add(self.taken_of, key[0], pages)
        return pages

    def gain(self, offer: Offer) -> int:
        """Use an offer up; how many pages come by it that would not have come before."""
        pages = self.take(offer)
        self.coming += pages
        if not offer.later:
            self.free += pages
        return pages

    def use(self, claim: Claim) -> int:
        """The claim gets what it needs; how many of these pages are the device's own."""
        needs = self.needs(claim)
        lent = min(self._borrowable(claim), max(0, needs - max(0, self.coming)))
        self.borrowed -= lent
        needs -= lent
        self.coming -= needs
        self.free -= needs
        if blocks := self.blocks.get(claim.model, 0):
            self._set(self.blocks, claim.model, max(0, blocks - claim.blocks))
        return needs

    def hold(self, claim: Claim) -> int:
        """Keep for a claim, which is not covered, what is coming; how many pages that is."""
        pages = max(0, min(self.needs(claim), self.coming))
        self.coming -= pages
        self.free -= pages
        return pages

    def _taken_of(self, offer: Offer) -> int:
        if isinstance(offer.action, Recall):
            return self.recalled.get(offer.action.to, 0)
        return self.taken.get(_key(offer.action), 0)

    def _borrowable(self, claim: Claim) -> int:
        """Pages of other devices that the claim may be given, in whole slabs."""
        slab = self._models[claim.model].slab_pages
        return 0 if claim.activate else self.borrowed // slab * slab

    def activate(self, claim: Claim) -> None:
        """The claim's model comes; segments that it shares with others stay as long as it."""
        for s in self._models[claim.model].shared:
            self._set(self.holders, s.owner, self.holders[s.owner] | {claim.model})

    def in_vain(self, claim: Claim, evicted: str) -> bool:
        """Whether evicting a model has freed nothing that the claim's own model would not need."""
        wanted = {s.owner for s in self._models[claim.model].shared} if claim.activate else set()
        m = self._models[evicted]
        freed = (s for s in m.shared if m.name in s.holders and not self.holders[s.owner])
        return all(s.owner in wanted for s in freed)

    def _evict(self, m: ModelView) -> int:
        """The model goes; pages of its weights and KV that are free then."""
        self._set(self.evicted, m.name, True)
        pages = m.own_pages - m.lent_pages + m.kv_pages
        for s in m.shared:
            if self.holders[s.owner] == {m.name}:
                pages += s.pages
            self._set(self.holders, s.owner, self.holders[s.owner] - {m.name})
        return pages


def _holders(view: DeviceView) -> dict[str, frozenset[str]]:
    return {s.owner: frozenset(s.holders) for m in view.models for s in m.shared}


def _key(action: ModelAction) -> tuple[str, str, str]:
    """What tells actions apart of which each can be taken once."""
    request = action.request_id if isinstance(action, Preempt) else ""
    return action.model, type(action).__name__, request


@dataclass(frozen=True, slots=True)
class Covered:
    """What covers claims."""

    ground: Ground
    """What is left after it."""
    actions: list[Action]
    promises: tuple[Promise, ...]
    """What the claims wait for, in order of precedence."""


def cover(view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]) -> Covered:
    """Make room for `claims`, each wholly or not at all: in order of precedence those that may undo
    work, which free pages save, then those that only wait, whose first token is due first.

    What is freed for a claim is promised to it, so that nobody takes it before the rest has come.
    Pages that are on their way (reclaiming, recalled) count: nothing is freed twice for one need;
    such a claim simply waits. A claim that cannot be covered keeps nothing from those after it,
    who are undone for it as soon as that covers it; but one that undoes nobody, and is `overdue`,
    keeps what is free, so that it is not overtaken for ever.
    """
    return cover_on(Ground(view), view, claims, sources)


def cover_on(
    ground: Ground, view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]
) -> Covered:
    """`cover`, with what is left of a ground."""
    actions: list[Action] = []
    promises: list[Promise] = []
    for claim in sorted(claims, key=lambda c: c.precedence):
        chosen = _cover_one(view, claim, sources, ground, frozenset())
        if chosen is None:
            if claim.overdue and not claim.may_preempt:
                promises += _promised(claim, ground.hold(claim))
            continue
        actions += chosen
        activates = claim.activate and ground.needs(claim) <= ground.free
        promises += _promised(claim, ground.use(claim))
        if activates:
            actions.append(Activate(claim.model, why="requests wait for it"))
            ground.activate(claim)
    return Covered(ground, last_remaps(actions), tuple(promises))


def _promised(claim: Claim, pages: int) -> list[Promise]:
    """Of pages that a claim has got: for weights first, where its model is to come."""
    kv = min(pages, claim.first_pages) if claim.activate else pages
    return [Promise(claim.model, pages - kv, kv)] if pages > 0 else []


def gather(ground: Ground, pages: int, offers: Iterable[Offer]) -> list[Action]:
    """Use offers up until so many pages are coming, or there are no more."""
    actions: list[Action] = []
    for offer in offers:
        if ground.coming >= pages:
            break
        left = ground.left_of(offer, pages - ground.coming)
        if left is not None and ground.gain(left):
            actions.append(left.action)
    return last_remaps(actions)


def last_remaps(actions: Sequence[Action]) -> list[Action]:
    """Of the rotations that one model has got after another, the last."""
    last = {a.model: a for a in actions if isinstance(a, Remap)}
    return [a for a in actions if not isinstance(a, Remap) or a is last[a.model]]


def _cover_one(
    view: DeviceView,
    claim: Claim,
    sources: Sequence[Source],
    ground: Ground,
    spared: frozenset[str],
) -> list[Action] | None:
    """What covers one claim, taken from the ground; None, and nothing taken, where nothing does.

    A model whose weights others share may free nothing alone and much with them, so it is evicted
    on trial; what turns out to have been in vain is `spared` in another try.
    """
    lacked = ground.lacks(claim)
    if lacked <= 0:
        return []
    before = ground.mark()
    chosen: list[Action] = []
    trials: list[str] = []
    for whole in chain.from_iterable(source(view, claim) for source in sources):
        evicts = whole.action.model if isinstance(whole.action, Evict) else None
        if evicts is not None and (evicts in spared or evicts in ground.evicted):
            continue
        offer = ground.left_of(whole, lacked)
        if offer is None:
            continue
        ground.gain(offer)
        lacks = ground.lacks(claim)
        gained = lacks < lacked
        lacked = lacks
        for_itself = (
            offer.blocks > 0
            and isinstance(offer.action, Preempt)
            and offer.action.model == claim.model
        )
        if gained or evicts is not None or for_itself:
            chosen.append(offer.action)
        if evicts is not None and not gained:
            trials.append(evicts)
        if lacked <= 0:
            break
    else:
        ground.undo(before)
        return None
    vain = frozenset(model for model in trials if ground.in_vain(claim, model))
    if vain:
        ground.undo(before)
        return _cover_one(view, claim, sources, ground, spared | vain)
    return chosen
