"""Find memory by whatever harms least: cached prefixes, idle models, turns of models, preemption.

The memory policy of preset `ballast`. Gains of claims and prices of offers are the expected rise in
weighted misses of deadlines (`ballast.policy.market.harm`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ballast.core.actions import Action, Decision, Reside
from ballast.core.price_curve import PriceCurve
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, Residency, Shortage
from ballast.policy.admission.late_last import IN_TIME
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.clearing import clear
from ballast.policy.market.host_weights import weights_home
from ballast.policy.market.offers import evictable
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.published_prices import made_free, price_curve
from ballast.policy.market.staged_blocks import bring_home
from ballast.policy.market.starvation import (
    last_served,
    owes_first_token,
    serves_owed,
    starving,
)
from ballast.policy.market.supply_curve import ListedOffers, OfferTable, SupplyCurve
from ballast.policy.market.work_ahead import precedence, work_of
from ballast.policy.memory.absences import Absences
from ballast.policy.memory.balloon import undo_younger_work
from ballast.policy.memory.defaults import LendAnswer
from ballast.policy.plans import activation, last_plans
from ballast.policy.requirements import Requirements
from ballast.policy.supply.cached_blocks import CachedBlocks
from ballast.policy.supply.host_direct import WeightsInPlace, priced_to_host
from ballast.policy.supply.moved_pages import lent_pages, scattered_blocks
from ballast.policy.supply.parked_models import ParkedModels
from ballast.policy.supply.preemption import RunningRequests
from ballast.policy.supply.prewarming import choose_prewarm
from ballast.policy.supply.staged_kv import staged_kv
from ballast.policy.supply.streamed_layers import (
    layer_offers,
    layers_home,
    streamed_layers,
)
from ballast.policy.supply.weights import idle_weights

AGAIN = 0.1
"""Seconds after which claims that cost more than they gain are compared again."""
STARVES_AFTER = 30.0
"""Seconds without a token after which a model is served whatever that costs others, though none of
its requests waits for its first one."""


@dataclass(frozen=True, slots=True)
class Arbiter(MemoryPolicy):
    """Cover each claim by what harms least, if that is less than it gains.

    Sources, each of which can be switched off (0): `reuse`, cached prefixes; `idle`, weights of
    idle models; `parking`, weights of models with requests; `streaming`, layers that passes then
    read through slots; `in_place`, weights that passes read in host memory instead of coming;
    `staging`, KV blocks that steps then read on the host; `preempting`, running requests;
    `resting`, those that are ahead of their pace, for first tokens of others.
    `prewarming` 0: models that made way come back only when they are requested. `spilling` 0: KV
    that tiers below the device keep is priced as if it had to be computed again.

    `survival` 0: cached prefixes of a model are all as likely to be used again, however old.

    `freed`: factor by which the forecast of when running requests free their pages is wrong, for
    ablations (0: nothing is known).
    """

    reuse: float = 1
    idle: float = 1
    parking: float = 1
    preempting: float = 1
    streaming: float = 0
    spilling: float = 1
    in_place: float = 0
    staging: float = 0
    resting: float = 1
    prewarming: float = 1
    survival: float = 1
    freed: float = 1

    @property
    def requires(self) -> Requirements:
        return Requirements(kv_staging=bool(self.staging))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        absences = (memo if isinstance(memo, Absences) else Absences()).updated(view)
        ahead = self._outlook(view, absences)
        claims = list(_claims(ahead, resting=bool(self.resting)))
        if not claims:
            free = view.free - view.promised
            home = layers_home(view, layer_offers(view), free)
            if self.in_place and not home:
                home = weights_home(view, free)
            if self.staging and not home:
                home = bring_home(view, max(0, free - ahead.reserve))
            wake = None
            if self.prewarming and absences.gone and not home:
                home, wake = choose_prewarm(ahead, free, absences.gone)
            return Decision(tuple(home), absences, wake)
        reserve = ahead.reserve if claims[0].weights else 0  # those of weights come first
        cleared = clear(view, claims, self._supply(ahead), reserve)
        actions = last_plans(cleared.actions)
        if self.streaming:
            layers = layer_offers(view)
            actions = layers.choose(view, actions)
            if not any(isinstance(a, Reside) and a.plan.rotation.n_freed for a in actions):
                actions += layers_home(view, layers, cleared.free)
        wake = view.now + AGAIN if cleared.uncovered and _moving(view) else None
        absences = absences.begun(view, cleared)
        return Decision(tuple(actions), absences, wake, cleared.promises)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Undo younger work at once, of any model."""
        return undo_younger_work(view)

    def prices(self, view: DeviceView, memo: object) -> PriceCurve:
        ahead = self._outlook(view, memo if isinstance(memo, Absences) else Absences())
        undoing = RunningRequests(ahead).least if view.shortages else 0.0
        return price_curve(ahead, self._spare(ahead), undoing)

    def lend(self, view: DeviceView, to: str, pages: int) -> LendAnswer:
        """Free what harms least, without undoing work."""
        spare = self._spare(self._outlook(view, Absences()))
        return LendAnswer(made_free(view, spare, to, pages))

    def _outlook(self, view: DeviceView, absences: Absences) -> Outlook:
        return Outlook(
            view,
            turn=absences.turn(view),
            parked=absences.mean,
            displacing=absences.displacing,
            fetches=bool(self.spilling),
            freed=self.freed,
            survival=bool(self.survival),
            staying=_staying(view, absences),
        )

    def _spare(self, ahead: Outlook) -> SupplyCurve:
        """Return what can be lent to other devices: pages that undo no work."""
        tables: list[OfferTable] = [CachedBlocks(ahead)] if self.reuse else []
        tables.append(ListedOffers(scattered_blocks(ahead)))
        if self.idle:
            tables.append(ListedOffers(idle_weights(ahead)))
        return SupplyCurve(tables)

    def _supply(self, ahead: Outlook) -> SupplyCurve:
        view = ahead.view
        tables: list[OfferTable] = [CachedBlocks(ahead)] if self.reuse else []
        listed = [ListedOffers(scattered_blocks(ahead)), ListedOffers(lent_pages(ahead))]
        if self.idle:
            listed.append(ListedOffers(idle_weights(ahead)))
        if self.in_place:
            tables.append(WeightsInPlace(ahead))
            listed.append(ListedOffers(priced_to_host(ahead)))
        if self.staging:
            listed.append(ListedOffers(staged_kv(ahead)))
        if self.streaming:
            listed.append(ListedOffers(streamed_layers(ahead, layer_offers(view))))
        tables += (offers for offers in listed if offers)
        if self.parking:
            tables.append(ParkedModels(ahead))
        return SupplyCurve(tables, RunningRequests(ahead) if self.preempting else None)


