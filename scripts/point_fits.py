"""Fit the cost formulas of `core/cost.py` to medians that were measured of equal sequences.

Prefill: max(floor, start + T*per_token + S*per_pair), T tokens, S query-key pairs. Decode: base +
B*per_sequence + C*per_context + (ceil(B/64) - 1)*per_tile. No coefficient is negative; those of
attention are bounded below by the hardware's peak, which no kernel beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np
from scipy.optimize import least_squares

from ballast.core.cost import TILE
from ballast.sim.fitting import SCALE, Vector, at_least, fit_linear, fit_soft_l1, nonnegative_guess


@dataclass(frozen=True, slots=True)
class Points:
    """Measured jobs of `batch` equal sequences: `tokens` in all, `seconds` each job took.

    `tokens` are the prompts' of a prefill, or the KV tokens that a decode step reads.
    """

    batch: Vector
    tokens: Vector
    seconds: Vector

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]]) -> Self:
        """From (batch, tokens, seconds) of each."""
        return cls(*np.array(points, dtype=np.float64).T)

    def __len__(self) -> int:
        return len(self.seconds)

    def without(self, i: int) -> Points:
        return Points(*(np.delete(v, i) for v in (self.batch, self.tokens, self.seconds)))

    def only(self, i: int) -> Points:
        return Points(self.batch[i : i + 1], self.tokens[i : i + 1], self.seconds[i : i + 1])

    @property
    def pairs(self) -> Vector:
        """Query-key pairs of a prefill under a causal mask."""
        return self.tokens * (self.tokens / self.batch + 1) / 2

    @property
    def decode_terms(self) -> Vector:
        """Terms that the coefficients of a decode step multiply, a row for each point."""
        tiles = np.ceil(self.batch / TILE) - 1
        return np.column_stack([np.ones(len(self)), self.batch, self.tokens, tiles])


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Fitted coefficients of a prefill, in seconds."""

    floor: float
    start: float
    per_token: float
    per_pair: float

    def seconds(self, points: Points) -> Vector:
        work = self.start + points.tokens * self.per_token + points.pairs * self.per_pair
        return np.maximum(self.floor, work)


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Fitted coefficients of a decode step, in seconds."""

    base: float
    per_sequence: float
    per_context: float
    per_tile: float

    def seconds(self, points: Points) -> Vector:
        coefficients = [self.base, self.per_sequence, self.per_context, self.per_tile]
        product: Vector = points.decode_terms @ coefficients
        return product


def errors(fit: PrefillFit | DecodeFit, points: Points) -> Vector:
    """Relative error of each point: predicted / measured - 1."""
    return fit.seconds(points) / points.seconds - 1


def fit_prefill(points: Points, least_per_pair: float = 0.0) -> PrefillFit:
    """Needs points of equal `tokens` and different `batch`; `least_per_pair` in seconds."""
    per_pair = max(least_per_pair, pair_seconds(points))
    attention = per_pair * points.pairs
    ones = np.ones(len(points))
    floor, start, per_token = fit_floored(ones, points.tokens, attention, points.seconds)
    return PrefillFit(floor, start, per_token, per_pair)


def fit_floored(
    unit: Vector, tokens: Vector, attention: Vector, seconds: Vector, least_slope: float = 0.0
) -> list[float]:
    """a, b, c of max(a*unit, b*unit + c*tokens + attention), `attention` being known by now."""
    terms = np.column_stack([unit, tokens])

    def predict(p: Vector) -> Vector:
        seconds: Vector = np.maximum(p[0] * unit, terms @ p[1:] + attention)
        return seconds

    def slopes(p: Vector) -> Vector:
        above = terms @ p[1:] + attention > p[0] * unit
        return np.column_stack([~above * unit, terms * above[:, None]])

    def guess(quantile: float) -> Vector:
        """The floor is at a quantile of all seconds; the line goes through what is above it."""
        floor = np.quantile(seconds / unit, quantile)
        above = seconds >= floor * unit
        return np.array(
            [floor, *nonnegative_guess(terms[above], (seconds - attention)[above], seconds[above])]
        )

    # The form is not convex: from several guesses, the best.
    least = np.array([0.0, 0.0, least_slope])
    found = [
        fit_soft_l1(predict, slopes, np.maximum(guess(quantile), least), least, seconds)
        for quantile in (0.02, 0.2, 0.45)
    ]
    return at_least(min(found, key=lambda r: float(r.cost)).x, least)


def fit_decode(points: Points, least_per_context: float = 0.0) -> DecodeFit:
    """`least_per_context` in seconds."""
    terms = points.decode_terms
    least = np.array([0.0, 0.0, least_per_context, 0.0])
    return DecodeFit(*fit_linear(terms, points.seconds, least))


def pair_seconds(points: Points) -> float:
    """Seconds of a query-key pair, from differences between points of equal tokens (Huber).

    It is fitted before the rest: a joint fit confuses attention with the curvature of matrix
    products.
    """
    more, longer = [], []
    for tokens in np.unique(points.tokens):
        cells = np.flatnonzero(points.tokens == tokens)
        for i, j in combinations(cells, 2):
            mean = (points.seconds[i] + points.seconds[j]) / 2
            more.append((points.pairs[j] - points.pairs[i]) / mean)
            longer.append((points.seconds[j] - points.seconds[i]) / mean)
    unit = float(np.abs(more).max())
    x, y = np.array(more) / unit, np.array(longer)
    found = least_squares(lambda p: p[0] * x - y, [0.0], loss="huber", f_scale=SCALE)
    return max(0.0, float(found.x[0])) / unit
