"""Forecast when requests reach their next deadlines, and what delaying them would harm.

Forecasts come from the view alone: deadlines, learned costs, lengths to expect. Prices of the
preset `ballast` (`ballast.policy.supply`) and gains of its claims are made of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ballast.core.cost import copy_seconds
from ballast.core.job import JobLoad
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.harm import TIE, Forecast, harm, weight_of

Floats = NDArray[np.float64]

LEAST_SPREAD = 0.05
"""Seconds that a forecast may be off by, however little is ahead."""
SPREAD = 0.25
"""Standard deviation of a forecast, as a part of the work ahead."""
MOST_DECODING = 0.9
"""Most of the lane's time that decodes are taken to need, for what is left to prefills."""
FOREVER = 10.0
"""Seconds for which a request is taken to wait if nothing that runs will free its pages."""
_LOGISTIC = math.sqrt(3.0) / math.pi


@dataclass(frozen=True, slots=True, eq=False)
class WorkAhead:
    """Deadlines of one model's requests, and the work ahead of each, as arrays of equal length.

    A request's next deadline: of its first token, then of its last one, given its expected length
    and the pace that its service level allows.
    """

    due: Floats
    """Seconds on the device's clock; -inf: it is hopeless."""
    ahead: Floats
    """Seconds of the lane that its model needs before."""
    weight: Floats
    waiting: int
    """The first so many wait to be admitted; the others run."""

    def rise(self, now: float, stretch: float, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying all of them by `delay` beyond `base` seconds."""
        return _rise(self.due - now - base, self.ahead, self.weight, stretch, delay)

    def rise_of_waiting(self, now: float, stretch: float, delay: float, base: float) -> float:
        """Return the harm as `rise`, of those that wait."""
        n = self.waiting
        return _rise(self.due[:n] - now - base, self.ahead[:n], self.weight[:n], stretch, delay)


def _rise(slack: Floats, ahead: Floats, weight: Floats, stretch: float, delay: float) -> float:
    """Sum `harm` over requests, with forecasts as of `Outlook.forecast`."""
    if not len(weight) or delay <= 0.0:
        return 0.0
    work = ahead * stretch
    scale = (LEAST_SPREAD + SPREAD * work) * _LOGISTIC
    x = (slack - work) / scale
    with np.errstate(over="ignore"):
        late = 1.0 / (1.0 + np.exp(np.clip(x - delay / scale, -60.0, 60.0)))
        late -= 1.0 / (1.0 + np.exp(np.clip(x, -60.0, 60.0)))
    return float(weight @ late) + TIE * delay * float(weight.sum())


def work_of(m: ModelView) -> WorkAhead:
    """Return the deadlines of a model's requests, and the work ahead of each."""
    step = step_seconds(m)
    due: list[float] = []
    ahead: list[float] = []
    before = 0.0
    for r in (*m.waiting, *m.running):
        prefill = m.costs.prefill_seconds(r.tokens - r.computed) if r.computed < r.tokens else 0.0
        if r.first is None:
            before += prefill
            due.append(r.due)
            ahead.append(before)
        elif r.first > r.due:
            due.append(-math.inf)
            ahead.append(step)
        else:
            left = m.expected_outputs(r)
            due.append(r.first + (r.generated + left - 1) * r.pace)
            ahead.append(prefill * (r.generated < 2) + left * step)
    weights = [weight_of(r.order.rank) for r in (*m.waiting, *m.running)]
    return WorkAhead(np.array(due), np.array(ahead), np.array(weights), len(m.waiting))


def step_seconds(m: ModelView) -> float:
    """Return the seconds of a model's decode step with its present batch, or one request."""
    n = max(1, len(m.running))
    context = sum(r.tokens for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, n, context))


def _request_pages(m: ModelView) -> float:
    """Return the pages of KV that a request of a model holds in the mean."""
    traffic, there = m.traffic, (*m.waiting, *m.running)
    if traffic.outputs.n:
        tokens = traffic.prompts.mean + traffic.outputs.mean / 2
    else:
        tokens = sum(r.tokens for r in there) / max(1, len(there))
    return tokens / m.spec.block_tokens / m.slab_blocks * m.slab_pages


def waiting_pages(m: ModelView) -> int:
    """Return the pages of KV that a model's waiting requests need; none if it is not here."""
    if m.residency is Residency.ABSENT:
        return 0
    tokens = sum(r.tokens for r in m.waiting)
    blocks = ceil_div(tokens, m.spec.block_tokens)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages


@dataclass(frozen=True, slots=True)
class Coming:
    """Pages that become free by themselves: as running requests end, the earliest first."""

    times: Sequence[float]
    """Seconds from now, ascending."""
    pages: Sequence[int]
    """Pages free by then, in all."""

    def wait(self, pages: int) -> float:
        """Return the seconds until so many pages have become free; `FOREVER` at most."""
        if pages <= 0:
            return 0.0
        i = bisect_left(self.pages, pages)
        return min(FOREVER, self.times[i]) if i < len(self.times) else FOREVER


