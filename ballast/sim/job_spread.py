"""Vary job durations at random around their mean, and let the machine's speed drift.

A factor is a function of the seed, the device, the model and the moment at which a job begins, so
that a run with leaps, which begins the same jobs at the same moments, has the same factors. Used by
`sim.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp, pi, sin
from statistics import NormalDist, fmean
from struct import pack

PERIOD = 300.0
"""Seconds of a wave of the speed."""
QUANTILES = 32
"""Number of quantiles that represent a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpread:
    """Distribution of job durations around their expected values."""

    quantiles: tuple[float, ...] = ()
    """Equally likely factors on the expected duration, with a mean of 1; empty: always 1."""
    drift: float = 0.0
    """The speed goes up and down by this share, in a wave of `PERIOD` whose phase is the seed's."""
    seed: int = 0


NONE = JobSpread()


class JobFactors:
    """Draws of one device."""

    def __init__(self, spread: JobSpread, device: str) -> None:
        self._spread = spread
        self._key = blake2b(f"{spread.seed}:{device}".encode(), digest_size=32).digest()
        self._phase = 2 * pi * self._draw(b"phase")
        self.used = bool(spread.quantiles or spread.drift)
        """Whether any factor is other than 1."""

    def at(self, now: float, model: str) -> float:
        """Factor on the expected duration of a job of `model` that begins at `now`."""
        factor, quantiles = 1.0, self._spread.quantiles
        if quantiles:
            draw = self._draw(pack("<d", now) + model.encode())
            factor = quantiles[int(draw * len(quantiles))]
        if self._spread.drift:
            factor *= exp(self._spread.drift * sin(2 * pi * now / PERIOD + self._phase))
        return factor

    def _draw(self, what: bytes) -> float:
        """Uniform in [0, 1)."""
        digest = blake2b(what, digest_size=6, key=self._key).digest()
        return int.from_bytes(digest, "little") / 2**48


def lognormal(sigma: float) -> tuple[float, ...]:
    """Quantiles of a lognormal distribution with a mean of 1; `sigma`: deviation of the log."""
    normal = NormalDist()
    return _mean_one([exp(sigma * normal.inv_cdf(p)) for p in _midpoints()])


def quantiles_of(ratios: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """Quantiles of measured over expected duration, with a mean of 1; `weights` above 0."""
    ordered = sorted(zip(ratios, weights, strict=True))
    total, below, found = sum(weights), 0.0, []
    left = iter(ordered)
    ratio, weight = next(left)
    for p in _midpoints():
        while below + weight < p * total:
            below += weight
            ratio, weight = next(left, (ratio, total))
        found.append(ratio)
    return _mean_one(found)


def _midpoints() -> list[float]:
    return [(i + 0.5) / QUANTILES for i in range(QUANTILES)]


def _mean_one(values: Sequence[float]) -> tuple[float, ...]:
    mean = fmean(values)
    return tuple(value / mean for value in values)