def _claims(ahead: Outlook, *, resting: bool) -> Iterator[Claim]:
    """Yield the claims of a view: of models to come, of requests that wait, of those that run."""
    view = ahead.view
    waiting = [m for m in view.models if m.waiting and not m.held]
    absent = [m for m in waiting if m.residency is Residency.ABSENT]
    if absent:
        for m, gain in zip(absent, _gains_of_coming(ahead, absent), strict=True):
            yield _owed(view, m, _activation(ahead, m, gain))
    if len(absent) < len(waiting):
        short = {(s.model, s.request_id): s for s in view.shortages if not s.limited}
        for m in waiting:
            if m.residency is Residency.ABSENT:
                continue
            first = m.waiting[0]
            lack = short.get((m.name, first.id))
            if lack is not None:
                yield _owed(view, m, _admission(ahead, m, lack, resting))
            elif not m.running and m.residency in (Residency.RESIDENT, Residency.ACTIVATING):
                pages = view.first_lacks(m)
                gain = _gain(ahead, m, pages)
                claim = Claim(m.name, first.order, pages, may_preempt=False, gain=gain)
                yield _owed(view, m, claim)
    yield from _growths(ahead)


def _growths(ahead: Outlook) -> Iterator[Claim]:
    """Yield the claims of running requests that cannot go on; a hopeless one undoes no work of
    others that are not."""
    now, by_name = ahead.now, ahead.view.by_name
    for s in ahead.view.shortages:
        if not s.limited and (found := by_name[s.model].derived(_running).get(s.request_id)):
            order, lost = found
            last = precedence(order, order != ahead.first) if lost < now else order
            yield Claim(s.model, order, s.pages, True, s.blocks, undoing=last)


