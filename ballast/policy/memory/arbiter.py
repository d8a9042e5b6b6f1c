"""Find memory by whatever harms least: cached prefixes, idle models, turns of models, preemption.

The memory policy of preset `ballast`. Gains of claims and prices of offers are the expected rise in
weighted misses of deadlines (`ballast.policy.market.harm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ballast.core.actions import Action, Decision, Reside
from ballast.core.cost import copy_seconds
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, Residency, Shortage
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.clearing import clear
from ballast.policy.market.distortion import Distortion
from ballast.policy.market.fair_shares import share_out
from ballast.policy.market.offers import compactions, recalls, starving
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.supply_curve import ListedOffers, OfferTable, SupplyCurve
from ballast.policy.memory.balloon import undo_younger_work
from ballast.policy.plans import activation, last_plans
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


STARVES_AFTER = 30.0
"""Seconds after which a model that got nothing is served whatever that costs others."""


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
        ahead = Outlook(view, fetches=bool(self.spilling), freed=self.freed)
        claims = list(_claims(ahead))
        if not claims:
            free = view.free - view.promised
            home = layers_home(view, layer_offers(view), free)
            if self.in_place and not home:
                home = weights_home(view, free)
            return Decision((*sharing.holds, *home), None, None, (), sharing.holding)
        cleared = clear(view, claims, self._supply(ahead))
        actions = [*sharing.holds, *last_plans(cleared.actions)]
        if self.streaming:
            layers = layer_offers(view)
            actions = layers.choose(view, actions)
            if not any(isinstance(a, Reside) and a.plan.rotation.n_freed for a in actions):
                actions += layers_home(view, layers, cleared.free)
        wake = view.now + AGAIN if cleared.uncovered and _moving(view) else None
        return Decision(tuple(actions), None, wake, cleared.promises, sharing.holding)

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
                gain = _gain(ahead, m, pages, 0.0)
                yield Claim(m.name, first.order, pages, may_preempt=False, gain=gain)
    for s in view.shortages:
        if not s.limited:
            order = view.model(s.model).derived(_running_orders).get(s.request_id)
            if order is not None:  # a running request that cannot go on
                yield Claim(s.model, order, s.pages, may_preempt=True, blocks=s.blocks)


def _running_orders(m: ModelView) -> Mapping[str, Precedence]:
    """Return the precedence of each running request by its id."""
    return {r.id: r.order for r in m.running}


def _activation(ahead: Outlook, m: ModelView) -> Claim:
    """Return the claim of an absent model: its missing weights, and KV of its first request."""
    view, first = ahead.view, m.waiting[0]
    kv = max(0, m.first_pages - view.borrowable(m))
    if first.generated:  # its KV is cached
        kv = max(0, kv - m.cached_pages)
    pages = m.missing_pages + kv
    rent = ahead.rent(m, m.missing_pages)
    copy = copy_seconds(m.missing_pages * view.page_bytes, view.weights_bytes_per_second)
    return Claim(
        m.name,
        first.order,
        pages,
        may_preempt=_starves(view, m),
        weights=True,
        first_pages=kv,
        segments=m.shared,
        then=partial(_activate, view, m),
        gain=_gain(ahead, m, pages, copy) - rent,
        overdue=_starves(view, m),
    )


def _activate(view: DeviceView, m: ModelView, _: int) -> Sequence[Action]:
    return (activation(view, m, "requests wait for it"),)


def _admission(ahead: Outlook, m: ModelView, lack: Shortage) -> Claim:
    """Return the claim of a resident model's first waiting request."""
    first = m.waiting[0]
    return Claim(
        m.name,
        first.order,
        lack.pages,
        may_preempt=_starves(ahead.view, m),
        blocks=lack.blocks,
        admission=True,
        gain=_gain(ahead, m, lack.pages, 0.0),
        overdue=first.place < 0 or _starves(ahead.view, m),
    )


def _gain(ahead: Outlook, m: ModelView, pages: int, copy: float) -> float:
    """Return the harm of a model's waiting requests until `pages` have become free by themselves,
    less that of covering the claim now, `copy` seconds before they can run."""
    view = ahead.view
    if _starves(view, m):
        return math.inf
    wait = ahead.coming.wait(pages + ahead.backlog - view.coming)
    return ahead.rise_of_waiting(m, wait, copy)


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
