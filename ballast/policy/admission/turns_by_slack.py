"""Let requests that made way rest while they are ahead of their pace, and admit them in time.

The admission policy of preset `superinfer`. Reorders within each model's queue; drops no request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ballast.core.actions import Decision, Reorder
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, RequestView
from ballast.policy.admission.late_last import IN_TIME, LATE, LateLast, is_late
from ballast.policy.kv_fetching import OVERHEAD_SECONDS
from ballast.policy.market.claims import earliest


@dataclass(frozen=True, slots=True)
class TurnsBySlack(LateLast):
    """As `LateLast`; besides, a request that has had tokens waits behind its model's others until
    half of its `lead` is left, in seconds before it would have to be admitted."""

    lead: float = 0.5

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = LateLast.__call__(self, view, memo)
        actions, wake = list(decision.actions), decision.wake_at
        for m in view.models:
            rest: list[str] = []
            back: list[str] = []
            for r in m.waiting:
                if r.first is None or is_late(view.now, m, r):
                    continue
                at = self._back_at(view, m, r)
                if view.now < at:
                    wake = earliest(wake, at)
                    rest += [r.id] if r.place == IN_TIME else []
                elif r.place == LATE:
                    back.append(r.id)
            if rest:
                actions.append(Reorder(m.name, tuple(rest), LATE, "ahead of its pace"))
            if back:
                actions.append(Reorder(m.name, tuple(back), IN_TIME, "its next token is due"))
        return replace(decision, actions=tuple(actions), wake_at=wake)

    def _back_at(self, view: DeviceView, m: ModelView, r: RequestView) -> float:
        return back_by(view, m, r) - self.lead / 2


def back_by(view: DeviceView, m: ModelView, r: RequestView) -> float:
    """Return when a request without its KV on the device has to be admitted for its next token to
    be in time, in seconds on the device's clock; -inf: it is late whatever is done."""
    return r.next_due - restoring_seconds(view, m, r)


def restoring_seconds(view: DeviceView, m: ModelView, r: RequestView) -> float:
    """Return the seconds until a preempted request has its KV again: copied from a tier below the
    device where KV is kept, or computed, whatever takes less."""
    return min(_computing_seconds(m, r), _fetching_seconds(view, m, r))


def is_fetched(view: DeviceView, m: ModelView, r: RequestView) -> bool:
    """Return whether a preempted request's KV is copied from a tier rather than computed."""
    return _fetching_seconds(view, m, r) < _computing_seconds(m, r)


def _computing_seconds(m: ModelView, r: RequestView) -> float:
    return m.costs.prefill_seconds(_tokens(r))


def _fetching_seconds(view: DeviceView, m: ModelView, r: RequestView) -> float:
    if not (rate := view.kv_fetch_bytes_per_second):
        return math.inf
    return copy_seconds(_tokens(r) * m.spec.kv_bytes_per_token, rate) + OVERHEAD_SECONDS


def _tokens(r: RequestView) -> int:
    return max(r.computed, r.tokens - 1)