def _owed(view: DeviceView, m: ModelView, claim: Claim) -> Claim:
    """Return the claim of a model that starves as one for memory that no request uses, at any
    price, where that suffices: its weights and the KV of one request are each model's floor."""
    if claim.gain == math.inf or not starving(view, m):
        return claim
    if claim.pages > view.coming + view.borrowed + view.derived(_unused_pages):
        return claim
    return claim._replace(gain=math.inf, unused_only=True)


def _unused_pages(view: DeviceView) -> int:
    """Return the pages of cached prefixes and of idle models."""
    idle = (m.present_pages for m in view.models if m.idle and evictable(m))
    return sum(m.cached_pages for m in view.models) + sum(idle)


def _running(m: ModelView) -> Mapping[str, tuple[Precedence, float]]:
    """Return the precedence of each running request by its id, and when it is hopeless."""
    work = m.derived(work_of)
    lost = work.lost[work.waiting :].tolist()
    return {r.id: (r.order, at) for r, at in zip(m.running, lost, strict=True)}


def _activation(ahead: Outlook, m: ModelView, gain: float) -> Claim:
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
        gain=math.inf if _starves(view, m) else gain,
        overdue=_starves(view, m),
    )


def _activate(view: DeviceView, m: ModelView, _: int) -> Sequence[Action]:
    return (activation(view, m, "requests wait for it"),)


def _admission(ahead: Outlook, m: ModelView, lack: Shortage, resting: bool) -> Claim:
    """Return the claim of a resident model's first waiting request, which keeps what becomes free
    unless admission has left it out.

    It takes the pages of hopeless requests, and for a first token of those ahead of their pace.
    """
    first, starves = m.waiting[0], _starves(ahead.view, m)
    return Claim(
        m.name,
        first.order,
        lack.pages,
        may_preempt=starves or not m.derived(work_of).lost[0] < ahead.now,
        blocks=lack.blocks,
        admission=True,
        undoing=None if starves else first.order._replace(arrival=math.inf, sequence=-1),
        resting=resting and first.first is None,
        gain=_gain(ahead, m, lack.pages),
        overdue=starves or first.place <= IN_TIME,
    )


def _gain(ahead: Outlook, m: ModelView, pages: int) -> float:
    """Return the harm of a model's first waiting request until `pages` have become free by
    themselves, and those that all others wait for."""
    view = ahead.view
    if _starves(view, m):
        return math.inf
    return ahead.rise_of_first(m, ahead.coming.wait(pages + ahead.backlog - view.coming))


def _gains_of_coming(ahead: Outlook, models: Sequence[ModelView]) -> Sequence[float]:
    """Return, for each of some absent models, the harm of its absence for a turn more, less that of
    bringing it now."""
    copies = np.array([ahead.copy_seconds(m.missing_pages) for m in models])
    return ahead.harms_of_a_turn(models, ahead.turn, copies, copies)


def _moving(view: DeviceView) -> bool:
    """Whether jobs or copies are in flight: where nothing is, the device is stuck."""
    return any(m.busy or m.residency is Residency.ACTIVATING for m in view.models)


def _starves(view: DeviceView, m: ModelView) -> bool:
    """Whether a model owes a first token, or has got nothing for `STARVES_AFTER`: of such models
    the one that has waited longest must be served."""
    return view.derived(_longest_starved) == m.name


def _staying(view: DeviceView, absences: Absences) -> Collection[str]:
    """Return the models that do not make way yet: those that have just come back, and those that
    serve, or have to serve, a request that has waited for long."""
    serving = (m.name for m in view.models if m.running and serves_owed(view, m))
    starved = view.derived(_longest_starved)
    return {*absences.until, *serving, *(() if starved is None else (starved,))}


def _longest_starved(view: DeviceView) -> str | None:
    """Return the model that has got nothing for longest, of those that must be served."""
    found = [(m.derived(last_served), m.name) for m in view.models if _must_be_served(view, m)]
    return min(found)[1] if found else None


def _must_be_served(view: DeviceView, m: ModelView) -> bool:
    starves = view.now >= m.derived(last_served) + STARVES_AFTER
    return starves or owes_first_token(view, m)
