"""Find memory by whatever harms least: cached prefixes, idle models, turns of models, preemption.

The memory policy of preset `ballast`. Gains of claims and prices of offers are the expected rise in
weighted misses of deadlines (`ballast.policy.market.harm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ballast.core.actions import Action, Decision, Reside
from ballast.core.view import DeviceView, ModelView, RequestView, Residency, Shortage
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.clearing import Cleared, clear
from ballast.policy.market.distortion import Distortion
from ballast.policy.market.fair_shares import share_out
from ballast.policy.market.offers import compactions, recalls, starving
from ballast.policy.market.outlook import FOREVER, Outlook
from ballast.policy.market.supply_curve import ListedOffers, OfferTable, SupplyCurve
from ballast.policy.market.work_ahead import hopeless, precedence
from ballast.policy.memory.balloon import undo_younger_work
from ballast.policy.plans import activation, is_activation, is_eviction, last_plans
from ballast.policy.supply.cached_blocks import CachedBlocks
from ballast.policy.supply.host_direct import WeightsInPlace, weights_home
from ballast.policy.supply.parked_models import ParkedModels
from ballast.policy.supply.preemption import RunningRequests
from ballast.policy.supply.streamed_layers import (
    layer_offers,
    layers_home,
    streamed_layers,
)
from ballast.policy.supply.weights import idle_weights

AGAIN = 0.1
"""Seconds after which claims that cost more than they gain are compared again."""


ABSENCE_WEIGHT = 0.2
"""Weight of the latest absence of a model in what is learned of them."""
STARVES_AFTER = 30.0
"""Seconds after which a model that got nothing is served whatever that costs others."""


@dataclass(frozen=True, slots=True)
class Absences:
    """How long models with requests have been absent, and what their returns displaced: learned, as
    both depend on how much there is to do."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Models that wait for others, or made way for them, and since when."""
    mean: float | None = None
    """Seconds of such absences that have ended; None: none has."""
    displacing: float = 0.0
    """Part of the returns for which other models with requests had to make way."""

    def updated(self, view: DeviceView) -> Absences:
        """Return these as of a view: those that have ended are counted."""
        since: dict[str, float] = {}
        mean = self.mean
        for m in view.models:
            at = self.since.get(m.name)
            if at is None:
                continue
            if m.residency is Residency.RESIDENT:
                seconds = view.now - at
                mean = seconds if mean is None else mean + ABSENCE_WEIGHT * (seconds - mean)
            elif m.waiting:
                since[m.name] = at
        return replace(self, since=since, mean=mean)

    def begun(self, view: DeviceView, cleared: Cleared) -> Absences:
        """Return these with those that a decision begins."""
        evicted = [a.model for a in cleared.actions if isinstance(a, Reside) and is_eviction(a)]
        parked = [name for name in evicted if not view.model(name).idle]
        waits = [claim.model for claim in cleared.uncovered if claim.weights]
        displacing = self.displacing
        for a in cleared.actions:
            if is_activation(view, a) and isinstance(a, Reside) and a.model in self.since:
                displacing += ABSENCE_WEIGHT * (bool(parked) - displacing)
        begun = dict.fromkeys([*parked, *waits], view.now)
        return replace(self, since=begun | dict(self.since), displacing=displacing)

    def turn(self, view: DeviceView) -> float | None:
        """Return the seconds that a model with requests is expected to be absent; None: nothing is
        known yet."""
        ages = [view.now - at for at in self.since.values()]
        age = sum(ages) / len(ages) if ages else 0.0
        return None if self.mean is None else min(FOREVER, max(self.mean, age))


