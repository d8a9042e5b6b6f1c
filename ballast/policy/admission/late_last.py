"""Admit requests that can still meet their service level before those that cannot.

The admission policy of all presets but `prism`. Reorders within each model's queue; drops no
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ballast.core.actions import Action, Decision, Reorder
from ballast.core.view import DeviceView, ModelView, RequestView
from ballast.policy.base import AdmissionPolicy
from ballast.policy.market.claims import earliest
from ballast.policy.market.starvation import LONGEST_WAIT

PROMOTED, IN_TIME, LATE = -1, 0, 1
"""Places in a model's queue (`Reorder.place`)."""
MARGIN = 0.1
"""Part of its TTFT service level that a request needs beside its prefill, for the job in flight and
for other prompts in the same job."""


@dataclass(frozen=True, slots=True)
class LateLast(AdmissionPolicy):
    """Admit requests that can still be in time before those that cannot.

    Under overload, first come first served makes all requests late: each admitted request has
    waited longer than its service level allows, while those that could still be in time wait behind
    it. With `late_last` (1) a request that can no longer be in time waits behind its model's others
    of the same priority. It is not dropped: every `LONGEST_WAIT` seconds one such request comes
    first, the oldest of the tenant whose turn it is. With `late_last` 0 the order is first come
    first served.
    """

    late_last: float = 1

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        if not self.late_last:
            return Decision((), memo)
        before = memo.since if isinstance(memo, Overtaken) else {}
        actions: list[Action] = []
        since: dict[str, float] = {}
        wake = None
        for m in view.models:
            if not m.waiting:
                continue
            late = tuple(r.id for r in m.waiting if r.place == IN_TIME and is_late(view.now, m, r))
            if late:
                actions.append(Reorder(m.name, late, LATE, why="too late for the service level"))
            behind = [r for r in m.waiting if r.place == LATE or r.id in late]
            if not behind:
                continue
            since[m.name] = before.get(m.name, view.now)
            promoted_at = since[m.name] + LONGEST_WAIT
            if any(r.place == PROMOTED for r in m.waiting):
                continue
            if view.now >= promoted_at:
                oldest = min(behind, key=lambda r: (r.turn, r.order))
                why = f"first after {LONGEST_WAIT:g} s behind later requests"
                actions.append(Reorder(m.name, (oldest.id,), PROMOTED, why))
                since[m.name] = view.now
            elif len(behind) < len(m.waiting):
                wake = earliest(wake, promoted_at)
        return Decision(tuple(actions), Overtaken(since), wake)


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Memo: models with late requests, and since when none of these was put first, in seconds."""

    since: Mapping[str, float]


def is_late(now: float, m: ModelView, r: RequestView) -> bool:
    """Return whether a waiting request would miss its service level even if it were admitted at
    once: that of its first token, or of the pace of its output over its expected length."""
    if r.first is None:
        ttft = r.due - r.order.arrival
        return now + m.costs.prefill_seconds(r.tokens) + MARGIN * ttft > r.due
    return r.first > r.due or now > r.first + (r.generated + m.expected_outputs(r)) * r.pace
