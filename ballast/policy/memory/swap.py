"""Give the whole device to one model at a time, in turns (QLM, llama-swap; Prism section 3.3).

The memory policy of preset `swap`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ballast.core.actions import Action, Decision, Hold, Reside
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.claims import earliest, shortage_claims
from ballast.policy.market.cover import cover, gather
from ballast.policy.market.offers import (
    cached_prefixes,
    idle_models,
    lent_pages,
    oldest,
    younger_models,
    younger_requests,
)
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.starvation import next_owed, owes_first_token
from ballast.policy.memory.temporal_sharing import ModelTurn, TurnPhase, phase
from ballast.policy.plans import activation, evicted_pages, eviction, is_eviction


@dataclass(frozen=True, slots=True)
class WholeModels(MemoryPolicy):
    """Give the device to the model with the oldest request, one model at a time.

    The present model keeps the device while it has requests; once requests of others have waited
    and its weights have been there for `quantum` seconds, it admits no more, finishes its running
    ones, and is evicted. `preemptive`, or while another model owes a first token
    (`starvation.owes_first_token`): it is evicted at once, between two tokens, but for its
    embeddings; its requests go on from their KV, which stays on the device, in its next turn.
    """

    quantum: float = 1.0
    preemptive: float = 0

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        present = {m.name for m in view.models}
        turn = memo if isinstance(memo, ModelTurn) and memo.model in present else None
        others = [m for m in view.models if m.waiting and (turn is None or m.name != turn.model)]
        owed = [m for m in others if owes_first_token(view, m)]
        preempts = bool(self.preemptive or owed)
        heir = min(owed or others, key=oldest, default=None)
        if turn is None:
            if heir is None:
                return Decision()
            return self._start(view, heir, [])
        current = view.model(turn.model)
        actions: list[Action] = []
        if current.residency in (Residency.ABSENT, Residency.FAILED):
            mine = current if current.waiting else None
            following = (mine or heir) if self.preemptive else (heir or mine)
            return self._start(view, following, []) if following else Decision()
        resident = current.residency is Residency.RESIDENT
        if resident and turn.since == inf:
            turn = replace(turn, since=view.now)
        claims, _ = shortage_claims(view, patience=float("inf"))
        sources = [cached_prefixes, lent_pages, idle_models, younger_requests, younger_models]
        covered = cover(view, claims, sources)
        actions += covered.actions
        if heir is None:
            if current.held:
                actions.append(Hold(current.name, False, why="nobody else waits"))
            return Decision(tuple(actions), turn, promises=covered.promises)
        over_at = turn.since + self.quantum
        at = phase(turn, current, view.now, self.quantum, preempts)
        if at is TurnPhase.OVER and resident:
            actions.append(Hold(current.name, False))
            evict = self._eviction(current, heir, preempts=preempts)
            beside = heir.missing_pages <= view.free - view.promised
            if beside and any(current.name in s.holders for s in heir.shared):
                # Activate it before the eviction, so that shared segments are not loaded again.
                start = self._start(view, heir, actions)
                return replace(start, actions=(*start.actions, evict))
            return self._start(view, heir, [*actions, evict])
        if at is TurnPhase.DRAINS and not current.held and resident:
            actions.append(Hold(current.name, True, why=f"its turn is over, {heir.name} waits"))
        wake = over_at if view.now < over_at < inf else None
        return Decision(tuple(actions), turn, earliest(wake, next_owed(view)), covered.promises)

    @staticmethod
    def _eviction(current: ModelView, heir: ModelView, *, preempts: bool) -> Reside:
        """Return the eviction at the end of a turn: of all but embeddings where requests go on."""
        parts = current.plan.parts
        keeps = bool(preempts and current.running and len(parts) > 1)
        pages = sum(parts[:-1]) if keeps else None
        return eviction(current, f"{heir.name} is next", pages)

    @staticmethod
    def _start(view: DeviceView, heir: ModelView, actions: list[Action]) -> Decision:
        """Activate `heir` after `actions`. Cached prefixes and idle models in its way go; pinned
        models stay."""
        evicted = {a.model: a for a in actions if isinstance(a, Reside) and is_eviction(a)}
        gone = [m for m in view.models if m.name in evicted and not m.spec.pinned]
        stay = replace(view, models=tuple(m for m in view.models if m not in gone))
        budget = PageBudget(view)
        budget.coming += sum(evicted_pages(m, evicted[m.name]) for m in gone)
        claim = Claim(heir.name, oldest(heir), heir.missing_pages, may_preempt=False, weights=True)
        freed = gather(stay, claim, [cached_prefixes, idle_models], budget)
        actions = [*actions, *freed, activation(view, heir, "its turn")]
        return Decision(tuple(actions), ModelTurn(heir.name, since=inf))
