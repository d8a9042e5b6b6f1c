"""Give memory of weight layers to KV before preempting any request (MIRAGE, section 5).

The memory policy of preset `mirage`. Layers that give up their pages rotate: they are loaded from
the host just before they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ballast.core.actions import Action, Decision, DropCache, Limit, Promise, Refuse, Reside
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.base import PlacedModels
from ballast.policy.market.claim_and_offer import Claim, Source
from ballast.policy.market.claims import activation_claims, earliest, kv_claims, queue_claims
from ballast.policy.market.cover import cover
from ballast.policy.market.fair_shares import share_out
from ballast.policy.market.offers import (
    cached_prefixes,
    lent_pages,
    loose_blocks,
    own_prefix,
    own_younger_requests,
)
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.memory.defaults import pages_alone
from ballast.policy.memory.layer_offers import LayerOffers, most_freeable
from ballast.policy.memory.layer_reversion import give_back, off_peak, to_active
from ballast.policy.memory.recompute import PATIENCE, PlacesMemo, hold, served, stand, turns_of
from ballast.policy.memory.static import (
    cover_limited,
    part_limited,
    placed,
    recalls,
    shares,
    within,
)
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class MirageMemo:
    """State that one decision of the policy leaves to the next."""

    standing: PlacesMemo | None = None
    active: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()
    """Active models that still give up more layers than active models may."""
    calm_since: float | None = None
    """When a request last ceased to lack pages, in seconds; None: one lacks some now."""


@dataclass(frozen=True, slots=True)
class _Covered:
    """Result of covering the claims of one decision."""

    view: DeviceView
    """The device as it will be once rotations and limits are as decided."""
    budget: PageBudget
    actions: list[Action]
    short: bool
    """Whether a request lacked pages for its KV."""
    promises: tuple[Promise, ...] = ()
    wake: float | None = None
    """When the next waiting request becomes overdue, and may claim more."""


@dataclass(frozen=True, slots=True)
class _Returned:
    """Layers that are returned in one decision, and the memo for the next."""

    actions: list[Action]
    wake: float | None
    """When layers are returned if no request lacks pages until then."""
    memory: MirageMemo


@dataclass(frozen=True, slots=True)
class Mirage(PlacedModels):
    """`Recompute`, except that weight layers give up pages before requests are preempted.

    Where KV is short, pages come from cached prefixes, from blocks moved together, from layers of
    inactive models (the least important first, then those used last), from layers of active ones,
    each as far as its passes hide the loads; only then are requests preempted. When a model becomes
    active, layers beyond what an active one may give up are returned to it. After `cooldown`
    seconds without a shortage, layers are returned as far as `reserve` of the KV pages stay free;
    the paper (5.1) restores them "during non-peak periods" and states neither number: both are
    ours.

    Where models take turns, all but the one that has the turn are inactive. Where they run side by
    side, those without a request are, which is ours; with `spatial` none is, as the paper has it
    (5.2). `spatial` with `pooled` 0 is the setting of 7.3.

    `pooled`: KV of all models comes from one pool; else each has a share, which grows by the pages
    freed for it. `beta`: slots of every rotation; 0: as many as stall least. `cap` 0: passes may
    stall. `lru`: models used longest ago give up layers first. `portion`: largest part of a model's
    layers given up. `reversion` 0: layers are returned only to models that become active.
    `lookahead`: waiting requests of a queue, the first included, for which layers are freed at once
    and not one by one, as a model cannot run while its layers are remapped (`pooled` only).
    `longest_stall`: most seconds for which a request may wait for layers beyond the caps, which the
    oldest request gets rather than no answer; one that would wait longer is refused (`pooled` only;
    not if `cap` is 0). `by_price`: as of `Recompute`.
    """

    temporal: float = 0
    quantum: float = 1.0
    preemptive: float = 0
    pooled: float = 1
    lru: float = 0
    beta: float = 0
    cap: float = 1
    portion: float = 1.0
    reversion: float = 1
    cooldown: float = 1.0
    lookahead: float = 8
    reserve: float = 0.1
    longest_stall: float = 0.5
    by_price: float = 0
    fair_shares: float = 1
    spatial: float = 0

    @property
    def requires(self) -> Requirements:
        return Requirements(rotation=True)

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        before = memo if isinstance(memo, MirageMemo) else MirageMemo()
        turns = turns_of(self.temporal, self.quantum, self.preemptive)
        divide = self._with_layers if self.pooled else shares
        standing, actions = stand(view, before.standing, divide, turns)
        whole, view = view, served(view, standing, turns)
        fair = bool(self.fair_shares and self.pooled and turns is None)
        sharing = share_out(view, fair=fair)
        view = sharing.view
        active = self._active(view, standing)
        layers = self._layers(view, standing, active)
        pages = standing.division.pages
        if self.pooled:
            actions += _refusals(view, layers)
            covered = self._cover_from_pool(view, layers, sharing.younger, pages)
        else:
            covered = self._cover_from_shares(view, layers, pages)
        promises, freed = covered.promises, bool(covered.actions)
        ended = hold(whole, standing, turns, promises, freed=freed)
        returned = self._return_layers(covered, before, layers, ended.standing, sharing.younger)
        done = [*covered.actions, *returned.actions]
        actions += [*sharing.holds, *ended.holds, *layers.choose(view, done)]
        wake = earliest(earliest(covered.wake, ended.up_at), returned.wake)
        return Decision(tuple(actions), returned.memory, wake, ended.promises, sharing.holding)

    def _cover_from_pool(
        self, view: DeviceView, layers: LayerOffers, younger: Source, pages: Mapping[str, int]
    ) -> _Covered:
        """Cover claims where the KV of all models comes from one pool.

        `younger`: source of requests that may be preempted. `pages`: by model that has a place, the
        bound of its KV.
        """
        claims, short_at = kv_claims(view, waiting=True, patience=PATIENCE)
        absent, absent_at = activation_claims(view, PATIENCE)
        absent = [
            _before_its_layers_lend(view, layers, claim) for claim in absent if claim.model in pages
        ]
        if claims and layers.any_left(view):
            claims += queue_claims(view, int(self.lookahead))
        sources = [cached_prefixes, loose_blocks, lent_pages, *_of(layers, younger), own_prefix]
        lacking, limited = part_limited(view, claims)
        covered = cover(view, [*absent, *lacking], sources, by_price=bool(self.by_price))
        actions = covered.actions + cover_limited(view, limited, [own_younger_requests])
        wake = earliest(absent_at, short_at)
        return _Covered(view, covered.budget, actions, bool(claims), covered.promises, wake)

    def _cover_from_shares(
        self, view: DeviceView, layers: LayerOffers, pages: Mapping[str, int]
    ) -> _Covered:
        """Cover claims where each model has its share of the KV `pages`."""
        claims, _ = kv_claims(view, waiting=True, patience=PATIENCE)
        after, actions = self._cover_within(view, claims, layers, pages)
        budget = PageBudget(_having(after, surplus(after, pages)))
        return _Covered(after, budget, actions, bool(claims))

    def _return_layers(
        self,
        covered: _Covered,
        before: MirageMemo,
        layers: LayerOffers,
        standing: PlacesMemo,
        younger: Source,
    ) -> _Returned:
        """Return layers to models that have become active, or whose requests would wait for them
        too long, and to all models when the peak is over."""
        view, budget, active = covered.view, covered.budget, layers.active
        returning = before.returning | (active - before.active)
        sources: list[Source] = [layers.of_inactive]
        if self.pooled:
            sources = [cached_prefixes, layers.of_inactive, younger]
            returning |= {
                m.name for m in view.models if m.name in active and layers.stalls(view, m)
            }
        actions, returning = to_active(view, budget, layers, returning & active, sources)
        since = view.now if before.calm_since is None else before.calm_since
        calm = None if covered.short else since
        wake = None
        if self.reversion and calm is not None and any(m.rotation.n_freed for m in view.models):
            due = calm + self.cooldown
            if view.now < due:
                wake = due
            elif not actions:
                actions = self._revert(view, budget, layers, standing.division.pages)
        return _Returned(actions, wake, MirageMemo(standing, active, returning, calm))

    def _active(self, view: DeviceView, standing: PlacesMemo) -> frozenset[str]:
        """Return the models with requests, or all if `spatial`; where there are turns, only the one
        that has the turn."""
        if self.spatial and not self.temporal:
            return frozenset(m.name for m in view.models)
        turn = standing.turn.model if standing.turn else None
        return frozenset(
            m.name for m in view.models if not m.idle and (not self.temporal or m.name == turn)
        )

    def _layers(
        self, view: DeviceView, standing: PlacesMemo, active: frozenset[str]
    ) -> LayerOffers:
        turn = standing.turn
        used = sorted(view.models, key=lambda m: (m.last_used, m.name))
        recent = (*turn.past, turn.model) if turn else tuple(m.name for m in used)
        return LayerOffers(
            active,
            recent,
            bool(self.cap),
            int(self.beta) or None,
            self.portion,
            bool(self.lru),
            bool(self.pooled),
            self.cooldown,
            self.longest_stall,
        )

    def _with_layers(self, view: DeviceView) -> dict[str, int]:
        """Return, for each model that has a place, the pages for KV once all models free all layers
        they can."""
        slots = int(self.beta) or None
        models, room = placed(view, pooled=True)
        freed = sum(
            most_freeable(m, self.portion, slots) * m.layer_pages
            for m in models
            if not m.spec.pinned
        )
        return {m.name: room + freed for m in models}

    def _cover_within(
        self,
        view: DeviceView,
        claims: Sequence[Claim],
        layers: LayerOffers,
        pages: Mapping[str, int],
    ) -> tuple[DeviceView, list[Action]]:
        """Cover claims where each model has a share, which grows by the pages that layers free for
        it. Returns the view after the actions, and these."""
        actions = recalls(view, sum(s.pages for s in view.shortages if not s.limited))
        for name in dict.fromkeys(claim.model for claim in claims):
            m = view.model(name)
            more = surplus(view, pages)
            own = [claim for claim in claims if claim.model == name]
            sources = _of(layers, own_younger_requests)
            done = cover(view, own, sources, PageBudget(within(view, m, more))).actions
            before = sum(o.freed_pages for o in view.models)
            view = _with(view, done)
            more += sum(o.freed_pages for o in view.models) - before
            if more > 0 and m.limit is not None:
                done.append(Limit(name, m.limit + more, why="layers give up pages for it"))
                view = _with(view, done[-1:])
            actions += done
        return view, actions

    def _revert(
        self, view: DeviceView, budget: PageBudget, layers: LayerOffers, pages: Mapping[str, int]
    ) -> list[Action]:
        """Return layers as far as pages are not needed, and a reserve stays free."""
        if self.pooled:
            reserve = ceil(self.reserve * placed(view, pooled=True)[1])
            spare = budget.free + sum(m.cached_pages for m in view.models) - reserve
            claims = off_peak(view, budget, layers)
            return give_back(view, budget, claims, spare, [cached_prefixes])
        lowered = _lowered(view, pages, self.reserve)
        drops = [
            DropCache(m.name, m.kv_pages - lowered[m.name], why="the peak is over")
            for m in view.models
            if m.kv_pages > lowered.get(m.name, m.kv_pages)
        ]
        limits = [Limit(name, n, why="the peak is over") for name, n in lowered.items()]
        view = _with(view, limits)
        free = view.free - view.promised + sum(d.pages for d in drops)
        spare = max(0, min(free, surplus(view, pages)))
        budget = PageBudget(_having(view, spare))
        claims = off_peak(view, budget, layers)
        remaps = give_back(view, budget, claims, spare, [cached_prefixes])
        return [*limits, *drops, *remaps] if remaps else []


def _refusals(view: DeviceView, layers: LayerOffers) -> list[Action]:
    """Refuse waiting requests that lack pages for which they would wait for layers too long, even
    with the device to themselves."""
    short = {s.request_id for s in view.shortages}
    here = [m for m in view.models if m.residency in (Residency.RESIDENT, Residency.ACTIVATING)]
    weights = sum({s.owner: s.pages for m in here for s in m.shared}.values())
    room = view.total - view.arena - weights - sum(m.own_pages for m in here)
    return [
        Refuse(m.name, r.id, f"{needed} pages of KV need layers whose loads take too long")
        for m in view.models
        for r in m.waiting[:1]
        if r.id in short
        and (needed := pages_alone(m, r) - m.guaranteed_pages) > room
        and needed > room + sum(_lendable(view, layers, o, [r] if o is m else ()) for o in here)
    ]


def _lendable(
    view: DeviceView, layers: LayerOffers, m: ModelView, requests: Sequence[RequestView]
) -> int:
    """Return the pages of layers for which `requests` wait no longer than they may."""
    n = 0 if m.spec.pinned else layers.bearable(view, m, requests)
    return max(n, m.rotation.n_freed) * m.layer_pages


def _before_its_layers_lend(view: DeviceView, layers: LayerOffers, claim: Claim) -> Claim:
    """Reduce the claim of an absent model to what the device can free without that model's own
    layers.

    These can be given up only once all of them are loaded; they then free the rest.
    """
    m = view.model(claim.model)
    if m.residency is not Residency.ABSENT:
        return claim
    here = [o for o in view.models if o.residency in (Residency.RESIDENT, Residency.ACTIVATING)]
    weights = sum({s.owner: s.pages for o in here for s in o.shared}.values())
    for o in here:
        weights += o.own_pages - (0 if o.spec.pinned else layers.bound(o) * o.layer_pages)
    pages = max(m.missing_pages, min(claim.pages, view.total - view.arena - weights))
    return claim._replace(pages=pages, first_pages=pages - m.missing_pages)


def surplus(view: DeviceView, pages: Mapping[str, int]) -> int:
    """Return the pages freed by layers that have not been added to any model's share."""
    freed = sum(m.freed_pages for m in view.models)
    return freed - sum(
        max(0, m.limit - pages[m.name])
        for m in view.models
        if m.limit is not None and m.name in pages
    )


