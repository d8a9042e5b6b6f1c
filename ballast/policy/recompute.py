"""Models placed for good, requests recomputed when KV runs short (vLLM): the papers' baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ballast.core.actions import Action, Decision
from ballast.core.view import DeviceView
from ballast.policy.claims import activation_claims, earliest, kv_claims
from ballast.policy.cover import cover
from ballast.policy.offers import (
    cached_prefixes,
    lent_pages,
    loose_blocks,
    own_prefix,
    own_younger_requests,
    younger_requests,
)
from ballast.policy.static import Division, cover_within, keep_places, placed, shares
from ballast.policy.turns import Turn, round_robin

PATIENCE = 0.5
"""Part of its TTFT service level that a request waits for room, before younger requests make way
for a model that the operator has taken off the device, or others stop taking what becomes free."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Who has a place, and whose turn it is."""

    division: Division
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Every model keeps its place; where KV is short, the youngest running request starts again.

    `temporal`: one model at a time is served, in turns of `quantum` seconds plus what is running
    then; else all are, job by job. `pooled`: the KV of all models comes from one pool; else each
    has its share of it, as with `static`.
    """

    temporal: float = 0
    quantum: float = 1.0
    pooled: float = 0

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        before = memo if isinstance(memo, Standing) else None
        standing, actions, wake = stand(
            view, before, pooled if self.pooled else shares, self.quantum if self.temporal else None
        )
        if not self.pooled:
            claims, _ = kv_claims(view, waiting=False)
            actions += cover_within(view, claims, [own_younger_requests])
            return Decision(tuple(actions), standing, wake)
        absent, absent_at = activation_claims(view, PATIENCE)
        short, short_at = kv_claims(view, waiting=True, patience=PATIENCE)
        sources = [cached_prefixes, loose_blocks, lent_pages, younger_requests, own_prefix]
        covered = cover(view, [*absent, *short], sources)
        wake = earliest(wake, absent_at, short_at)
        return Decision((*actions, *covered.actions), standing, wake, covered.promises)


def stand(
    view: DeviceView,
    before: Standing | None,
    divide: Callable[[DeviceView], dict[str, int]],
    quantum: float | None,
) -> tuple[Standing, list[Action], float | None]:
    """Places and turns from now on, what they ask for, and when a turn's time is over.

    `quantum` None: there are no turns.
    """
    division, actions = keep_places(view, before.division if before else None, divide)
    turn, wake = before.turn if before else None, None
    if quantum is not None:
        turn, holds, wake = round_robin(view, turn, quantum)
        actions += holds
    return Standing(division, turn), actions, wake


def pooled(view: DeviceView) -> dict[str, int]:
    """For each model that has a place: the pages that all weights leave, bound of one's KV.

    What the pool can never hold is so refused when it arrives.
    """
    models, room = placed(view)
    return {m.name: room for m in models}
