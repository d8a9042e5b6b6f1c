"""Forecast when requests reach their next deadlines, and what delaying them would harm.

Forecasts come from the view alone: deadlines, learned costs, lengths to expect. Prices of the
preset `ballast` (`ballast.policy.supply`) and gains of its claims are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    mean_outputs,
    rise_of_missing,
    step_seconds,
    work_of,
)

MOST_DECODING = 0.9
"""Most of the lane's time that decodes are taken to need, for what is left to prefills."""
_WAITS = (0.0, *(1e-3 * 4.0**k for k in range(7)))
"""Seconds by which a round may become longer, between which harms are interpolated."""
MOST_DISPLACING = 0.95
"""Most of the returns that are taken to displace another model."""
FOREVER = 10.0
"""Seconds for which a request is taken to wait if nothing that runs will free its pages."""


def _request_pages(m: ModelView) -> float:
    """Return the pages of KV that a request of a model holds in the mean."""
    traffic, there = m.traffic, (*m.waiting, *m.running)
    if traffic.outputs.n:
        tokens = traffic.prompts.mean + m.derived(mean_outputs) / 2
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

    def __init__(
        self,
        view: DeviceView,
        *,
        turn: float | None = None,
        displacing: float = 0.0,
        fetches: bool = True,
        freed: float = 1.0,
    ) -> None:
        """`turn`: seconds that a model with requests is expected to be absent; None: as long as
        requests hold their pages. `displacing`: part of the returns for which another model has to
        make way. `fetches`: KV that tiers keep is expected to come back, where that is faster than
        to compute it again. `freed`: factor of the times at which running requests free their
        pages; 0: nothing is known of these."""
        self.view, self.now, self._freed, self._turn = view, view.now, freed, turn
        self.chain = 1.0 / (1.0 - min(MOST_DISPLACING, displacing))
        """Models that make way in turn when one with requests does, itself included."""
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
    def backlog(self) -> int:
        """Pages of KV that all waiting requests of models on the device lack."""
        return sum(m.derived(waiting_pages) for m in self.view.models)

    @cached_property
    def turn(self) -> float:
        """Seconds that a model with requests is expected to be absent."""
        if self._turn is not None:
            return self._turn
        stays = [self.stay(m) for m in self.view.models if not m.idle]
        return min(FOREVER, sum(stays) / max(1, len(stays)))

    def copy_seconds(self, pages: int) -> float:
        """Return the seconds that weights of so many pages take to come."""
        return copy_seconds(pages * self.view.page_bytes, self.view.weights_bytes_per_second)

    def absence(self, m: ModelView, pages: int) -> float:
        """Return the seconds until `pages` of a model's weights are there again: a part of a turn,
        and the copy."""
        return self.turn * min(1.0, pages / max(1, m.own_pages)) + self.copy_seconds(pages)

    def stay(self, m: ModelView) -> float:
        """Return the seconds for which a request of a model holds its pages."""
        step = max(m.derived(step_seconds), self.round_seconds)
        return self.round_seconds + m.derived(mean_outputs) * step

    @cached_property
    def reserve(self) -> int:
        """Pages that KV of requests to be expected will take beside what is in use."""
        demand = sum(pages for _, pages in self._expected.values())
        used = sum(m.kv_pages - m.cached_pages for m in self.view.models)
        return max(self.backlog, round(demand) - used, 0)

    def unserved(self, without: ModelView | None = None, pages: int = 0) -> float:
        """Return the requests per second, of models on the device, whose KV has no room beside the
        weights in use; `without`: as if a model were absent, and `pages` more were there for the
        others."""
        left = [e for name, e in self._expected.items() if not without or name != without.name]
        rate, demand = sum(rate for rate, _ in left), sum(pages for _, pages in left)
        return rate * max(0.0, 1.0 - (self._room + pages) / demand) if demand else 0.0

    @cached_property
    def _expected(self) -> Mapping[str, tuple[float, float]]:
        """Requests per second of each model on the device, and the pages of KV that these hold at
        once (Little's law)."""
        here = [m for m in self.view.models if m.residency is not Residency.ABSENT]
        rates = ((m, m.arrival_rate(self.now)) for m in here)
        return {m.name: (rate, rate * self.stay(m) * _request_pages(m)) for m, rate in rates}

    @cached_property
    def _room(self) -> int:
        """Pages that arena and weights in use leave."""
        here = (m for m in self.view.models if m.residency is not Residency.ABSENT)
        used = sum(m.present_pages for m in here if not m.idle)
        return self.view.total - self.view.arena - used

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

    def rise_of_first(self, m: ModelView, delay: float) -> float:
        """Return the harm of delaying the first waiting request of a model."""
        return m.derived(work_of).rise_of_first(self.now, self.stretch, delay)

    def arrival_harm(self, m: ModelView, delay: float) -> float:
        """Return the harm to a request that arrives when a model cannot run for `delay` seconds."""
        prefill = m.derived(_mean_prefill) * self.stretch
        spread = LEAST_SPREAD + SPREAD * (prefill + delay)
        return harm(delay, Forecast(m.spec.slo.ttft - prefill, spread))

    def arrivals_harm(self, m: ModelView, delay: float) -> float:
        """Return the harm to the requests that arrive while a model is away for `delay` seconds."""
        late = sum(self.arrival_harm(m, part * delay) for part in PARTS)
        return m.arrival_rate(self.now) * delay * late / len(PARTS)

    def harms_of_absence(self, models: Sequence[ModelView], delays: Floats) -> Floats:
        """Return, for each of some models with requests, the harm of its not running for a delay of
        its own: `rise`, and `arrivals_harm`."""
        if not models:
            return delays
        now, stretch = self.now, self.stretch
        found = self.work.harms(models, now, stretch, delays)
        rates = np.array([m.arrival_rate(now) for m in models])
        prefill = np.array([m.derived(_mean_prefill) for m in models]) * stretch
        slack = np.array([m.spec.slo.ttft for m in models]) - prefill
        for part in PARTS:
            left = part * delays
            late = rise_of_missing(slack, LEAST_SPREAD + SPREAD * (prefill + left), left)
            found += rates * delays * (late + TIE * left) / len(PARTS)
        return found


PARTS = (0.25, 0.75)
"""Parts of an absence that are left when requests arrive in it: two points of an even spread."""
LANE_STEP = 0.25
"""Seconds of the lane over which its price is taken."""


def _mean_prefill(m: ModelView) -> float:
    """Return the seconds to prefill a prompt of a model's mean length."""
    return m.costs.prefill_seconds(max(1, round(m.traffic.prompts.mean)))


def _lane_share(m: ModelView) -> float:
    """Return the part of the lane's time that a model's decodes need to keep their pace."""
    return m.derived(step_seconds) / max(1e-3, min(r.pace for r in m.running))