def _of(layers: LayerOffers, youngest: Source) -> list[Source]:
    """Return the sources in order: layers up to their caps, preemption, then layers beyond their
    caps."""
    return [layers.of_inactive, layers.of_active, youngest, layers.beyond_caps]


def _with(view: DeviceView, actions: Sequence[Action]) -> DeviceView:
    """Return the view with plans and limits as decided; free pages are left as they are."""
    plans = {a.model: a.plan for a in actions if isinstance(a, Reside)}
    limits = {a.model: a.pages for a in actions if isinstance(a, Limit)}
    if not plans and not limits:
        return view
    models = (
        replace(m, plan=plans.get(m.name, m.plan), limit=limits.get(m.name, m.limit))
        for m in view.models
    )
    return replace(view, models=tuple(models))


def _having(view: DeviceView, pages: int) -> DeviceView:
    """Return the view of a device that has `pages` pages, free or on their way."""
    free = max(0, min(pages, view.free - view.promised))
    reclaiming = max(0, pages - free)
    return replace(view, free=free, reclaiming=reclaiming, recalled=0, promised=0, borrowed=0)


def _lowered(view: DeviceView, pages: Mapping[str, int], reserve: float) -> dict[str, int]:
    """Return the new limits of models whose grown shares can shrink while `reserve` of each stays
    unused."""
    found = {}
    for m in view.models:
        share = pages.get(m.name)
        if m.limit is not None and share is not None:
            used = m.kv_pages - m.cached_pages + ceil(reserve * share)
            if max(share, used) < m.limit:
                found[m.name] = max(share, used)
    return found