@dataclass(frozen=True, slots=True)
class Arbiter(MemoryPolicy):
    """Cover each claim by what harms least, if that is less than it gains.

    Sources, each of which can be switched off (0): `reuse`, cached prefixes; `idle`, weights of
    idle models; `parking`, weights of models with requests; `streaming`, layers that passes then
    read through slots; `in_place`, weights that passes read in host memory instead of coming;
    `preempting`, running requests. `spilling` 0: KV that tiers below the device
    keep is priced as if it had to be computed again.

    Estimates, each with a factor by which it is wrong (1: as learned; 0: nothing is known):
    `arrivals`, when requests come; `lengths`, of outputs; `reused`, part of prompts that is cached;
    `freed`, when running requests free their pages.
    """

    reuse: float = 1
    idle: float = 1
    parking: float = 1
    preempting: float = 1
    streaming: float = 0
    spilling: float = 1
    in_place: float = 0
    arrivals: float = 1
    lengths: float = 1
    reused: float = 1
    freed: float = 1
    fair_shares: float = 1

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        view = Distortion(self.arrivals, self.lengths, self.reused).of(view)
        sharing = share_out(view, fair=bool(self.fair_shares))
        view = sharing.view
        absences = (memo if isinstance(memo, Absences) else Absences()).updated(view)
        ahead = Outlook(
            view,
            turn=absences.turn(view),
            displacing=absences.displacing,
            fetches=bool(self.spilling),
            freed=self.freed,
        )
        claims = list(_claims(ahead))
        if not claims:
            free = view.free - view.promised
            home = layers_home(view, layer_offers(view), free)
            if self.in_place and not home:
                home = weights_home(view, free)
            return Decision((*sharing.holds, *home), absences, None, (), sharing.holding)
        cleared = clear(view, claims, self._supply(ahead), ahead.reserve)
        actions = [*sharing.holds, *last_plans(cleared.actions)]
        if self.streaming:
            layers = layer_offers(view)
            actions = layers.choose(view, actions)
            if not any(isinstance(a, Reside) and a.plan.rotation.n_freed for a in actions):
                actions += layers_home(view, layers, cleared.free)
        wake = view.now + AGAIN if cleared.uncovered and _moving(view) else None
        absences = absences.begun(view, cleared)
        return Decision(tuple(actions), absences, wake, cleared.promises, sharing.holding)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Undo younger work at once, of any model."""
        return undo_younger_work(view)

    def _supply(self, ahead: Outlook) -> SupplyCurve:
        view = ahead.view
        tables: list[OfferTable] = [CachedBlocks(ahead)] if self.reuse else []
        listed = [ListedOffers(view.derived(compactions)), ListedOffers(view.derived(recalls))]
        if self.idle:
            listed.append(ListedOffers(idle_weights(ahead)))
        if self.in_place:
            tables.append(WeightsInPlace(ahead))
        if self.streaming:
            listed.append(ListedOffers(streamed_layers(ahead, layer_offers(view))))
        tables += (offers for offers in listed if offers)
        if self.parking:
            tables.append(ParkedModels(ahead))
        if self.preempting:
            tables.append(RunningRequests(ahead))
        return SupplyCurve(tables)


def _claims(ahead: Outlook) -> Iterator[Claim]:
    """Yield the claims of a view: of models to come, of requests that wait, of those that run."""
    view = ahead.view
    short = {(s.model, s.request_id): s for s in view.shortages if not s.limited}
    for m in view.models:
        if m.waiting and not m.held:
            first = m.waiting[0]
            lack = short.get((m.name, first.id))
            if m.residency is Residency.ABSENT:
                yield _activation(ahead, m)
            elif lack is not None:
                yield _admission(ahead, m, lack)
            elif not m.running and m.residency in (Residency.RESIDENT, Residency.ACTIVATING):
                pages = max(0, m.first_pages - view.borrowable(m))
                gain = _gain(ahead, m, pages)
                yield Claim(m.name, first.order, pages, may_preempt=False, gain=gain)
    for s in view.shortages:
        if not s.limited:
            m = view.model(s.model)
            r = m.derived(_running).get(s.request_id)
            if r is not None:
                yield _growth(ahead, m, r, s)


def _running(m: ModelView) -> Mapping[str, RequestView]:
    """Return the running requests by their ids."""
    return {r.id: r for r in m.running}


def _growth(ahead: Outlook, m: ModelView, r: RequestView, lack: Shortage) -> Claim:
    """Return the claim of a running request that cannot go on; a hopeless one undoes no work of
    others that are not."""
    order = r.order if ahead.is_first(r) else precedence(ahead.now, m, r)
    return Claim(m.name, r.order, lack.pages, may_preempt=True, blocks=lack.blocks, undoing=order)


def _activation(ahead: Outlook, m: ModelView) -> Claim:
    """Return the claim of an absent model: its missing weights, and KV of its first request."""
    view, first = ahead.view, m.waiting[0]
    kv = max(0, m.first_pages - view.borrowable(m))
    if first.generated:  # its KV is cached
        kv = max(0, kv - m.cached_pages)
    pages = m.missing_pages + kv
    return Claim(
        m.name,
        first.order,
        pages,
        may_preempt=_starves(view, m),
        weights=True,
        first_pages=kv,
        segments=m.shared,
        then=partial(_activate, view, m),
        gain=_gain_of_coming(ahead, m),
        overdue=_starves(view, m),
    )


def _activate(view: DeviceView, m: ModelView, _: int) -> Sequence[Action]:
    return (activation(view, m, "requests wait for it"),)


def _admission(ahead: Outlook, m: ModelView, lack: Shortage) -> Claim:
    """Return the claim of a resident model's first waiting request; it takes the pages of hopeless
    requests alone."""
    first, starves = m.waiting[0], _starves(ahead.view, m)
    return Claim(
        m.name,
        first.order,
        lack.pages,
        may_preempt=starves or not hopeless(ahead.now, m, first),
        blocks=lack.blocks,
        admission=True,
        undoing=None if starves else first.order._replace(arrival=math.inf, sequence=-1),
        gain=_gain(ahead, m, lack.pages),
        overdue=first.place < 0 or starves,
    )


def _gain(ahead: Outlook, m: ModelView, pages: int) -> float:
    """Return the harm of a model's first waiting request until `pages` have become free by
    themselves, and those that all others wait for."""
    view = ahead.view
    if _starves(view, m):
        return math.inf
    return ahead.rise_of_first(m, ahead.coming.wait(pages + ahead.backlog - view.coming))


def _gain_of_coming(ahead: Outlook, m: ModelView) -> float:
    """Return the harm of a model's absence for a turn more, less that of bringing it now."""
    if _starves(ahead.view, m):
        return math.inf
    copy = ahead.copy_seconds(m.missing_pages)
    turn = ahead.turn + copy
    return ahead.rise_of_waiting(m, turn, copy) + ahead.arrivals_harm(m, turn)


def _moving(view: DeviceView) -> bool:
    """Whether jobs or copies are in flight: where nothing is, the device is stuck."""
    return any(m.busy or m.residency is Residency.ACTIVATING for m in view.models)


def _starves(view: DeviceView, m: ModelView) -> bool:
    """Whether a model has got nothing for `STARVES_AFTER`: of such models the one that has waited
    longest must be served."""
    starved = [o.waiting[0].order for o in view.models if _got_nothing(view, o)]
    return _got_nothing(view, m) and m.waiting[0].order == min(starved)


def _got_nothing(view: DeviceView, m: ModelView) -> bool:
    return starving(view, m) and view.now >= m.waiting[0].last + STARVES_AFTER
