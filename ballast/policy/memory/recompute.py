"""Keep all weights resident, and preempt requests by recomputation when KV runs short (vLLM).

The memory policy of preset `recompute`: the baseline of the papers. `mirage` shares its parts, and
`kvswap` extends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ballast.core.actions import Action, Decision, Promise
from ballast.core.view import DeviceView
from ballast.policy.base import PlacedModels
from ballast.policy.market.claim_and_offer import Claim, Source
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
from ballast.policy.memory.static import (
    Division,
    cover_limited,
    cover_within,
    keep_places,
    part_limited,
    placed,
    shares,
)
from ballast.policy.memory.temporal_sharing import ModelTurn, RoundRobinTurns

PATIENCE = 0.5
"""Part of its TTFT service level for which a request waits for room. After that, younger requests
are preempted for a model that an operator has evicted, and free pages are kept for the request."""


@dataclass(frozen=True, slots=True)
class PlacesMemo:
    """Which models have a place, and which has the turn: the memo of the policy."""

    division: Division
    turn: ModelTurn | None = None


@dataclass(frozen=True, slots=True)
class Recompute(PlacedModels):
    """Keep every model resident; where KV is short, preempt the youngest running request
    (recomputation).

    `temporal`: serve one model at a time, in turns of `quantum` seconds, `preemptive` or until its
    running requests have finished; else all models are served, job by job. `pooled`: the KV of all
    models comes from one pool; else each has its share, as with `static`. `by_price` (`pooled`
    only): take pages from the cheapest source first, not from caches before younger requests.
    """

    temporal: float = 0
    quantum: float = 1.0
    preemptive: float = 0
    pooled: float = 1
    by_price: float = 0
    fair_shares: float = 1

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        before = memo if isinstance(memo, PlacesMemo) else None
        turns = turns_of(self.temporal, self.quantum, self.preemptive)
        standing, actions = stand(view, before, pooled if self.pooled else shares, turns)
        whole, view = view, served(view, standing, turns)
        fair = bool(self.fair_shares and self.pooled and turns is None)
        sharing = share_out(view, fair=fair)
        view = sharing.view
        wake, promises, budget = None, tuple[Promise, ...](), None
        sparing = self.sparing()
        if self.pooled:
            absent, absent_at = activation_claims(view, PATIENCE)
            absent = [c for c in absent if c.model in standing.division.pages]
            short, short_at = kv_claims(view, waiting=True, patience=PATIENCE)
            sources = [cached_prefixes, loose_blocks, lent_pages, *sparing]
            sources += [sharing.younger, own_prefix]
            short, limited = part_limited(view, self.unmet(view, short))
            covered = cover(view, [*absent, *short], sources, by_price=bool(self.by_price))
            freeing, promises, budget = covered.actions, covered.promises, covered.budget
            freeing += cover_limited(view, limited, [*sparing, own_younger_requests])
            wake = earliest(absent_at, short_at)
        else:
            # Within a share, waiting requests keep no pages from running ones.
            short, _ = kv_claims(view, waiting=bool(sparing))
            short = self.unmet(view, short)
            running = [c for c in short if c.may_preempt]
            freeing = cover_within(view, running, [*sparing, own_younger_requests])
            if sparing and not freeing:
                waiting = [c for c in short if not c.may_preempt]
                freeing = cover_within(view, waiting, sparing)
        ended = hold(whole, standing, turns, promises, freed=self.freed(view, freeing))
        wake = earliest(wake, ended.up_at)
        actions += [*sharing.holds, *ended.holds, *freeing]
        if not view.shortages:
            actions += self.when_free(view, budget)
        return Decision(tuple(actions), ended.standing, wake, ended.promises, sharing.holding)

    def sparing(self) -> Sequence[Source]:
        """Return sources of pages that are taken before any request is preempted."""
        return ()

    def unmet(self, view: DeviceView, claims: list[Claim]) -> list[Claim]:
        """Return the claims without those whose model is about to free pages."""
        return claims

    def freed(self, view: DeviceView, actions: Sequence[Action]) -> bool:
        """Return whether pages have been freed, or are about to be."""
        return bool(actions)

    def when_free(self, view: DeviceView, budget: PageBudget | None) -> list[Action]:
        """Return what to do where no request lacks pages; `budget`: the pool's, None: each model
        has its share."""
        return []


def turns_of(temporal: float, quantum: float, preemptive: float) -> RoundRobinTurns | None:
    """Return the turns that a preset's options state, if any."""
    return RoundRobinTurns(quantum, bool(preemptive)) if temporal else None


def stand(
    view: DeviceView,
    before: PlacesMemo | None,
    divide: Callable[[DeviceView], dict[str, int]],
    turns: RoundRobinTurns | None,
) -> tuple[PlacesMemo, list[Action]]:
    """Return the places and the turn from now on, and the actions that keep the places."""
    division, actions = keep_places(view, before.division if before else None, divide)
    turn = before.turn if before else None
    return PlacesMemo(division, turns.current(view, turn) if turns else turn), actions


def served(view: DeviceView, standing: PlacesMemo, turns: RoundRobinTurns | None) -> DeviceView:
    """Return the view as it will be once the models without the turn are held."""
    return turns.served(view, standing.turn) if turns else view


@dataclass(frozen=True, slots=True)
class Held:
    """End of a decision: the turn from now on, and the holds that it requires."""

    standing: PlacesMemo
    holds: list[Action]
    promises: tuple[Promise, ...]
    up_at: float | None
    """When the turn's time is up, in seconds."""


def hold(
    view: DeviceView,
    standing: PlacesMemo,
    turns: RoundRobinTurns | None,
    promises: tuple[Promise, ...],
    *,
    freed: bool,
) -> Held:
    """End a decision that has `freed` pages or not: a turn in which nothing can run is passed on,
    and the promises to its requests are dropped.

    `view`: the device's own, not the one that `served` returns.
    """
    if turns is None:
        return Held(standing, [], promises, None)
    turn = standing.turn if freed else turns.yielded(view, standing.turn)
    if turn is not standing.turn:
        promises = ()
    holds, up_at = turns.holds(view, turn), turns.up_at(view, turn)
    return Held(replace(standing, turn=turn), holds, promises, up_at)


def pooled(view: DeviceView) -> dict[str, int]:
    """Return, for each model that has a place, the pages that all weights leave: the bound of its
    KV.

    So a request that the pool can never hold is refused when it arrives.
    """
    models, room = placed(view, pooled=True)
    return {m.name: room for m in models}
