"""Hold deadlines, work and pages of requests in arrays: of one model, and of a whole device.

A model's array is kept with its view, so that a decision makes anew only those of models that have
changed; what depends on the time is computed for all requests at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ballast.core.job import JobLoad
from ballast.core.lazy_property import lazy_property
from ballast.core.request import Precedence
from ballast.core.view import ModelView, RequestView
from ballast.policy.market.harm import TIE, weight_of

Floats = NDArray[np.float64]

LEAST_SPREAD = 0.05
"""Seconds that a forecast may be off by, however little is ahead."""
SPREAD = 0.25
"""Standard deviation of a forecast, as a part of the work ahead."""
HOPELESS = 0.05
"""Probability to meet its service level below which a request counts as hopeless."""
_LOGISTIC = math.sqrt(3.0) / math.pi
UNBOUNDED = 2**31
"""More tokens than any answer has."""
_FIELDS = 9
_UNLIKELY, _LIKELY = -math.log(HOPELESS), -math.log1p(-HOPELESS)
"""Mean lengths that an exponential one exceeds with probability HOPELESS, and with the rest."""


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

    @property
    def lost(self) -> Floats:
        """Time on the device's clock after which it is hopeless: it misses its service level, for
        certain or but for `HOPELESS`, even if nothing delays it from then on."""
        return self._row(8)

    def _row(self, i: int) -> Floats:
        row: Floats = self.rows[i]
        return row

    def lateness(self, now: float | Floats, stretch: float) -> Lateness:
        """Return what delays from `now` on harm; `stretch`: seconds for a second of the lane."""
        return Lateness(self.rows, now, stretch)

    def of_waiting(self) -> WorkAhead:
        """Return the work of those that wait."""
        return WorkAhead(self.rows[:, : self.waiting], self.waiting)

    def rise_of_first(self, now: float, stretch: float, delay: float) -> float:
        """Return the harm of delaying the first of all by `delay` seconds."""
        if delay <= 0.0 or not self.rows.shape[1]:
            return 0.0
        due, ahead, weight, *_, allowed, _ = self.rows[:, 0].tolist()
        slack, work = due - now, ahead * stretch
        if allowed > 0.0:
            made_up = max(allowed - work, LEAST_SPREAD)
            before = math.exp(-min(max(-slack, 0.0) / made_up, 60.0))
            late = before - math.exp(-min(max(delay - slack, 0.0) / made_up, 60.0))
        else:
            scale = (LEAST_SPREAD + SPREAD * work) * _LOGISTIC
            x = (slack - work) / scale
            late = _missing(x - delay / scale) - _missing(x)
        return float(weight * late + TIE * delay * weight)


class Lateness:
    """The harm of delays to some requests from a time on: what does not depend on the delay is
    computed once.

    When a first token comes is logistic; how long an answer will be is exponential: it is late if
    it ends before the pace allowed has made up for the delay.
    """

    def __init__(self, rows: Floats, now: float | Floats, stretch: float) -> None:
        self._weight, allowed = rows[2], rows[7]
        self._slack, work = rows[0] - now, rows[1] * stretch
        self._begun = allowed > 0.0
        n_begun = np.count_nonzero(self._begun)
        self._any_begun, self._all_begun = n_begun > 0, n_begun == len(allowed)
        if self._any_begun:
            self._made_up = np.maximum(allowed - work, LEAST_SPREAD)
            self._before = self._beyond(0.0)
        if not self._all_begun:
            self._scale = (LEAST_SPREAD + SPREAD * work) * _LOGISTIC
            self._x = (self._slack - work) / self._scale
            self._missed = _miss(self._x.copy())

    def of(self, delay: float | Floats) -> Floats:
        """Return the harm to each request of a delay, or of one of its own: (requests), or
        (delays, requests)."""
        harms: Floats = self._weight * (self._late(delay) + TIE * delay)
        return harms

    def total(self, delay: float) -> float:
        """Return the harm of delaying all of them."""
        if delay <= 0.0 or not len(self._weight):
            return 0.0
        late = float(self._weight @ self._late(delay))
        return late + TIE * delay * float(self._weight.sum())

    def _late(self, delay: float | Floats) -> Floats:
        """Return the rise of each request's probability to miss its deadline."""
        if self._any_begun:
            begun: Floats = self._before - self._beyond(delay)
            if self._all_begun:
                return begun
        first: Floats = _miss(self._x - delay / self._scale) - self._missed
        if self._any_begun:
            return np.where(self._begun, begun, first)
        return first

    def _beyond(self, delay: float | Floats) -> Floats:
        """Return the probability that an answer is long enough to make up for a delay."""
        x = np.maximum(delay - self._slack, 0.0)
        np.divide(x, self._made_up, out=x)
        np.minimum(x, 60.0, out=x)
        np.negative(x, out=x)
        beyond: Floats = np.exp(x, out=x)
        return beyond


def _miss(x: Floats) -> Floats:
    """Return the logistic probability to miss a deadline at `x`, which is overwritten."""
    np.maximum(x, -60.0, out=x)
    np.minimum(x, 60.0, out=x)
    np.exp(x, out=x)
    x += 1.0
    return np.reciprocal(x, out=x)


def _missing(x: float) -> float:
    return 1.0 / (1.0 + math.exp(min(max(x, -60.0), 60.0)))


def rise_of_missing(slack: float | Floats, spread: Floats, delay: float | Floats) -> Floats:
    """Return `harm.harm` for many requests, without weights and ties."""
    scale = spread * _LOGISTIC
    x = slack / scale
    rise: Floats = _miss(x - delay / scale) - _miss(x)
    return rise


