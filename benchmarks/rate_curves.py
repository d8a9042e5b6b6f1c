"""Attainment of service levels over rates, and the rate up to which a target is met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RATES = tuple(0.25 * 2 ** (k / 2) for k in range(12))
"""Factors on a trace's rate, each sqrt(2) times the one before."""
TARGETS = (0.99, 0.95, 0.9)
HOPELESS = 0.85
"""A curve ends at the second rate in a row with less."""


@dataclass(frozen=True)
class Curve:
    """The share of requests that attain their service levels, by rate, from the lowest on."""

    attained: Mapping[float, float]

    def rate_at(self, target: float) -> float:
        """The highest rate up to which the target is met at all rates; between the last that meets
        it and the first that does not, by a line over the logarithm of the rate. 0: it is missed at
        the lowest rate already."""
        met: tuple[float, float] | None = None
        for rate, share in sorted(self.attained.items()):
            if share < target:
                if met is None:
                    return 0.0
                part = (met[1] - target) / (met[1] - share)
                return float(met[0] * (rate / met[0]) ** part)
            met = rate, share
        return met[0] if met is not None else 0.0


def curve(attainment: Callable[[float], float], rates: Sequence[float] = RATES) -> Curve:
    """Measure from the lowest rate up, until it is hopeless."""
    attained: dict[float, float] = {}
    low = 0
    for rate in sorted(rates):
        attained[rate] = share = attainment(rate)
        low = low + 1 if share < HOPELESS else 0
        if low == 2:
            break
    return Curve(attained)


def best(curves: Sequence[Curve], target: float) -> float:
    """The highest of their rates at the target."""
    return max(c.rate_at(target) for c in curves)


@dataclass(frozen=True)
class Ratios:
    """Of rates, case by case."""

    by_case: Mapping[str, float]
    """Cases in which both rates lie within the grid."""
    edges: Mapping[str, str]
    """The others, as they are printed: a side misses the target at the lowest rate already, or
    meets it at the highest, so that there is a bound at most."""
    lost: bool
    """Whether there is an edge at which only the first side misses the target."""

    @property
    def mean(self) -> float | None:
        """Geometric, over the cases within the grid."""
        return statistics.geometric_mean(self.by_case.values()) if self.by_case else None

    @property
    def worst(self) -> float | None:
        """0 if the first side alone misses the target at the lowest rate in some case."""
        return 0.0 if self.lost else min(self.by_case.values(), default=None)

    def to_json(self) -> dict[str, object]:
        return {
            "mean": self.mean,
            "worst": self.worst,
            "by_case": dict(self.by_case),
            "edges": dict(self.edges),
        }


def ratios(
    of: Mapping[str, float],
    over: Mapping[str, float],
    lowest: float = RATES[0],
    highest: float = RATES[-1],
) -> Ratios:
    """`of` over `over`, both rates by case, 0 where the target is missed at the lowest rate."""
    by_case: dict[str, float] = {}
    edges: dict[str, str] = {}
    for case, rate in of.items():
        other = over[case]
        inside = [0 < r < highest for r in (rate, other)]
        if all(inside):
            by_case[case] = rate / other
        elif not rate and not other:
            edges[case] = "both missed at the lowest rate"
        elif not any(inside) and rate and other:
            edges[case] = "both met at the highest rate"
        else:
            above = rate > other
            bound = (rate or lowest) / (other or lowest)
            edges[case] = f"{'at least' if above else 'at most'} {bound:.2f}"
    return Ratios(by_case, edges, any(over[case] and not rate for case, rate in of.items()))
