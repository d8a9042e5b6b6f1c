"""Swap KV to the host layer by layer instead of preempting requests, as Pie does.

The memory policy of preset `kvswap`: a baseline that MIRAGE is compared with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ballast.core.actions import Action, Decision, DropCache, Promise, Reside
from ballast.core.cost import copy_seconds
from ballast.core.job import JobLoad
from ballast.core.kv_swap import SLOTS, spread, swapped_seconds
from ballast.core.link import LinkRates
from ballast.core.request import Precedence
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.base import PlacedModels
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.market.claims import activation_claims, earliest, kv_claims
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
from ballast.policy.memory.layer_reversion import give_back
from ballast.policy.memory.recompute import (
    PATIENCE,
    Standing,
    hold,
    pooled,
    served,
    stand,
    turns_of,
)
from ballast.policy.memory.static import cover_limited, cover_within, part_limited, placed, shares
from ballast.policy.requirements import Requirements

LEAST_KEPT = 4
"""One layer of this many, at least, keeps KV pages of its own."""
SWAPPED = 1.0
"""Seconds for which KV is expected to stay on the host; an assumption."""


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Layers whose KV rotates, and the seconds of a decode step with them."""

    rotation: Rotation
    seconds: float
    hidden: bool
    """Whether a step is at most `slack` longer than without."""


class SwapTerms(NamedTuple):
    """Parameters, beside the model, that offers of its layers depend on."""

    policy: KvSwap
    link_bytes_per_second: float
    page_bytes: int


class Swappable:
    """A model that can rotate the KV of more layers, with its offers computed so far."""

    __slots__ = ("known", "m", "most", "now")

    def __init__(self, m: ModelView, known: dict[int, Offer | None]) -> None:
        """`known`: offers by the number of layers that would have given up their pages."""
        assert m.kv_rotation is not None, "its KV can rotate"
        self.m, self.known, self.now = m, known, m.kv_rotation.n_freed
        self.most = m.spec.n_layers - ceil_div(m.spec.n_layers, LEAST_KEPT)

    def layers_for(self, pages: int) -> int:
        """Return the number of layers that have given up their KV pages once `pages` more are
        freed."""
        return min(self.most, self.now + max(1, ceil_div(pages, self.m.kv_layer_pages)))