def work_of(m: ModelView) -> WorkAhead:
    """Return the deadlines of a model's requests, and the work ahead of each."""
    step, prefill_seconds = m.derived(step_seconds), m.costs.prefilling()
    expected = m.traffic.expecting(m.derived(_unended))
    token_bytes = m.spec.kv_bytes_per_token
    facts: list[float] = []
    before = 0.0
    for r in (*m.waiting, *m.running):
        left = expected(r.max_tokens - r.generated)
        if r.first is None:
            own = prefill_seconds(r.tokens - r.computed) if r.computed < r.tokens else 0.0
            before += own
            due, ahead, allowed, lost = r.due, before, 0.0, r.due - own
        else:
            due = -math.inf if r.first > r.due else r.first + r.generated * r.pace
            ahead, allowed = left * step, left * r.pace
            lost = _lost(r, left, step)
            if r.generated < 2 and r.computed < r.tokens:
                ahead += prefill_seconds(r.tokens - r.computed)
        restoring = kv_bytes = 0.0
        if r.pages or r.blocks:
            restoring = prefill_seconds(r.computed)
            kv_bytes = r.computed * token_bytes
        weight = weight_of(r.order.rank)
        facts += due, ahead, weight, r.pages, left, restoring, kv_bytes, allowed, lost
    rows = np.array(facts, np.float64).reshape(-1, _FIELDS).T
    return WorkAhead(rows, len(m.waiting))


def outputs_left(m: ModelView, r: RequestView) -> int:
    """Return the expected number of tokens that a request will still generate, at least 1."""
    return m.traffic.expected_outputs(r.left, m.derived(_unended))


def mean_outputs(m: ModelView) -> float:
    """Return the expected length of an answer in tokens, from requests that have ended and those
    that have not; as long as none has, the mean of what those here may generate."""
    mean = m.traffic.mean_output(m.derived(_unended))
    if mean is not None:
        return mean
    left = float(m.derived(work_of).left.sum())
    return (left + m.derived(_unended)) / max(1, len(m.waiting) + len(m.running))


def expected_length(m: ModelView) -> int:
    """Return the expected number of tokens that a request without a bound will still generate."""
    return m.traffic.expected_outputs(UNBOUNDED, m.derived(_unended))


def _unended(m: ModelView) -> int:
    """Return the tokens that requests which have not ended have generated."""
    return sum(r.generated for r in (*m.waiting, *m.running))


def _lost(r: RequestView, left: int, step: float) -> float:
    """Return when an answer that has begun is lost (`WorkAhead.lost`): its length is exponential,
    and it is late if it ends before its pace has made up for what it is behind, or after that has
    used up what it is ahead."""
    assert r.first is not None
    if r.first > r.due:
        return -math.inf
    at_pace, gained = r.first + (r.generated - 1) * r.pace, r.pace - step
    return at_pace + gained * min(left * (_UNLIKELY if gained >= 0 else _LIKELY), r.left)


def precedence(order: Precedence, hopeless: bool) -> Precedence:
    """Return the order in which work is undone, the last first: by arrival, the hopeless after all
    others of their priority."""
    return Precedence(order.rank, math.inf, order.sequence) if hopeless else order


def step_seconds(m: ModelView) -> float:
    """Return the seconds of a model's decode step with its present batch, or one request."""
    n = max(1, len(m.running))
    context = sum(r.tokens for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, n, context))


class DeviceWork:
    """The work ahead of all requests of a device."""

    def __init__(self, models: Iterable[ModelView]) -> None:
        self.models = [m for m in models if m.waiting or m.running]
        each = [m.derived(work_of).rows for m in self.models]
        self._sizes = [len(m.waiting) + len(m.running) for m in self.models]
        self.starts = [0, *accumulate(self._sizes)]
        """Columns at which models begin; and of the end."""
        rows = np.empty((_FIELDS, self.starts[-1]))
        self.of_all = WorkAhead(np.concatenate(each, axis=1, out=rows) if each else rows)

    def least_weight(self) -> float:
        """Return the least of what all requests of a model weigh together; 0: there are none."""
        if not self.models:
            return 0.0
        return float(np.add.reduceat(self.of_all.weight, self.starts[:-1]).min())

    @lazy_property
    def _at(self) -> Mapping[str, int]:
        """Places of models by name."""
        return {m.spec.name: i for i, m in enumerate(self.models)}

    def harms(self, models: Sequence[ModelView], lateness: Lateness, delays: Floats) -> Floats:
        """Return the harm of delaying all requests of each of `models` by its own delay: (models),
        or (cases, models)."""
        chosen = self._places(models)
        harms = lateness.of(self._each(chosen, delays))
        found: Floats = np.add.reduceat(harms, self.starts[:-1], axis=-1)[..., chosen]
        return found

    def later(self, models: Sequence[ModelView], now: float, seconds: Floats) -> Floats:
        """Return `now` for each request, later by so many seconds for those of each of `models`."""
        return now + self._each(self._places(models), seconds)

    def _places(self, models: Sequence[ModelView]) -> list[int]:
        return [self._at[m.spec.name] for m in models]

    def _each(self, chosen: Sequence[int], values: Floats) -> Floats:
        """Spread values of some models over all columns; 0 for those of others."""
        each = np.zeros((*values.shape[:-1], len(self.models)))
        each[..., chosen] = values
        return np.repeat(each, self._sizes, axis=-1)

    def request(self, column: int) -> tuple[ModelView, RequestView]:
        """Return a column's request, with its model."""
        at = bisect_right(self.starts, column) - 1
        m, place = self.models[at], column - self.starts[at]
        n = len(m.waiting)
        return m, m.waiting[place] if place < n else m.running[place - n]
