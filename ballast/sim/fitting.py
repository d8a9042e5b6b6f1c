"""Non-negative fits to measured seconds: least soft-L1 of the relative error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

Vector = NDArray[np.float64]

SCALE = 0.05
"""Relative error beyond which a point pulls less."""


def fit_linear(terms: Vector, seconds: Vector, least: Vector) -> list[float]:
    """Coefficients, each at least `least`, of `terms` (points, coefficients).

    One whose terms are all 0, of which the points say nothing, is its `least`.
    """
    known = terms.any(axis=0)
    some, bounds = terms[:, known], least[known]
    start = np.maximum(nonnegative_guess(some, seconds, seconds), bounds)
    found = np.array(least, dtype=np.float64)
    found[known] = fit_soft_l1(lambda p: some @ p, lambda p: some, start, bounds, seconds).x
    return at_least(found, least)


def at_least(found: Vector, least: Vector) -> list[float]:
    return [float(x) for x in np.maximum(found, least)]


def nonnegative_guess(terms: Vector, seconds: Vector, weights: Vector) -> Vector:
    """Non-negative coefficients by least squares of (error / weight): where a fit begins."""
    rows = terms / weights[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    solution: Vector = nnls(rows / scale, np.maximum(seconds, 0.0) / weights)[0] / scale
    return solution


def fit_soft_l1(
    predict: Callable[[Vector], Vector],
    slopes: Callable[[Vector], Vector],
    start: Vector,
    least: Vector,
    seconds: Vector,
) -> Any:
    """SciPy's result; no coefficient is below its `least`."""
    scale = np.maximum(np.abs(slopes(start) / seconds[:, None]).max(axis=0), 1e-12)
    return least_squares(
        lambda p: predict(p) / seconds - 1,
        start,
        lambda p: slopes(p) / seconds[:, None],
        bounds=(least, np.inf),
        x_scale=1 / scale,
        loss="soft_l1",
        f_scale=SCALE,
    )
