"""Share one elastic pool between all models: activate on demand, evict what is idle (Prism).

The memory policy of presets `balloon` and `prism`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import Action, Decision
from ballast.core.view import DeviceView
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claim_and_offer import Claim, Source
from ballast.policy.market.claims import activation_claims, earliest, shortage_claims
from ballast.policy.market.cover import cover
from ballast.policy.market.fair_shares import share_out
from ballast.policy.market.idle_segments import idle_segments
from ballast.policy.market.offers import (
    cached_prefixes,
    idle_models,
    lent_pages,
    loose_blocks,
    oldest,
    own_prefix,
    younger_models,
    younger_requests,
)
from ballast.policy.memory.defaults import last_resort, unservable
from ballast.policy.memory.reactivation import come_back, evicted
from ballast.policy.plans import last_plans

AT_ONCE = -1.0
"""Patience that makes every claim overdue at once, whatever the model's service level."""


@dataclass(frozen=True, slots=True)
class Balloon(MemoryPolicy):
    """Prism's memory ballooning (sections 4 and 5) without its slack and pressure policies.

    Pages come, in this order, from cached prefixes, from blocks moved together, from idle models
    (those whose return would cost least first), from pages lent to other devices, and, for requests
    that cannot go on or have waited for `patience` of their TTFT service level, from younger
    requests and younger models.

    `segments`: idle models give up their weights segment by segment, the last layers first; 0:
    whole models, as in the paper.

    `by_price`: take the cheapest offers first instead, whatever their kind; a request that can
    still wait takes them only at less than its waiting costs. `fair_shares`: bound models to their
    shares of KV memory (`policy.market.fair_shares`). `restore`: activate evicted models again
    before they are requested, while no request lacks pages and as far as `reserve` of the KV pages
    stay free; this preempts no request, and evicts only idle models that are worth less.
    """

    patience: float = 0.5
    by_price: float = 0
    fair_shares: float = 1
    restore: float = 0
    reserve: float = 0.1
    segments: float = 1

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        sharing = share_out(view, fair=bool(self.fair_shares))
        view = sharing.view
        absent, wake_absent = activation_claims(view, self.patience)
        short, wake_short = shortage_claims(view, self.patience)
        idle = idle_segments if self.segments else idle_models
        sources = self.sources(
            (cached_prefixes, loose_blocks, idle, lent_pages),
            (sharing.younger, sharing.younger_models, own_prefix),
        )
        covered = cover(
            view, sharing.claims([*absent, *short]), sources, by_price=bool(self.by_price)
        )
        actions = [*sharing.holds, *last_plans(covered.actions)]
        if self.restore:
            before = memo if isinstance(memo, frozenset) else frozenset[str]()
            if not absent and not short:
                actions += come_back(view, before, self.reserve)
            memo = evicted(view, before, actions)
        wake = earliest(wake_absent, wake_short)
        return Decision(tuple(actions), memo, wake, covered.promises, sharing.holding)

    def sources(self, before: Sequence[Source], undoing: Sequence[Source]) -> list[Source]:
        """Return all sources of pages, in order: those that undo no work come first."""
        return [*before, *undoing]

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Undo younger work at once, of any model (`undo_younger_work`)."""
        return undo_younger_work(view)


def undo_younger_work(view: DeviceView) -> Sequence[Action]:
    """Make room at once for all that lack pages, oldest first, by preempting younger requests and
    evicting younger models too. If that finds nothing, a claim may evict models younger than the
    oldest request of its own model, which waits behind the claim's own in the queue. Use the common
    last resort if that finds nothing either, or if the device could not serve some request alone.
    """
    if unservable(view) is not None:
        return last_resort(view)
    absent, _ = activation_claims(view, AT_ONCE)
    short, _ = shortage_claims(view, AT_ONCE)
    sources = [cached_prefixes, idle_models, lent_pages, younger_requests, younger_models]
    claims = [*absent, *short]
    for covering in (claims, [_as_oldest(view, claim) for claim in claims]):
        if actions := cover(view, covering, sources).actions:
            return actions
    return last_resort(view)


def _as_oldest(view: DeviceView, claim: Claim) -> Claim:
    """Let a claim undo as much as the oldest request of its model may."""
    return claim._replace(undoing=min(claim.order, oldest(view.model(claim.model))))
