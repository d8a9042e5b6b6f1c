"""Order all waiting requests of a device by deadline, across models: Prism, section 6.2, Algorithm
2.

The admission policy of preset `prism`. A waiting request has slack as long as its prefill, and
those of all requests before it, end before its first token is due. Moore and Hodgson's rule (1968)
finds the largest set of requests that can all be in time: add requests in order of deadline;
whenever one would be late, leave out the one with the longest prefill of those added so far.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ballast.core.actions import Action, Decision, Reorder
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.admission.late_last import IN_TIME, LATE, PROMOTED
from ballast.policy.base import AdmissionPolicy
from ballast.policy.market.claims import BEHIND_ALL
from ballast.policy.market.starvation import LONGEST_WAIT

LEAST = 1e-3
"""Least seconds between two evaluations of the same requests."""
_WHY = {
    IN_TIME: "it can be in time",
    LATE: "others of its model can be in time",
    BEHIND_ALL: "others can be in time",
}
_RESTS = "it is ahead of its pace, and others' first tokens are due earlier"
MOST = 512
"""Most requests evaluated, those with the earliest deadlines; the others count as in time."""


class QueuedPrefill(NamedTuple):
    """A waiting request as the rule evaluates it."""

    id: str
    rank: int
    """Importance; lower is more important."""
    due: float
    """Deadline in seconds from now; -inf: it cannot be in time any more."""
    seconds: float
    """Seconds of its prefill."""


@dataclass(frozen=True, slots=True)
class SlackMemo:
    """State that one decision leaves to the next."""

    waiting: tuple[tuple[RequestView, ...], ...] = ()
    """Waiting requests by model, in the fleet's order."""
    until: float = float("-inf")
    """When the same requests have to be evaluated again, in seconds."""
    since: float | None = None
    """When a late request was last put first, or began to wait behind others, in seconds."""


@dataclass(frozen=True, slots=True)
class Slack(AdmissionPolicy):
    """Admit the most requests that can be in time, in order of deadline, before those that cannot.

    This holds over all models of a device, the more important requests first. A request that is
    left out waits behind all others, also of other models: it has no work undone, its model makes
    way if it runs nothing, and free pages go first to requests that can be in time. If it is more
    important than others, it waits behind its own model's requests only. None is dropped: it
    returns to its place when there is time for it after all, and every `aging` seconds the oldest
    request left out comes first.
    """

    aging: float = LONGEST_WAIT

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        before = memo if isinstance(memo, SlackMemo) else SlackMemo()
        waiting = tuple(m.waiting for m in view.models)
        if not any(waiting):
            return Decision((), None)
        same = len(waiting) == len(before.waiting) and all(
            a is b for a, b in zip(waiting, before.waiting, strict=True)
        )
        if same and view.now < before.until:
            return Decision((), before, before.until)
        late, slack = self.evaluate(view)
        actions: list[Action] = []
        least = max(r.order.rank for m in view.models for r in (*m.waiting, *m.running))
        for m in view.models:
            moved: dict[tuple[int, str], list[str]] = {}
            resting = self.at_rest(view, m, late)
            for r in m.waiting:
                last = BEHIND_ALL if r.order.rank == least else LATE
                place = last if r.id in late else LATE if r.id in resting else IN_TIME
                if r.place not in (place, PROMOTED):
                    why = _RESTS if r.id in resting else _WHY[place]
                    moved.setdefault((place, why), []).append(r.id)
            for (place, why), ids in moved.items():
                actions.append(Reorder(m.name, tuple(ids), place, why))
        until = view.now + max(slack, LEAST)
        behind = [(r.order, m.name, r.id) for m in view.models for r in m.waiting if r.id in late]
        n = sum(map(len, waiting))
        since = None
        if behind and len(behind) < n:
            since = view.now if before.since is None else before.since
            if not any(r.place == PROMOTED for m in view.models for r in m.waiting):
                if view.now >= since + self.aging:
                    _, model, id = min(behind)
                    why = f"first after {self.aging:g} s behind others"
                    actions.append(Reorder(model, (id,), PROMOTED, why))
                    since = view.now
                until = min(until, since + self.aging)
        wake = until if until < float("inf") else None
        return Decision(tuple(actions), SlackMemo(waiting, until, since), wake)

    def at_rest(self, view: DeviceView, m: ModelView, late: Container[str]) -> Container[str]:
        """Return the ids of a model's requests that wait behind its others though they can be in
        time; none here. `late`: those that are left out."""
        return ()

    def evaluate(self, view: DeviceView) -> tuple[set[str], float]:
        """Return the ids of requests that are left out, and after how many seconds that may change
        if no request arrives or ends."""
        return left_out(prefills(view), begun_seconds(view))


def prefills(view: DeviceView) -> list[QueuedPrefill]:
    """List the requests that wait to be admitted, except those that were put first."""
    found = []
    for m in view.models:
        absent = _activation(view, m) if m.waiting else 0.0
        for r in m.waiting:
            if r.place == PROMOTED:
                continue
            due = (r.due if r.first is None else r.next_due) - view.now
            seconds = m.costs.prefill_seconds(r.tokens)
            if absent + seconds > due:
                due = float("-inf")
            found.append(QueuedPrefill(r.id, r.order.rank, due, seconds))
    return found


def left_out(waiting: Sequence[QueuedPrefill], begun: float = 0.0) -> tuple[set[str], float]:
    """Return the ids of the fewest requests without which all others are in time, and after how
    many seconds that may change if no request arrives or ends.

    `begun`: seconds of prefills that run before all of them. The more important of two ranks has
    its own fewest left out first.
    """
    chosen = sorted(waiting, key=attrgetter("rank", "due"))[:MOST]
    late = {p.id for p in chosen if p.due == float("-inf")}
    at, slack = begun, float("inf")
    for _, group in groupby(chosen, attrgetter("rank")):
        in_time: list[tuple[float, str]] = []
        kept: dict[str, QueuedPrefill] = {}
        start = at
        for p in group:
            if p.id in late:
                continue
            heappush(in_time, (-p.seconds, p.id))
            kept[p.id] = p
            at += p.seconds
            if at > p.due:
                seconds, longest = heappop(in_time)
                at += seconds
                late.add(longest)
                del kept[longest]
        ends = start
        for p in kept.values():
            ends += p.seconds
            slack = min(slack, p.due - ends)
    return late, slack


def begun_seconds(view: DeviceView) -> float:
    """Return the seconds of prompts of admitted requests that have not been computed yet."""
    return sum(
        m.costs.prefill_seconds(r.tokens - r.computed)
        for m in view.models
        for r in m.running
        if r.first is None and r.computed < r.tokens
    )


def _activation(view: DeviceView, m: ModelView) -> float:
    """Return the seconds that activating a model takes."""
    if m.residency is not Residency.ABSENT:
        return 0.0
    return copy_seconds(m.missing_pages * view.page_bytes, view.weights_bytes_per_second)
