"""Cover claims for pages, first come first served, from sources in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from ballast.core.actions import Action, Activate, Evict, Offer, Preempt, Remap
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

    def take(self, offer: Offer) -> int:
        """Use an offer up; how many pages that adds to those taken before."""
        model = offer.action.model
        if model in self.evicted:
            return 0
        taken = self.taken.setdefault(model, {})
        if isinstance(offer.action, Evict):
            return max(0, self._evict(self._models[model]) - sum(taken.values()))
        if isinstance(offer.action, Remap):
            m = self._models[model]
            before = taken.get(_REMAP, 0)
            taken[_REMAP] = max(before, offer.action.rotation.lent * m.layer_pages - m.lent_pages)
            return taken[_REMAP] - before
        request = offer.action.request_id if isinstance(offer.action, Preempt) else ""
        key = (type(offer.action).__name__, request)
        if key in taken:
            return 0
        taken[key] = offer.pages
        self.blocks[model] = self.blocks.get(model, 0) + offer.blocks
        return offer.pages

    def gain(self, offer: Offer) -> int:
        """Use an offer up; how many pages come by it that would not have come before."""
        pages = self.take(offer)
        self.coming += pages
        if not isinstance(offer.action, Remap):  # its pages come when loads have landed
            self.free += pages
        return pages

    def use(self, claim: Claim) -> None:
        """The claim gets what it needs."""
        needs = self.needs(claim)
        lent = min(self._borrowable(claim), max(0, needs - max(0, self.coming)))
        self.borrowed -= lent
        needs -= lent
        self.coming -= needs
        self.free -= needs
        left = self.blocks.get(claim.model, 0) - claim.blocks
        self.blocks[claim.model] = max(0, left)

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


def cover(view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]) -> list[Action]:
    """Actions that make room for `claims`, oldest first; a claim is covered wholly or not at all.

    A claim that cannot be covered keeps what is free from younger claims, so that it is not
    overtaken for ever. Pages that are on their way (reclaiming) count: nothing is freed twice for
    one need; such a claim simply waits.
    """
    return cover_on(Ground(view), view, claims, sources)[1]


def cover_on(
    ground: Ground, view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]
) -> tuple[Ground, list[Action]]:
    """`cover` on what is left of a ground; and what is left after it."""
    actions: list[Action] = []
    for claim in sorted(claims, key=lambda c: (c.order, c.model)):
        covered = _cover_one(view, claim, sources, ground, frozenset())
        if covered is None:
            ground = ground.copy()
            ground.coming = ground.free = ground.borrowed = 0
            continue
        ground, chosen = covered
        actions += chosen
        activates = claim.activate and ground.needs(claim) <= ground.free
        ground.use(claim)
        if activates:
            actions.append(Activate(claim.model, why="requests wait for it"))
            ground.activate(claim)
    return ground, last_remaps(actions)


def gather(ground: Ground, pages: int, offers: Iterable[Offer]) -> list[Action]:
    """Use offers up until so many pages are coming, or there are no more."""
    actions: list[Action] = []
    for offer in offers:
        if ground.coming >= pages:
            break
        gained = ground.gain(offer)
        if gained:
            actions.append(offer.action)
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
        for offer in source(view, claim):
            evicts = isinstance(offer.action, Evict)
            if evicts and offer.action.model in spared | ground.evicted:
                continue
            ground.gain(offer)
            lacks = ground.lacks(claim)
            gained = lacks < lacked
            lacked = lacks
            for_itself = offer.blocks > 0 and offer.action.model == claim.model
            if gained or evicts or for_itself:
                chosen.append(offer.action)
            if evicts and not gained:
                trials.append(offer.action.model)
            if lacked <= 0:
                break
    if lacked > 0:
        return None
    vain = frozenset(model for model in trials if ground.in_vain(claim, model))
    if vain:
        return _cover_one(view, claim, sources, before, spared | vain)
    return ground, chosen
