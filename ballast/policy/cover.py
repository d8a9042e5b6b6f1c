"""Cover claims for pages, in order of precedence, from sources in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from ballast.core.actions import Action, Activate, Evict, Offer, Preempt, Promise, Recall, Remap
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView
from ballast.policy.offers import Claim, Source

_REMAP = (Remap.__name__, "")


class Ground:
    """Pages that claims can still count on during one decision, and what was already taken."""

    def __init__(self, view: DeviceView) -> None:
        self.coming = view.coming
        self.free = view.free - view.promised
        self.borrowed = view.borrowed
        """For KV only."""
        self.taken: dict[str, dict[tuple[str, str], int]] = {}
        """Pages taken of each model, by kind of action and request."""
        self.recalled: dict[str, int] = {}
        """Pages recalled from each device."""
        self.blocks: dict[str, int] = {}
        """Blocks that each model gets back on pages that it keeps."""
        self.evicted: set[str] = set()
        self.holders = {s.owner: set(s.holders) for m in view.models for s in m.shared}
        """Models that use each shared segment."""
        self._models = {m.name: m for m in view.models}

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
        return offer.part(min(pages, offer.pages - taken))

    def take(self, offer: Offer) -> int:
        """Use an offer up; how many pages that adds to those taken before."""
        action = offer.action
        if isinstance(action, Recall):
            self.recalled[action.to] = self.recalled.get(action.to, 0) + offer.pages
            return offer.pages
        model = action.model
        if model in self.evicted:
            return 0
        taken = self.taken.setdefault(model, {})
        if isinstance(action, Evict):
            return max(0, self._evict(self._models[model]) - sum(taken.values()))
        if isinstance(action, Remap):
            m = self._models[model]
            before = taken.get(_REMAP, 0)
            taken[_REMAP] = max(before, action.rotation.lent * m.layer_pages - m.lent_pages)
            return taken[_REMAP] - before
        key = _key(action)
        if offer.grain:
            taken[key] = taken.get(key, 0) + offer.pages
            return offer.pages
        if key in taken:
            return 0
        taken[key] = offer.pages
        self.blocks[model] = self.blocks.get(model, 0) + offer.blocks
        return offer.pages

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
        left = self.blocks.get(claim.model, 0) - claim.blocks
        self.blocks[claim.model] = max(0, left)
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
        return self.taken.get(offer.action.model, {}).get(_key(offer.action), 0)

    def _borrowable(self, claim: Claim) -> int:
        """Pages of other devices that the claim may be given, in whole slabs."""
        slab = self._models[claim.model].slab_pages
        return 0 if claim.activate else self.borrowed // slab * slab

    def activate(self, claim: Claim) -> None:
        """The claim's model comes; segments that it shares with others stay as long as it."""
        for s in self._models[claim.model].shared:
            self.holders[s.owner].add(claim.model)

    def in_vain(self, claim: Claim, evicted: str) -> bool:
        """Whether evicting a model has freed nothing that the claim's own model would not need."""
        wanted = {s.owner for s in self._models[claim.model].shared} if claim.activate else set()
        m = self._models[evicted]
        freed = (s for s in m.shared if m.name in s.holders and not self.holders[s.owner])
        return all(s.owner in wanted for s in freed)

    def copy(self) -> Ground:
        """As it is now, to go back to."""
        twin = copy(self)
        twin.taken = {model: dict(taken) for model, taken in self.taken.items()}
        twin.recalled = dict(self.recalled)
        twin.blocks = dict(self.blocks)
        twin.evicted = set(self.evicted)
        twin.holders = {owner: set(holders) for owner, holders in self.holders.items()}
        return twin

    def _evict(self, m: ModelView) -> int:
        """The model goes; pages of its weights and KV that are free then."""
        self.evicted.add(m.name)
        pages = m.own_pages - m.lent_pages + m.kv_pages
        for s in m.shared:
            if self.holders[s.owner] == {m.name}:
                pages += s.pages
            self.holders[s.owner].discard(m.name)
        return pages


def _key(action: Action) -> tuple[str, str]:
    """What tells actions on one model apart of which each can be taken once."""
    return type(action).__name__, action.request_id if isinstance(action, Preempt) else ""


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
        covered = _cover_one(view, claim, sources, ground, frozenset())
        if covered is None:
            if claim.overdue and not claim.may_preempt:
                ground = ground.copy()
                promises += _promised(claim, ground.hold(claim))
            continue
        ground, chosen = covered
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
    before: Ground,
    spared: frozenset[str],
) -> tuple[Ground, list[Action]] | None:
    """What covers one claim, and the ground after it; None where nothing does.

    A model whose weights others share may free nothing alone and much with them, so it is evicted
    on trial; what turns out to have been in vain is `spared` in another try.
    """
    ground = before.copy()
    chosen: list[Action] = []
    trials: list[str] = []
    lacked = ground.lacks(claim)
    for source in sources:
        if lacked <= 0:
            break
        for whole in source(view, claim):
            evicts = whole.action.model if isinstance(whole.action, Evict) else None
            if evicts is not None and evicts in spared | ground.evicted:
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
    if lacked > 0:
        return None
    vain = frozenset(model for model in trials if ground.in_vain(claim, model))
    if vain:
        return _cover_one(view, claim, sources, before, spared | vain)
    return ground, chosen
