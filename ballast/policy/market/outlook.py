"""Forecast when requests reach their next deadlines, and what delaying them would harm.

Forecasts come from the view alone: deadlines, learned costs, lengths to expect. Prices of the
preset `ballast` (`ballast.policy.supply`) and gains of its claims are made of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ballast.core.cost import copy_seconds
from ballast.core.lazy_property import lazy_property
from ballast.core.request import Precedence
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.coming_pages import FOREVER, FreedPagesForecast, held_pages
from ballast.policy.market.harm import TIE, Forecast, harm
from ballast.policy.market.work_ahead import (
    LEAST_SPREAD,
    SPREAD,
    DeviceWork,
    Floats,
    Lateness,
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


class ForecastFacts(NamedTuple):
    """What forecasts need of a model, as long as its view stays the same."""

    running: bool
    present: bool
    """Whether it has weights on the device, or they are coming."""
    step: float
    """Seconds of a decode step with its present batch, or one request."""
    outputs: float
    """Expected length of an answer in tokens."""
    lane_share: float
    """Part of the lane's time that its decodes need to keep their pace."""
    request_pages: float
    """Pages of KV that a request holds in the mean."""
    waiting_pages: int


def facts(m: ModelView) -> ForecastFacts:
    """Return the facts of a model."""
    step, outputs = m.derived(step_seconds), m.derived(mean_outputs)
    traffic, there = m.traffic, (*m.waiting, *m.running)
    if traffic.outputs.n:
        tokens = traffic.prompts.mean + outputs / 2
    else:
        tokens = sum(r.tokens for r in there) / max(1, len(there))
    running = bool(m.running)
    return ForecastFacts(
        running,
        m.residency is not Residency.ABSENT,
        step,
        outputs,
        step / max(1e-3, min(r.pace for r in m.running)) if running else 0.0,
        tokens / m.spec.block_tokens / m.slab_blocks * m.slab_pages,
        m.derived(waiting_pages),
    )


def waiting_pages(m: ModelView) -> int:
    """Return the pages of KV that a model's waiting requests need; none if it is not here."""
    if m.residency is Residency.ABSENT:
        return 0
    tokens = sum(r.tokens for r in m.waiting)
    blocks = m.spec.blocks_of(tokens)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages


