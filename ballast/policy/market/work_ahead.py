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
from ballast.core.request import Precedence
from ballast.core.view import ModelView, RequestView
from ballast.policy.market.harm import TIE, weight_of

Floats = NDArray[np.float64]

LEAST_SPREAD = 0.05
"""Seconds that a forecast may be off by, however little is ahead."""
SPREAD = 0.25
"""Standard deviation of a forecast, as a part of the work ahead."""
_LOGISTIC = math.sqrt(3.0) / math.pi
_FIELDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class WorkAhead:
    """Deadlines of requests, and the work ahead of each: those of one model, waiting ones first, or
    of several models in turn.

    A request's next deadline: of its first token, then of its last one, whenever that will be, at
    the pace that its service level allows.
    """

    rows: Floats
    """One row for each of the properties below, and a column for each request."""
    waiting: int = 0
    """Of one model's: the first so many wait to be admitted; the others run."""

    @property
    def due(self) -> Floats:
        """Seconds on the device's clock: of the first token, then of the next one; -inf: its first
        token was late."""
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

    @property
    def allowed(self) -> Floats:
        """Seconds that its service level allows for the tokens left; 0 before the first one."""
        return self._row(7)

    def _row(self, i: int) -> Floats:
        row: Floats = self.rows[i]
        return row

    def rise(self, now: float, stretch: float, delay: float, base: float = 0.0) -> float:
        """Return the harm of delaying all of them by `delay` beyond `base` seconds."""
        return _sum(self.rows, now + base, stretch, delay)

    def rise_of_waiting(self, now: float, stretch: float, delay: float, base: float) -> float:
        """Return the harm as `rise`, of those that wait."""
        return _sum(self.rows[:, : self.waiting], now + base, stretch, delay)

    def rise_of_first(self, now: float, stretch: float, delay: float) -> float:
        """Return the harm as `rise`, of the first alone."""
        return _sum(self.rows[:, :1], now, stretch, delay)

    def harms(self, now: float, stretch: float, delays: Floats) -> Floats:
        """Return the harm of delaying each of them by its own delay."""
        return self.weight * (_late(self.rows, now, stretch, delays) + TIE * delays)


def _sum(rows: Floats, now: float, stretch: float, delay: float) -> float:
    weight = rows[2]
    if not len(weight) or delay <= 0.0:
        return 0.0
    return float(weight @ _late(rows, now, stretch, delay)) + TIE * delay * float(weight.sum())


def _late(rows: Floats, now: float, stretch: float, delay: float | Floats) -> Floats:
    """Return the rise of each request's probability to miss its deadline.

    When a first token comes is logistic; how long an answer will be is exponential: it is late if
    it ends before the pace allowed has made up for the delay.
    """
    slack, work = rows[0] - now, rows[1] * stretch
    first = rise_of_missing(slack - work, LEAST_SPREAD + SPREAD * work, delay)
    made_up = np.maximum(rows[7] - work, LEAST_SPREAD)
    before = np.minimum(np.maximum(-slack, 0.0) / made_up, 60.0)
    after = np.minimum(np.maximum(delay - slack, 0.0) / made_up, 60.0)
    rise: Floats = np.where(rows[7] > 0.0, np.exp(-before) - np.exp(-after), first)
    return rise


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
        left = outputs_left(m, r)
        if r.first is None:
            before += prefill_seconds(r.tokens - r.computed) if r.computed < r.tokens else 0.0
            due, ahead, allowed = r.due, before, 0.0
        else:
            due = -math.inf if r.first > r.due else r.first + r.generated * r.pace
            ahead, allowed = left * step, left * r.pace
            if r.generated < 2 and r.computed < r.tokens:
                ahead += prefill_seconds(r.tokens - r.computed)
        restoring = kv_bytes = 0.0
        if r.pages or r.blocks:
            restoring = prefill_seconds(r.computed)
            kv_bytes = r.computed * m.spec.kv_bytes_per_token
        weight = weight_of(r.order.rank)
        columns.append((due, ahead, weight, r.pages, left, restoring, kv_bytes, allowed))
    rows = np.array(columns, np.float64).T if columns else np.empty((_FIELDS, 0))
    return WorkAhead(rows, len(m.waiting))


def outputs_left(m: ModelView, r: RequestView) -> int:
    """Return the expected number of tokens that a request will still generate, at least 1."""
    return m.traffic.expected_outputs(r.left, m.derived(_unended))


def mean_outputs(m: ModelView) -> float:
    """Return the expected length of an answer in tokens, from requests that have ended and those
    that have not; as long as none has, the mean of what those here may generate."""
    outputs = m.traffic.outputs
    if outputs.n:
        return outputs.mean + m.derived(_unended) / outputs.n
    there = (*m.waiting, *m.running)
    return sum(outputs_left(m, r) + r.generated for r in there) / max(1, len(there))


def _unended(m: ModelView) -> int:
    """Return the tokens that requests which have not ended have generated."""
    return sum(r.generated for r in (*m.waiting, *m.running))


def precedence(now: float, m: ModelView, r: RequestView) -> Precedence:
    """Return the order in which work is undone, the last first: by arrival, the hopeless after all
    others of their priority."""
    return r.order._replace(arrival=math.inf) if hopeless(now, m, r) else r.order


def hopeless(now: float, m: ModelView, r: RequestView) -> bool:
    """Return whether a request misses its service level even if nothing delays it from now on."""
    if r.first is None:
        return now + m.costs.prefill_seconds(r.tokens - r.computed) > r.due
    left = outputs_left(m, r)
    last_due = r.first + (r.generated + left - 1) * r.pace
    return r.first > r.due or now + left * m.derived(step_seconds) > last_due


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
