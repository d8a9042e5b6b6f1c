"""Estimate the duration of a model's jobs from the measured durations of ended jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nlargest

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad

_DECAY = 0.5 ** (1 / 500)
"""Factor on a job's weight with each later job: 500 jobs later it counts half, so that estimates
follow a machine whose speed drifts."""
_PRIOR_WEIGHT = 0.1
"""Weight of the prior's proportions, in jobs: these decide where jobs cannot tell coefficients
apart."""
_MOST_BETWEEN = 64
"""Jobs after which a new fit is due at the latest."""
_LATE_JOBS, _OUTLIERS = 64, 2
"""Jobs among which `late` looks, and the longest delay of these that it takes, from the top: one
that is alone, such as a compilation, is no sign of the next."""
_SWEEPS = 40
"""Passes of coordinate descent over the five coefficients."""


class CostEstimator:
    """Non-negative least squares of the relative error of `StepCosts`' linear form.

    ::

        seconds = base + T*per_token + S*per_pair + B*per_sequence + C*per_context

    Until jobs tell coefficients apart they keep the proportions of `prior`, as a whole scaled to
    what jobs took. Plain arithmetic in a fixed order: equal jobs give equal estimates.
    """

    def __init__(self, prior: StepCosts) -> None:
        self.costs = prior
        """Estimated costs, as of the last fit."""
        self.late = 0.0
        """Seconds by which jobs may take longer than estimated, as a few recent ones did."""
        self._prior = (
            prior.base,
            prior.per_token,
            prior.per_pair,
            prior.per_sequence,
            prior.per_context,
        )
        n = len(self._prior)
        self._products = [[0.0] * n for _ in range(n)]
        """Decayed sums over jobs of x_i * x_j / seconds**2, where j <= i."""
        self._sums = [0.0] * n
        """The same of x_i / seconds."""
        self._shares = [1.0] * n
        """Coefficients of the last fit, over those of the scaled prior."""
        self._jobs = 0
        self._next_fit = 1
        self._delays: deque[float] = deque(maxlen=_LATE_JOBS)
        """Seconds by which recent jobs took longer than estimated; negative: shorter."""

    def observe(self, load: JobLoad, seconds: float) -> None:
        """Add the measurement of an ended job; `seconds` without waiting for layers. Jobs of no
        duration are ignored."""
        if seconds <= 0:
            return
        if self._jobs:
            self._delays.append(seconds - self.costs.of(load))
            self.late = max(0.0, nlargest(_OUTLIERS, self._delays)[-1])
        tokens, _, pairs, sequences, context = load
        row = [x / seconds for x in (1, tokens, pairs, sequences, context)]
        for i, a in enumerate(row):
            products = self._products[i]
            for j in range(i + 1):
                products[j] = products[j] * _DECAY + a * row[j]
            self._sums[i] = self._sums[i] * _DECAY + a
        self._jobs += 1
        if self._jobs >= self._next_fit:
            self._next_fit = self._jobs + min(self._jobs, _MOST_BETWEEN)
            self._fit()

    def _fit(self) -> None:
        """Minimise the relative errors of the jobs and of the scaled prior, by coordinate descent
        from the last fit."""
        scaled = self._scaled_prior()
        n = range(len(scaled))
        products = [[self._product(i, j) * scaled[i] * scaled[j] for j in n] for i in n]
        sums = [self._sums[i] * scaled[i] for i in n]
        shares = self._shares
        for _ in range(_SWEEPS):
            for i in n:
                others = sum(products[i][j] * shares[j] for j in n if j != i)
                free = (sums[i] - others + _PRIOR_WEIGHT) / (products[i][i] + _PRIOR_WEIGHT)
                shares[i] = max(0.0, free)
        base, per_token, per_pair, per_sequence, per_context = (
            share * c for share, c in zip(shares, scaled, strict=True)
        )
        self.costs = StepCosts(base, per_token, per_sequence, per_context, per_pair)

    def _scaled_prior(self) -> Sequence[float]:
        """Return the prior, scaled to fit the measured jobs best."""
        n = range(len(self._prior))
        products = sum(self._sums[i] * self._prior[i] for i in n)
        squares = sum(self._product(i, j) * self._prior[i] * self._prior[j] for i in n for j in n)
        return [products / squares * c for c in self._prior]

    def _product(self, i: int, j: int) -> float:
        return self._products[max(i, j)][min(i, j)]
