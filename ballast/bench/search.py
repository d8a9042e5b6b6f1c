"""The highest arrival rate at which a service level is met (DESIGN section 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from ballast.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RateSearch:
    """What a search found. Rates are factors on the workload's arrival rate."""

    rate: float
    """The highest rate tried that met the target with no failure tried below it; 0 if none did."""
    failed_at: float | None
    """The lowest rate tried that missed the target; None: all met it and the maximum is higher."""
    tried: tuple[tuple[float, float], ...]
    """(rate, attainment), in the order tried."""


def bisect_max_rate(
    run: Callable[[float], float],
    target: float = 0.99,
    *,
    lo: float,
    hi: float,
    steps: int = 6,
    widen: int = 4,
) -> RateSearch:
    """Bisection, in the logarithm of the rate, of `run(rate) -> attainment` (0 to 1).

    First `lo` is halved until it meets `target` and `hi` doubled until it misses it, each at most
    `widen` times; then `steps` halvings of the interval. No rate is run twice. Attainment that
    rises and falls with the rate by chance cannot fool it into a rate that was not seen to pass:
    the result passed, and the next higher rate tried did not. Runs should use the same seeds at
    every rate; that is the caller's part. Raises ConfigError for bounds that make no interval.
    """
    if not 0 < lo < hi < float("inf"):
        raise ConfigError("lo, hi", (lo, hi), "0 < lo < hi")
    tried: list[tuple[float, float]] = []

    def passes(rate: float) -> bool:
        attainment = run(rate)
        tried.append((rate, attainment))
        return attainment >= target

    low, high = lo, hi
    failed: float | None = None
    for _ in range(widen + 1):
        if passes(low):
            break
        failed, low = low, low / 2
    else:
        return RateSearch(0.0, failed, tuple(tried))
    if failed is None:
        for _ in range(widen + 1):
            if not passes(high):
                failed = high
                break
            low, high = high, high * 2
        else:
            return RateSearch(low, None, tuple(tried))
    for _ in range(steps):
        middle = sqrt(low * failed)
        if passes(middle):
            low = middle
        else:
            failed = middle
    return RateSearch(low, failed, tuple(tried))
