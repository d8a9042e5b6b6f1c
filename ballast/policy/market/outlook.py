"""Forecast when requests reach their next deadlines, and what delaying them would harm.

Forecasts come from the view alone: deadlines, learned costs, lengths to expect. Prices of the
preset `ballast` (`ballast.policy.supply`) and gains of its claims are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ballast.core.cost import copy_seconds
from ballast.core.request import Precedence
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.harm import TIE, Forecast, harm
from ballast.policy.market.work_ahead import (
    LEAST_SPREAD,
    SPREAD,
    DeviceWork,
    Floats,
    rise_of_missing,
    step_seconds,
    work_of,
)

MOST_DECODING = 0.9
"""Most of the lane's time that decodes are taken to need, for what is left to prefills."""
_WAITS = (0.0, *(1e-3 * 4.0**k for k in range(7)))
"""Seconds by which a round may become longer, between which harms are interpolated."""
FOREVER = 10.0
"""Seconds for which a request is taken to wait if nothing that runs will free its pages."""


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


class Coming:
    """Pages that become free by themselves: as running requests end, the earliest first."""

    def __init__(self, seconds: Floats, pages: Floats) -> None:
        """`seconds` from now until requests end, and the `pages` that each then frees."""
        order = np.argsort(seconds, kind="stable")
        self._times = np.append(np.minimum(seconds[order], FOREVER), FOREVER)
        self._pages = np.cumsum(pages[order])
        """Pages free by then, in all."""

    def wait(self, pages: int) -> float:
        """Return the seconds until so many pages have become free; `FOREVER` at most."""
        if pages <= 0:
            return 0.0
        return float(self._times[self._pages.searchsorted(pages)])

    def waits(self, pages: Floats) -> Floats:
        """Return the seconds as `wait` for each number of pages."""
        times: Floats = self._times[self._pages.searchsorted(pages)]
        return np.where(pages > 0, times, 0.0)


class Outlook:
    """Forecasts of one view."""

    def __init__(self, view: DeviceView, *, fetches: bool = True, freed: float = 1.0) -> None:
        """`fetches`: KV that tiers keep is expected to come back, where that is faster than to
        compute it again. `freed`: factor of the times at which running requests free their pages;
        0: nothing is known of these."""
        self.view, self.now, self._freed = view, view.now, freed
        self.fetch_rate = view.kv_fetch_bytes_per_second if fetches else 0.0
        """Bytes of KV per second that come back from tiers; 0: none."""

    @cached_property
    def work(self) -> DeviceWork:
        """The work ahead of all requests."""
        return DeviceWork(self.view.models)

    @cached_property
    def stretch(self) -> float:
        """Seconds until work of a second is done beside the decodes of all models."""
        decoding = sum(m.derived(_lane_share) for m in self.view.models if m.running)
        return 1.0 / (1.0 - min(MOST_DECODING, decoding))

    @cached_property
    def round_seconds(self) -> float:
        """Seconds of a decode step of every model that runs."""
        return sum(m.derived(step_seconds) for m in self.view.models if m.running)

    @cached_property
    def lane_price(self) -> float:
        """Harm of a second of the lane: all requests of the device are delayed by it."""
        return self.work.of_all.rise(self.now, self.stretch, LANE_STEP) / LANE_STEP

    def lane_waits_harm(self, seconds: float) -> float:
        """Return the harm if each round of decode steps becomes longer by so many seconds, for as
        long as the requests of the device take to end."""
        return float(np.interp(seconds, _WAITS, self._harm_of_waits))

    @cached_property
    def _harm_of_waits(self) -> Floats:
        work = self.work.of_all
        found = [work.harms(self.now, self.stretch, work.left * w).sum() for w in _WAITS]
        return np.array(found)

    @cached_property
    def coming(self) -> Coming:
        """Pages that become free by themselves."""
        work = self.work.of_all
        holding = (work.pages > 0) & (self._freed > 0)
        seconds = work.left[holding] * (self.round_seconds * self._freed)
        return Coming(seconds, work.pages[holding])

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

    @cached_property
    def _first(self) -> Precedence | None:
        return min((m.running[0].order for m in self.view.models if m.running), default=None)

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
        prefill = m.derived(_mean_prefill) * self.stretch
        spread = LEAST_SPREAD + SPREAD * (prefill + delay)
        return harm(delay, Forecast(m.spec.slo.ttft - prefill, spread))

    def harms_of_delays(self, models: Sequence[ModelView], delays: Floats) -> Floats:
        """Return, for each of some models with requests, the harm of its not running for a delay of
        its own: `rise`, and `arrival_harm` of the requests that are to be expected meanwhile."""
        if not models:
            return delays
        now, stretch = self.now, self.stretch
        found = self.work.harms(models, now, stretch, delays)
        rates = np.array([m.arrival_rate(now) for m in models])
        prefill = np.array([m.derived(_mean_prefill) for m in models]) * stretch
        slack = np.array([m.spec.slo.ttft for m in models]) - prefill
        late = rise_of_missing(slack, LEAST_SPREAD + SPREAD * (prefill + delays), delays)
        return found + rates * delays * (late + TIE * delays)

    def forecast(self, m: ModelView, place: int) -> Forecast:
        """Return the forecast of a model's request: its `place` counts waiting ones, then running
        ones."""
        work = m.derived(work_of)
        ahead = float(work.ahead[place]) * self.stretch
        slack = float(work.due[place]) - self.now - ahead
        return Forecast(slack, LEAST_SPREAD + SPREAD * ahead, float(work.weight[place]))


LANE_STEP = 0.25
"""Seconds of the lane over which its price is taken."""


def _mean_prefill(m: ModelView) -> float:
    """Return the seconds to prefill a prompt of a model's mean length."""
    return m.costs.prefill_seconds(max(1, round(m.traffic.prompts.mean)))


def _lane_share(m: ModelView) -> float:
    """Return the part of the lane's time that a model's decodes need to keep their pace."""
    return m.derived(step_seconds) / max(1e-3, min(r.pace for r in m.running))