@dataclass(frozen=True, slots=True)
class KvSwap(PlacedModels):
    """`Recompute`, except that KV of some layers is swapped to the host and back in each step
    before any request is preempted.

    Layers are added as long as a decode step hides their copies, but for `slack` of its time (`cap`
    0: as long as there are any), each time enough for `ahead` times the present KV. They get pages
    of their own again when `reserve` of the KV pages stay free, or, in place of younger requests,
    once steps are longer by more than `tolerance` of their time: with `slack` for both, requests
    would be preempted and admitted again without end. `dirty`: store only what a step has written
    of a layer; else all that it has loaded. `mixed`: bandwidth of the link each way while it
    carries both ways, as part of that to the device alone. `by_price`: as of `Recompute`.
    """

    temporal: float = 0
    quantum: float = 1.0
    preemptive: float = 0
    pooled: float = 1
    dirty: float = 0
    cap: float = 1
    slack: float = 0.02
    tolerance: float = 0.5
    ahead: float = 0.1
    reserve: float = 0.1
    mixed: float = 0.43
    by_price: float = 0
    fair_shares: float = 1

    @property
    def requires(self) -> Requirements:
        return Requirements(kv_swapping=True, dirty=bool(self.dirty))

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        before = memo if isinstance(memo, Standing) else None
        turns = turns_of(self.temporal, self.quantum, self.preemptive)
        standing, actions = stand(view, before, pooled if self.pooled else shares, turns)
        whole, view = view, served(view, standing, turns)
        fair = bool(self.fair_shares and self.pooled and turns is None)
        sharing = share_out(view, fair=fair)
        view = sharing.view
        swapping = {m.name for m in view.models if m.kv_swapping}
        found, short_at = kv_claims(view, waiting=True, patience=PATIENCE)
        claims = [c for c in found if c.model not in swapping]
        layers = self.layers(view)
        wake, promises = None, tuple[Promise, ...]()
        if self.pooled:
            to_come, absent_at = activation_claims(view, PATIENCE)
            absent = [c for c in to_come if c.then and c.model in standing.division.pages]
            wake = earliest(absent_at, short_at)
            sources: list[Source] = [
                cached_prefixes,
                loose_blocks,
                lent_pages,
                layers,
                sharing.younger,
                own_prefix,
            ]
            claims, limited = part_limited(view, claims)
            slowed = [c for m in view.models if (c := self._claim_of_slowed(view, m)) is not None]
            wanted = [*absent, *slowed, *claims]
            covered = cover(view, wanted, sources, by_price=bool(self.by_price))
            freeing, promises, left = covered.actions, covered.promises, covered.budget
            freeing += cover_limited(view, limited, [layers, own_younger_requests])
        else:
            # Within a share, waiting requests keep no pages from running ones.
            running = [c for c in claims if c.may_preempt]
            waiting = [c for c in claims if not c.may_preempt]
            freeing = cover_within(view, running, [layers, own_younger_requests])
            freeing = freeing or cover_within(view, waiting, [layers])
            left = PageBudget(view)
        ended = hold(whole, standing, turns, promises, freed=bool(freeing or swapping))
        actions += [*sharing.holds, *ended.holds, *freeing]
        if not view.shortages:
            actions += self._give_back(view, left)
        wake = earliest(wake, ended.up_at)
        return Decision(tuple(actions), ended.standing, wake, ended.promises, sharing.holding)

    def layers(self, view: DeviceView) -> Source:
        """Return the source of KV pages that are freed if more layers rotate: for each claim its
        own model's first, then the others' by name."""
        terms = SwapTerms(self, view.link_bytes_per_second, view.page_bytes)
        swappable = [
            Swappable(m, m.derived(_offers_by_terms).setdefault(terms, {}))
            for m in sorted(view.models, key=lambda m: m.name)
            if m.residency is Residency.RESIDENT
            and not m.kv_swapping
            and m.kv_layer_pages
            and m.kv_rotation is not None
        ]
        own = {s.m.name: s for s in swappable}

        def offers(view: DeviceView, claim: Claim) -> Iterator[Offer]:
            first = own.get(claim.model)
            others = (s for s in swappable if s is not first)
            for s in others if first is None else chain((first,), others):
                freed = s.layers_for(max(claim.pages, round(self.ahead * s.m.kv_pages)))
                if freed not in s.known:
                    s.known[freed] = self._offer(view, s.m, freed)
                offer = s.known[freed]
                if offer is not None:
                    yield offer

        return offers

    def _offer(self, view: DeviceView, m: ModelView, freed: int) -> Offer | None:
        """Offer the pages freed if `freed` layers give up theirs, or as many as can; None: no more
        can."""
        plan = self._more(view, m, freed)
        if plan is None:
            return None
        assert m.kv_rotation is not None, "its KV can rotate"
        pages = (plan.rotation.n_freed - m.kv_rotation.n_freed) * m.kv_layer_pages
        moving = copy_seconds(pages * view.page_bytes, view.link_bytes_per_second)
        price = partial(_slowing, m, plan, moving)
        act = partial(_swap, m, plan.rotation)
        return Offer(("kv layers", m.name), m.name, pages, price, act)

    def plan(self, view: DeviceView, m: ModelView, freed: int, least: int) -> SwapPlan | None:
        """Return the plan with the shortest step in which `freed` layers give up their pages and at
        least `least` layers rotate; None: there is none.

        Steps are estimated with as much KV as there would be room for.
        """
        n = m.spec.n_layers
        assert m.kv_rotation is not None, "its KV can rotate"
        more = _tokens(m) * (freed - m.kv_rotation.n_freed) // (n - freed)
        alone = step_seconds(m) + more * m.costs.per_context
        found: SwapPlan | None = None
        for slots in SLOTS:
            if not least <= freed + slots <= n:
                continue
            rotation = Rotation(spread(n, freed + slots), slots)
            seconds = self._step(view, m, rotation, alone, more)
            if found is None or seconds < found.seconds:
                found = SwapPlan(rotation, seconds, seconds <= alone * (1 + self.slack))
        return found

    def _step(
        self, view: DeviceView, m: ModelView, rotation: Rotation, alone: float, more: int
    ) -> float:
        """Return the seconds of a decode step with `more` tokens of KV than now; `alone`: its
        seconds if it waits for no copy."""
        n = m.spec.n_layers
        rate = view.link_bytes_per_second
        rates = LinkRates.even(rate, 2 * self.mixed * rate)
        loaded = (_tokens(m) + more) * m.spec.kv_bytes_per_token // n
        new = len(m.running) * m.spec.kv_bytes_per_token // n
        stored = new if self.dirty else loaded + new
        return swapped_seconds(n, rotation, alone, loaded, stored, rates)

    def _more(self, view: DeviceView, m: ModelView, wanted: int) -> SwapPlan | None:
        """Return the plan by which `wanted` layers give up their pages, or as many as can; None: no
        more than now can."""
        now = m.kv_rotation
        assert now is not None, "its KV can rotate"
        counts = range(now.n_freed + 1, wanted + 1)

        def over(freed: int) -> bool:
            plan = self.plan(view, m, freed, len(now.layers) + 1)
            return plan is None or (bool(self.cap) and not plan.hidden)

        # Find the most layers that are not over; nearly always all that are wanted.
        if counts and not over(wanted):
            freed = wanted
        else:
            freed = now.n_freed + bisect_left(counts, True, key=over)
        return self.plan(view, m, freed, len(now.layers) + 1) if freed > now.n_freed else None

    def _give_back(self, view: DeviceView, budget: PageBudget) -> list[Action]:
        """Let layers have KV pages of their own again as far as a reserve stays free, from free
        pages or, where KV comes from one pool, from other models' cached prefixes."""
        claims = [c for m in view.models if (c := self._claim_back(view, m)) is not None]
        if not claims:
            return []
        own = {claim.model for claim in claims}
        spare = budget.free - round(self.reserve * placed(view, pooled=bool(self.pooled))[1])
        sources = list[Source]()
        if self.pooled:
            spare += sum(m.cached_pages for m in view.models if m.name not in own)
            sources.append(partial(_cached_by_others, own))
        return give_back(view, budget, claims, spare, sources)

    def _claim_of_slowed(self, view: DeviceView, m: ModelView) -> Claim | None:
        """Return the claim for pages of enough layers to bring a model's steps back within `slack`,
        if they are beyond `tolerance`, as its KV has grown since its layers began to rotate.

        Its precedence is that of the running requests, as all their steps are longer: it comes
        before requests admitted later.
        """
        now = m.kv_rotation
        if not self.cap or now is None or now == WHOLE or m.kv_swapping:
            return None
        if (
            m.residency is not Residency.RESIDENT
            or not m.running
            or self._within_tolerance(view, m)
        ):
            return None

        def within(n: int) -> bool:
            plan = self.plan(view, m, now.n_freed - n, 0)
            return n == now.n_freed or (plan is not None and plan.hidden)

        most = bisect_left(range(now.n_freed), True, lo=1, key=within)
        return self._claim_for(view, m, m.running[0].order, most, 1, may_preempt=True)

    def _claim_back(self, view: DeviceView, m: ModelView) -> Claim | None:
        """Return a model's claim for the pages of at least half of its rotating layers, if it may
        claim any."""
        now = m.kv_rotation
        if now is None or now == WHOLE or m.kv_swapping:
            return None
        if m.residency is not Residency.RESIDENT or m.waiting:
            return None
        order = Precedence(0, view.now, 0)
        return self._claim_for(
            view, m, order, now.n_freed, ceil_div(now.n_freed, 2), may_preempt=False
        )

    def _claim_for(
        self,
        view: DeviceView,
        m: ModelView,
        order: Precedence,
        most: int,
        least: int,
        *,
        may_preempt: bool,
    ) -> Claim | None:
        """Return the claim for the pages of `least` to `most` rotating layers, within the model's
        own limit.

        Cached prefixes are dropped first, as they cost more than they save while layers rotate. The
        claim is for pages beyond those; negative if more was cached.
        """
        used = m.kv_pages - m.cached_pages
        layer = ceil_div(m.kv_layer_pages * used, m.kv_pages) if used else 0
        if m.limit is not None and layer:
            room = m.limit - used - round(self.reserve * m.limit)
            most = min(most, max(0, room) // layer)
        if most < least:
            return None
        return Claim(
            m.name,
            order,
            most * layer - m.cached_pages,
            may_preempt=may_preempt,
            grain=1,
            least=least * layer - m.cached_pages,
            then=partial(self._home, view, m, layer, most),
        )

    def _within_tolerance(self, view: DeviceView, m: ModelView) -> bool:
        """Whether a model's steps are within `tolerance` although layers rotate."""
        assert m.kv_rotation is not None, "its KV can rotate"
        alone = step_seconds(m)
        return self._step(view, m, m.kv_rotation, alone, 0) <= alone * (1 + self.tolerance)

    def _home(
        self, view: DeviceView, m: ModelView, layer: int, most: int, pages: int
    ) -> Sequence[Action]:
        """Let at most `most` layers, of `layer` pages each, stop rotating, as far as `pages` and
        the pages of cached prefixes suffice."""
        now = m.kv_rotation
        assert now is not None, "its KV rotates"
        n = min(most, (pages + m.cached_pages) // layer) if layer else most
        rotation = WHOLE
        if n < now.n_freed:
            plan = self.plan(view, m, now.n_freed - n, 0)
            if plan is None or len(plan.rotation.layers) >= len(now.layers):
                return ()
            rotation = plan.rotation
        why = "there is room for its KV again"
        change = Reside(m.name, replace(m.plan, kv=rotation), why)
        return (DropCache(m.name, m.cached_pages, why), change) if m.cached_pages else (change,)


def _cached_by_others(own: Collection[str], view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer cached prefixes, except those of models in `own`, which are counted already."""
    return (offer for offer in cached_prefixes(view, claim) if offer.owner not in own)


def _swap(m: ModelView, rotation: Rotation, _: int, claim: Claim) -> Reside:
    return Reside(m.name, replace(m.plan, kv=rotation), why=f"{claim.model} needs pages")


def _slowing(m: ModelView, plan: SwapPlan, moving: float) -> float:
    """Return the request-seconds that a model's running requests wait: while KV is moved to the
    host (`moving` seconds), and in the longer steps of `plan` until it returns."""
    longer = max(0.0, plan.seconds - step_seconds(m))
    return (moving + longer * max(1.0, SWAPPED / plan.seconds)) * len(m.running)


def _offers_by_terms(m: ModelView) -> dict[SwapTerms, dict[int, Offer | None]]:
    """Return a cache of a model's offers, kept with its view, and so until the model changes."""
    return {}


def _tokens(m: ModelView) -> int:
    """Return the tokens of KV of running requests."""
    return sum(r.computed for r in m.running)


def step_seconds(m: ModelView) -> float:
    """Return the seconds of a decode step of the running requests without waits, measured or
    estimated."""
    if m.decode_seconds is not None:
        return m.decode_seconds
    context = sum(r.computed for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, len(m.running), context))