class Outlook:
    """Forecasts of one view."""

    def __init__(self, view: DeviceView) -> None:
        self.view, self.now = view, view.now
        running = [m for m in view.models if m.running]
        decoding = sum(_lane_share(m) for m in running)
        self.stretch = 1.0 / (1.0 - min(MOST_DECODING, decoding))
        """Seconds until work of a second is done beside the decodes of all models."""
        self.round_seconds = sum(m.derived(step_seconds) for m in running)
        """Seconds of a decode step of every model that runs."""
        self._first = min((m.running[0].order for m in running), default=None)

    @cached_property
    def lane_price(self) -> float:
        """Harm of a second of the lane: all requests of the device are delayed by it."""
        busy = (m for m in self.view.models if not m.idle)
        return sum(self.rise(m, LANE_STEP) for m in busy) / LANE_STEP

    @cached_property
    def coming(self) -> Coming:
        """Pages that become free by themselves."""
        ends = sorted(
            (m.expected_outputs(r) * self.round_seconds, r.pages)
            for m in self.view.models
            for r in m.running
            if r.pages
        )
        return Coming([at for at, _ in ends], list(accumulate(pages for _, pages in ends)))

    @cached_property
    def spare(self) -> int:
        """Pages that nobody uses now: free ones, cached prefixes, weights of idle models."""
        idle = (m.present_pages for m in self.view.models if m.idle and not m.spec.pinned)
        cached = (m.cached_pages for m in self.view.models)
        return max(0, self.view.coming) + sum(idle) + sum(cached)

    @cached_property
    def backlog(self) -> int:
        """Pages of KV that all waiting requests of models on the device lack."""
        return sum(m.derived(waiting_pages) for m in self.view.models)

    def absence(self, m: ModelView, pages: int, others: int) -> float:
        """Return the seconds until `pages` of a model's weights are there again: until so many have
        become free beside `others` that nobody uses, and for the copy."""
        copy = copy_seconds(pages * self.view.page_bytes, self.view.weights_bytes_per_second)
        return self.coming.wait(self.backlog + pages - others) + copy

    def stay(self, m: ModelView) -> float:
        """Return the seconds for which a request of a model, or of one like those that have ended,
        would hold its pages."""
        step = m.derived(step_seconds)
        outputs = m.traffic.outputs.mean
        if m.waiting:
            outputs = m.expected_outputs(m.waiting[0])
        return self.round_seconds + outputs * max(step, self.round_seconds)

    def rent(self, m: ModelView, pages: int) -> float:
        """Return the harm of others if weights of a model take `pages` for as long as one of its
        requests does: KV of requests that are to be expected finds no room meanwhile."""
        rate, demand, room = self._expected
        if not demand:
            return 0.0
        without = max(0.0, 1.0 - room / demand)
        beside = min(1.0, max(0.0, 1.0 - (room - pages) / demand))
        return (beside - without) * rate * self.stay(m)

    @cached_property
    def _expected(self) -> tuple[float, float, float]:
        """Requests per second of the models on the device, the pages of KV that these hold at once
        (Little's law), and the pages that weights in use leave."""
        here = [m for m in self.view.models if m.residency is not Residency.ABSENT]
        rates = [m.arrival_rate(self.now) for m in here]
        held = sum(r * self.stay(m) * _request_pages(m) for r, m in zip(rates, here, strict=True))
        used = sum(m.present_pages for m in here if not m.idle)
        return sum(rates), held, self.view.total - self.view.arena - used

    def is_first(self, r: RequestView) -> bool:
        """Whether a running request is the first of all, which is never undone."""
        return r.order == self._first

    def holds_first(self, m: ModelView) -> bool:
        """Whether the first of all running requests is a model's."""
        return bool(m.running) and self.is_first(m.running[0])

    def rise(self, m: ModelView, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying all requests of a model by `delay` beyond `base`."""
        return m.derived(work_of).rise(self.now, self.stretch, delay, base)

    def rise_of_waiting(self, m: ModelView, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying the waiting requests of a model by `delay` beyond `base`."""
        return m.derived(work_of).rise_of_waiting(self.now, self.stretch, delay, base)

    def arrival_harm(self, m: ModelView, delay: float) -> float:
        """Return the harm to a request that arrives when a model cannot run for `delay` seconds."""
        prompt = max(1, round(m.traffic.prompts.mean))
        prefill = m.costs.prefill_seconds(prompt) * self.stretch
        spread = LEAST_SPREAD + SPREAD * (prefill + delay)
        return harm(delay, Forecast(m.spec.slo.ttft - prefill, spread))

    def forecast(self, m: ModelView, place: int) -> Forecast:
        """Return the forecast of a model's request: its `place` counts waiting ones, then running
        ones."""
        work = m.derived(work_of)
        ahead = float(work.ahead[place]) * self.stretch
        slack = float(work.due[place]) - self.now - ahead
        return Forecast(slack, LEAST_SPREAD + SPREAD * ahead, float(work.weight[place]))


LANE_STEP = 0.25
"""Seconds of the lane over which its price is taken."""


def _lane_share(m: ModelView) -> float:
    """Return the part of the lane's time that a model's decodes need to keep their pace."""
    return m.derived(step_seconds) / max(1e-3, min(r.pace for r in m.running))