class Outlook:
    """Forecasts of one view."""

    def __init__(
        self,
        view: DeviceView,
        *,
        turn: float | None = None,
        parked: float | None = None,
        displacing: float = 0.0,
        fetches: bool = True,
        freed: float = 1.0,
        survival: bool = True,
        staying: Container[str] = (),
    ) -> None:
        """`turn`: seconds that a model with requests is expected to be absent; None: as long as
        requests hold their pages. `parked`: seconds that one which makes way now is; None: a turn.
        `displacing`: part of the returns for which another model has to make way. `fetches`: KV
        that tiers keep is expected to come back, where that is faster than to compute it again.
        `survival`: chances of cached blocks are told apart by age. `freed`: factor of the times at
        which running requests free their pages; 0: nothing is known of these."""
        self.view, self.now, self._freed, self._turn = view, view.now, freed, turn
        self.survival, self.staying = survival, staying
        self._rates: dict[str, float] = {}
        self._parked = parked
        self.chain = 1.0 / (1.0 - min(MOST_DISPLACING, displacing))
        """Models that make way in turn when one with requests does, itself included."""
        self.fetch_rate = view.kv_fetch_bytes_per_second if fetches else 0.0
        """Bytes of KV per second that come back from tiers; 0: none."""

    @lazy_property
    def work(self) -> DeviceWork:
        """The work ahead of all requests."""
        return self.view.derived(_device_work)

    @lazy_property
    def _facts(self) -> Sequence[ForecastFacts]:
        return [m.derived(facts) for m in self.view.models]

    @lazy_property
    def lateness(self) -> Lateness:
        """The harm of delays to all requests."""
        return self.work.of_all.lateness(self.now, self.stretch)

    @lazy_property
    def stretch(self) -> float:
        """Seconds until work of a second is done beside the decodes of all models."""
        decoding = sum(f.lane_share for f in self._facts if f.running)
        return 1.0 / (1.0 - min(MOST_DECODING, decoding))

    @lazy_property
    def round_seconds(self) -> float:
        """Seconds of a decode step of every model that runs."""
        return sum(f.step for f in self._facts if f.running)

    @lazy_property
    def lane_price(self) -> float:
        """Harm of a second of the lane: all requests of the device are delayed by it."""
        return self.lateness.total(LANE_STEP) / LANE_STEP

    def lane_waits_harm(self, seconds: float) -> float:
        """Return the harm if each round of decode steps becomes longer by so many seconds, for as
        long as the requests of the device take to end."""
        return float(np.interp(seconds, _WAITS, self._harm_of_waits))

    @lazy_property
    def _harm_of_waits(self) -> Floats:
        left = self.work.of_all.left
        return np.array([self.lateness.of(left * w).sum() for w in _WAITS])

    @lazy_property
    def coming(self) -> FreedPagesForecast:
        """Pages that become free by themselves."""
        running = [m for m in self.work.models if m.running] if self._freed else ()
        held = [m.derived(held_pages) for m in running]
        return FreedPagesForecast(held, self.round_seconds * self._freed, self.view.page_bytes)

    @lazy_property
    def backlog(self) -> int:
        """Pages of KV that all waiting requests of models on the device lack."""
        return sum(f.waiting_pages for f in self._facts)

    @lazy_property
    def turn(self) -> float:
        """Seconds that a model with requests is expected to be absent."""
        if self._turn is not None:
            return self._turn
        each = zip(self.view.models, self._facts, strict=True)
        around = self.round_seconds
        stays = [
            around + f.outputs * max(f.step, around) for m, f in each if m.waiting or m.running
        ]
        return min(FOREVER, sum(stays) / max(1, len(stays)))

    @property
    def parked(self) -> float:
        """Seconds that a model which makes way now is expected to be absent."""
        return self.turn if self._parked is None else self._parked

    def copy_seconds(self, pages: int) -> float:
        """Return the seconds that weights of so many pages take to come."""
        return copy_seconds(pages * self.view.page_bytes, self.view.weights_bytes_per_second)

    def absence(self, m: ModelView, pages: int) -> float:
        """Return the seconds until `pages` of a model's weights are there again: a part of a turn,
        and the copy."""
        return self.turn * min(1.0, pages / max(1, m.own_pages)) + self.copy_seconds(pages)

    def absences(self, m: ModelView, pages: Floats) -> Floats:
        """Return the seconds as `absence` for each number of pages."""
        copies = pages * self.view.page_bytes / self.view.weights_bytes_per_second
        seconds: Floats = self.turn * np.minimum(1.0, pages / max(1, m.own_pages)) + copies
        return seconds

    @lazy_property
    def reserve(self) -> int:
        """Pages that KV of requests to be expected will take beside what is in use."""
        _, demand = self._expected_sums
        used = sum(m.kv_pages - m.cached_pages for m in self.view.models)
        return max(self.backlog, round(demand) - used, 0)

    @lazy_property
    def unserved(self) -> float:
        """Requests per second, of models on the device, whose KV has no room beside the weights in
        use."""
        rate, demand = self._expected_sums
        return rate * max(0.0, 1.0 - self._room / demand) if demand else 0.0

    def unserved_without(self, models: Iterable[tuple[str, int]]) -> Iterator[float]:
        """Yield the rate as `unserved` for each of some models and pages, as if it were absent, and
        so many pages more were there for the others."""
        all_rates, all_pages = self._expected_sums
        expected, room = self._expected, self._room
        for name, pages in models:
            less_rate, less = expected.get(name, (0.0, 0.0))
            rate, demand = all_rates - less_rate, all_pages - less
            yield rate * max(0.0, 1.0 - (room + pages) / demand) if demand else 0.0

    @lazy_property
    def _expected_sums(self) -> tuple[float, float]:
        """Requests per second of all models on the device, and the pages of KV that these hold."""
        found = self._expected.values()
        return sum(rate for rate, _ in found), sum(pages for _, pages in found)

    @lazy_property
    def _expected(self) -> Mapping[str, tuple[float, float]]:
        """Requests per second of each model on the device, and the pages of KV that these hold at
        once (Little's law)."""
        around, now = self.round_seconds, self.now
        found, rates = {}, self._rates
        for m, f in zip(self.view.models, self._facts, strict=True):
            if f.present:
                name, longer = m.spec.name, f.step if f.step > around else around
                rates[name] = rate = m.traffic.arrivals.per_second(now)
                found[name] = rate, rate * (around + f.outputs * longer) * f.request_pages
        return found

    @lazy_property
    def _room(self) -> int:
        """Pages that arena and weights in use leave."""
        each = zip(self.view.models, self._facts, strict=True)
        used = sum(m.present_pages for m, f in each if f.present and (f.running or m.waiting))
        return self.view.total - self.view.arena - used

    def is_first(self, r: RequestView) -> bool:
        """Whether a running request is the first of all, which is never undone."""
        return r.order == self.first

    @lazy_property
    def first(self) -> Precedence | None:
        """Precedence of the first of all running requests."""
        return min((m.running[0].order for m in self.view.models if m.running), default=None)

    def comes_first(self, order: Precedence) -> bool:
        """Whether a waiting request comes before all running ones."""
        return self.first is None or order < self.first

    def holds_first(self, m: ModelView) -> bool:
        """Whether the first of all running requests is a model's."""
        return bool(m.running) and self.is_first(m.running[0])

    def rise(self, m: ModelView, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying all requests of a model by `delay` beyond `base`."""
        return m.derived(work_of).lateness(self.now + base, self.stretch).total(delay)

    def rise_of_waiting(self, m: ModelView, delay: float) -> float:
        """Return the harm of delaying the waiting requests of a model by `delay`."""
        return m.derived(work_of).of_waiting().lateness(self.now, self.stretch).total(delay)

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

    def harms_on_arrival(self, m: ModelView, delays: Floats) -> Floats:
        """Return, for each of some delays, the harm as `arrival_harm` and `arrivals_harm`."""
        prefill = m.derived(_mean_prefill) * self.stretch
        slack, late = m.spec.slo.ttft - prefill, []
        for part in (1.0, *PARTS):
            left = part * delays
            spread = LEAST_SPREAD + SPREAD * (prefill + left)
            late.append(rise_of_missing(slack, spread, left) + TIE * left)
        first, *others = late
        rate = m.arrival_rate(self.now)
        harms: Floats = first + rate * delays * sum(others) / len(PARTS)
        return harms

    def harms_of_absence(self, models: Sequence[ModelView], delays: Floats) -> Floats:
        """Return, for each of some models with requests, the harm of its not running for a delay of
        its own: `rise`, and `arrivals_harm`; (models), or (cases, models)."""
        if not models:
            return delays
        return self.work.harms(models, self.lateness, delays) + self._of_arrivals(models, delays)

    def harms_of_a_turn(
        self, models: Sequence[ModelView], turn: float, copies: Floats, bases: Floats
    ) -> Sequence[float]:
        """Return, for each of some models with requests, the harm of its absence for a turn of that
        mean length, which ends at an unknown time, and the seconds of a copy beyond `bases`, from
        which on it would run otherwise; and to requests that arrive meanwhile."""
        if not models:
            return ()
        delays = np.add.outer(turn * np.array(TURNS), copies)
        lateness = self.lateness
        if bases.any():
            now = self.work.later(models, self.now, bases)
            lateness = self.work.of_all.lateness(now, self.stretch)
        harms = self.work.harms(models, lateness, delays) + self._of_arrivals(models, delays)
        means: list[float] = (harms.sum(0) / len(delays)).tolist()
        return means

    def _rate(self, m: ModelView) -> float:
        """Return the requests per second that come for a model."""
        rate = self._rates.get(m.spec.name)
        if rate is None:
            rate = self._rates[m.spec.name] = m.traffic.rate(self.now)
        return rate

    def _of_arrivals(self, models: Sequence[ModelView], delays: Floats) -> Floats:
        """Return the harm as `arrivals_harm` for each of some models."""
        rate, mean_prefill, level = np.array(
            [(self._rate(m), m.derived(_mean_prefill), m.spec.slo.ttft) for m in models]
        ).T
        prefill = mean_prefill * self.stretch
        left = np.multiply.outer(np.array(PARTS), delays)
        spread = LEAST_SPREAD + SPREAD * (prefill + left)
        late = (rise_of_missing(level - prefill, spread, left) + TIE * left).sum(0)
        harms: Floats = rate * delays * late / len(PARTS)
        return harms


TURNS = (0.13, 0.47, 0.98, 2.08)
"""Quantiles of an exponential duration of mean 1, at odd eighths."""
PARTS = (0.25, 0.75)
"""Parts of an absence that are left when requests arrive in it: two points of an even spread."""
LANE_STEP = 0.25
"""Seconds of the lane over which its price is taken."""


def _device_work(view: DeviceView) -> DeviceWork:
    return DeviceWork(view.models)


def _mean_prefill(m: ModelView) -> float:
    """Return the seconds to prefill a prompt of a model's mean length."""
    return m.costs.prefill_seconds(max(1, round(m.traffic.prompts.mean)))
