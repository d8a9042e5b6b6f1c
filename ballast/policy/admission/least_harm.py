"""Admit the requests that harm others least: one queue of a device by deadline, for lane and
memory.

The admission policy of preset `ballast`. As `slack`, but a request also waits for its pages, those
of the requests before it included, until running ones free them; and prefills take as long as
decodes leave them. Times are forecasts of `ballast.policy.market.outlook`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.admission.late_last import PROMOTED
from ballast.policy.admission.slack import MOST, Slack, begun_seconds
from ballast.policy.admission.turns_by_slack import back_by
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.work_ahead import outputs_left, step_seconds

RENEWED = 0.25
"""Most seconds until the queue is evaluated again while requests are left out: pages come earlier
or later than expected."""


class QueuedRequest(NamedTuple):
    """A waiting request as the rule evaluates it."""

    id: str
    rank: int
    due: float
    """Deadline in seconds from now; -inf: it cannot be in time any more."""
    seconds: float
    """Seconds of the lane until its prefill is done."""
    pages: int
    """Pages of KV that it needs to be admitted."""


@dataclass(frozen=True, slots=True)
class LeastHarm(Slack):
    """Admit the most requests that can be in time, in order of deadline, before those that cannot:
    beside the lane each needs its pages before its deadline.

    Where a request would be late for want of the lane, the one with the longest prefill of those
    before it is left out; for want of pages, the one that needs most pages.

    With `resting` a request that made way while it was ahead of its pace rests: it waits behind
    those of its model whose first token is due before it has to be back. As these come to be due
    later and later, it does not wait for long.

    `freed`, `resting`: as of `ballast.policy.memory.arbiter.Arbiter`.
    """

    freed: float = 1
    resting: float = 1

    def evaluate(self, view: DeviceView) -> tuple[set[str], float]:
        ahead = Outlook(view, freed=self.freed)
        waiting = [r for m in view.models if m.waiting for r in _queued(ahead, m)]
        there = view.coming + view.borrowed + sum(map(_spare, view.models))

        def wait(pages: int) -> float:
            return ahead.coming.wait(pages - there)

        late, slack = left_out(waiting, wait, begun_seconds(view) * ahead.stretch)
        return late, min(slack, RENEWED) if late else slack

    def at_rest(self, view: DeviceView, m: ModelView, late: Container[str]) -> Container[str]:
        if not self.resting:
            return ()
        first = (r.due for r in m.waiting if r.first is None and r.id not in late)
        earliest = min(first, default=math.inf)
        made_way = [r for r in m.waiting if r.first is not None and r.undone == r.tokens]
        return {r.id for r in made_way if r.id not in late and earliest < back_by(view, m, r)}


def left_out(
    waiting: Sequence[QueuedRequest], wait: Callable[[int], float], begun: float = 0.0
) -> tuple[set[str], float]:
    """Return the ids of requests without which all others are in time, and after how many seconds
    that may change if no request arrives or ends.

    `wait`: seconds until so many pages are free; `begun`: seconds of prefills that run before all
    of them. The more important of two ranks has its own left out first.
    """
    chosen = sorted(waiting, key=attrgetter("rank", "due"))[:MOST]
    late: set[str] = set()
    slack, at, held = math.inf, begun, 0
    for _, group in groupby(chosen, attrgetter("rank")):
        kept: dict[str, QueuedRequest] = {}
        longest: list[tuple[float, str]] = []
        largest: list[tuple[float, str]] = []
        for r in group:
            if r.due == -math.inf:
                late.add(r.id)
                continue
            kept[r.id] = r
            heappush(longest, (-r.seconds, r.id))
            heappush(largest, (-r.pages, r.id))
            at, held = at + r.seconds, held + r.pages
            scarce = longest if at > r.due else largest
            if max(at, wait(held) + r.seconds) > r.due:
                most = _most(scarce, kept)
                late.add(most.id)
                at, held = at - most.seconds, held - most.pages
            if r.id in kept and max(at, wait(held) + r.seconds) > r.due:
                del kept[r.id]
                late.add(r.id)
                at, held = at - r.seconds, held - r.pages
            if r.id in kept:
                slack = min(slack, r.due - max(at, wait(held) + r.seconds))
    return late, slack


def _most(heap: list[tuple[float, str]], kept: dict[str, QueuedRequest]) -> QueuedRequest:
    """Remove and return the request with the most of those that are kept."""
    while (id := heappop(heap)[1]) not in kept:
        pass
    return kept.pop(id)


def _queued(ahead: Outlook, m: ModelView) -> Iterator[QueuedRequest]:
    """Yield what the rule needs of a model's requests, but of those that were put first."""
    copy = ahead.copy_seconds(m.missing_pages) if m.residency is Residency.ABSENT else 0.0
    for id, rank, due, seconds, pages in m.derived(_work):
        left, lane = due - ahead.now, seconds * ahead.stretch
        yield QueuedRequest(id, rank, left if copy + lane <= left else -math.inf, lane, pages)


def _work(m: ModelView) -> Sequence[QueuedRequest]:
    """Return the work of a model's requests beside what the cache is expected to hold, with
    deadlines on the device's clock, and seconds of a lane that does nothing else."""
    absent, found = m.residency is Residency.ABSENT, []
    for place, r in enumerate(m.waiting):
        if r.place == PROMOTED:
            continue
        cached = 1.0 if absent and r.generated else m.traffic.reuse.found
        tokens = max(1, round(r.tokens * (1.0 - cached)))
        pages = m.first_pages
        if place or absent:
            blocks = m.spec.blocks_of(tokens)
            pages = ceil_div(blocks, m.slab_blocks) * m.slab_pages
        seconds = m.costs.prefill_seconds(tokens)
        found.append(QueuedRequest(r.id, r.order.rank, last_start(m, r), seconds, pages))
    return found


def last_start(m: ModelView, r: RequestView) -> float:
    """Return by when a waiting request must have been computed to keep its service level: for its
    first token, or, after a preemption, for the rest of its answer."""
    if r.first is None:
        return r.due
    if r.first > r.due:
        return -math.inf
    left = outputs_left(m, r)
    return r.first + (r.generated - 1 + left) * r.pace - left * m.derived(step_seconds)


def _spare(m: ModelView) -> int:
    """Return the pages of a model that make way without undoing work."""
    return m.cached_pages + (m.present_pages if m.idle else 0)
