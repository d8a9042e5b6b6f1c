"""Hold deadlines, work and pages of requests in arrays: of one model, and of a whole device.

A model's array is kept with its view, so that a decision makes anew only those of models that have
changed; what depends on the time is computed for all requests at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ballast.core.job import JobLoad
from ballast.core.view import ModelView, RequestView
from ballast.policy.market.harm import TIE, weight_of

Floats = NDArray[np.float64]

LEAST_SPREAD = 0.05
"""Seconds that a forecast may be off by, however little is ahead."""
SPREAD = 0.25
"""Standard deviation of a forecast, as a part of the work ahead."""
_LOGISTIC = math.sqrt(3.0) / math.pi
_FIELDS = 7


@dataclass(frozen=True, slots=True, eq=False)
class WorkAhead:
    """Deadlines of requests, and the work ahead of each: those of one model, waiting ones first, or
    of several models in turn.

    A request's next deadline: of its first token, then of its last one, given its expected length
    and the pace that its service level allows.
    """

    rows: Floats
    """One row for each of the properties below, and a column for each request."""
    waiting: int = 0
    """Of one model's: the first so many wait to be admitted; the others run."""

    @property
    def due(self) -> Floats:
        """Seconds on the device's clock; -inf: it is hopeless."""
        return self._row(0)

    @property
    def ahead(self) -> Floats:
        """Seconds of the lane that its model needs before."""
        return self._row(1)

    @property
    def weight(self) -> Floats:
        return self._row(2)

    @property
    def pages(self) -> Floats:
        """Pages that preempting it would free; 0 while it waits."""
        return self._row(3)

    @property
    def left(self) -> Floats:
        """Tokens that it is expected to generate still."""
        return self._row(4)

    @property
    def restoring(self) -> Floats:
        """Seconds of the lane to compute it again; 0 without blocks."""
        return self._row(5)

    @property
    def kv_bytes(self) -> Floats:
        """Bytes of its KV; 0 without blocks."""
        return self._row(6)

    def _row(self, i: int) -> Floats:
        row: Floats = self.rows[i]
        return row

    def rise(self, now: float, stretch: float, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying all of them by `delay` beyond `base` seconds."""
        return _sum(self.rows, now + base, stretch, delay)

    def rise_of_waiting(self, now: float, stretch: float, delay: float, base: float) -> float:
        """Return the harm as `rise`, of those that wait."""
        return _sum(self.rows[:, : self.waiting], now + base, stretch, delay)

    def harms(self, now: float, stretch: float, delays: Floats) -> Floats:
        """Return the harm of delaying each of them by its own delay."""
        return self.weight * (_late(self.rows, now, stretch, delays) + TIE * delays)


def _sum(rows: Floats, now: float, stretch: float, delay: float) -> float:
    weight = rows[2]
    if not len(weight) or delay <= 0.0:
        return 0.0
    return float(weight @ _late(rows, now, stretch, delay)) + TIE * delay * float(weight.sum())


def _late(rows: Floats, now: float, stretch: float, delay: float | Floats) -> Floats:
    """Return the rise of each request's probability to miss its deadline, with forecasts as of
    `Outlook.forecast`."""
    work = rows[1] * stretch
    return rise_of_missing(rows[0] - now - work, LEAST_SPREAD + SPREAD * work, delay)


def rise_of_missing(slack: Floats, spread: Floats, delay: float | Floats) -> Floats:
    """Return `harm.harm` for many requests, without weights and ties."""
    scale = spread * _LOGISTIC
    x = np.empty((2, len(slack)))
    np.divide(slack, scale, out=x[1])
    np.subtract(x[1], delay / scale, out=x[0])
    np.maximum(x, -60.0, out=x)
    np.minimum(x, 60.0, out=x)
    np.exp(x, out=x)
    x += 1.0
    np.reciprocal(x, out=x)
    rise: Floats = x[0] - x[1]
    return rise


def work_of(m: ModelView) -> WorkAhead:
    """Return the deadlines of a model's requests, and the work ahead of each."""
    step, prefill_seconds = m.derived(step_seconds), m.costs.prefill_seconds
    columns: list[tuple[float, ...]] = []
    before = 0.0
    for r in (*m.waiting, *m.running):
        left = m.expected_outputs(r)
        if r.first is None:
            before += prefill_seconds(r.tokens - r.computed) if r.computed < r.tokens else 0.0
            due, ahead = r.due, before
        else:
            due, ahead = _begun(m, r, step, left)
        restoring = kv_bytes = 0.0
        if r.pages or r.blocks:
            restoring = prefill_seconds(r.computed)
            kv_bytes = r.computed * m.spec.kv_bytes_per_token
        columns.append((due, ahead, weight_of(r.order.rank), r.pages, left, restoring, kv_bytes))
    rows = np.array(columns, np.float64).T if columns else np.empty((_FIELDS, 0))
    return WorkAhead(rows, len(m.waiting))


def _begun(m: ModelView, r: RequestView, step: float, left: int) -> tuple[float, float]:
    """Return the deadline of a request that has its first token, and the work ahead of it, if it is
    to generate `left` tokens still."""
    assert r.first is not None
    if r.first > r.due:
        return -math.inf, step
    ahead = left * step
    if r.generated < 2 and r.computed < r.tokens:
        ahead += m.costs.prefill_seconds(r.tokens - r.computed)
    return r.first + (r.generated + left - 1) * r.pace, ahead


def step_seconds(m: ModelView) -> float:
    """Return the seconds of a model's decode step with its present batch, or one request."""
    n = max(1, len(m.running))
    context = sum(r.tokens for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, n, context))


class DeviceWork:
    """The work ahead of all requests of a device."""

    def __init__(self, models: Iterable[ModelView]) -> None:
        self.models = [m for m in models if not m.idle]
        work = [m.derived(work_of) for m in self.models]
        self.of_all = WorkAhead(
            np.concatenate([w.rows for w in work], 1) if work else np.empty((_FIELDS, 0))
        )
        self.starts = [0, *accumulate(w.rows.shape[1] for w in work)]
        """Columns at which models begin; and of the end."""

    def harms(
        self, models: Sequence[ModelView], now: float, stretch: float, delays: Floats
    ) -> Floats:
        """Return the harm of delaying all requests of each of `models` by its own delay."""
        at = {m.name: i for i, m in enumerate(self.models)}
        each = np.zeros(len(self.models))
        chosen = [at[m.name] for m in models]
        each[chosen] = delays
        harms = self.of_all.harms(now, stretch, np.repeat(each, np.diff(self.starts)))
        found: Floats = np.add.reduceat(harms, self.starts[:-1])[chosen]
        return found

    def request(self, column: int) -> tuple[ModelView, RequestView]:
        """Return a column's request, with its model."""
        at = bisect_right(self.starts, column) - 1
        m, place = self.models[at], column - self.starts[at]
        n = len(m.waiting)
        return m, m.waiting[place] if place < n else m.running[place - n]
