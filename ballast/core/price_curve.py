"""Define a device's curve of marginal prices: what a page more or fewer is worth there.

Published by the engine (`engine.decider`) for fleet policies that decide by price. Prices are
expected rises in weighted misses of deadlines (`policy.market.harm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

POINTS = 8
"""Most points of a curve."""
ALIKE = 1.2
"""Factor within which prices are one to begin with."""


@dataclass(frozen=True, slots=True)
class PriceCurve:
    """What each page is worth to a device, from those that it lacks to those that it can spare."""

    lacking: int = 0
    """Pages that it lacks for KV: the curve begins at as many below zero."""
    points: tuple[tuple[int, float], ...] = ()
    """(pages, price): the price of each page from the point before up to so many pages fewer than
    now; negative: more. Both ascend. What lies beyond the last point cannot be spared."""
    link: float = 0.0
    """Price of having a further page of KV on another device: steps read it over the link."""
    stranded: dict[str, float] = field(default_factory=dict)
    """By absent model with requests: the harm to those that will arrive before it has its turn."""

    @property
    def price(self) -> float:
        """What the first page more is worth, or where none is lacking the first page fewer."""
        if self.lacking:
            return max((price for start, _, price in self._steps() if start < 0), default=0.0)
        return self.price_of(1)

    @property
    def spare(self) -> int:
        """Pages that it can spare at any price."""
        return max(0, self.points[-1][0]) if self.points else 0

    @property
    def free(self) -> int:
        """Pages that it can spare for nothing."""
        return max((pages for pages, price in self.points if not price and pages > 0), default=0)

    def price_of(self, pages: int) -> float:
        """Return the price of the last of `pages` pages that are given up; inf: it has fewer."""
        return next((price for end, price in self.points if end >= pages), inf)

    def cost(self, pages: int) -> float:
        """Return the harm of giving up `pages` pages; inf: it has fewer."""
        return inf if pages > self.spare else self._sum(0, pages)

    def relief(self, pages: int) -> float:
        """Return the harm that `pages` further pages avoid."""
        return self._sum(-pages, 0)

    @property
    def wanted(self) -> list[tuple[int, float]]:
        """(pages, price) of the pages that it lacks, the least wanted first."""
        return [(min(end, 0) - start, price) for start, end, price in self._steps() if start < 0]

    def _sum(self, start: int, end: int) -> float:
        total, at = 0.0, -self.lacking
        for pages, price in self.points:
            low, high = max(at, start), min(pages, end)
            if high > low:
                total += (high - low) * price
            at = pages
        return total

    def _steps(self) -> Iterator[tuple[int, int, float]]:
        start = -self.lacking
        for end, price in self.points:
            yield start, end, price
            start = end


def curve_points(
    levels: Iterable[tuple[int, float]], lacking: int
) -> tuple[tuple[int, float], ...]:
    """Return (pages, price) of at most `POINTS` points, of `levels` at prices that ascend: of
    neighbours that differ least in what their pages cost, one is made, at their mean price."""
    ends: list[int] = []
    sizes: list[int] = []
    prices: list[float] = []

    def join(at: int, end: int, size: int, price: float) -> None:
        both = sizes[at] + size
        prices[at] = (sizes[at] * prices[at] + size * price) / both
        ends[at], sizes[at] = end, both

    start = -lacking
    for end, price in levels:
        if end > start:
            if prices and price <= ALIKE * prices[-1]:
                join(-1, end, end - start, price)
            else:
                ends.append(end)
                sizes.append(end - start)
                prices.append(price)
            start = end
    while len(ends) > POINTS:
        steps = zip(prices, prices[1:], sizes, sizes[1:], strict=False)
        off = [(after - before) * min(n, more) for before, after, n, more in steps]
        at = off.index(min(off))
        join(at, ends.pop(at + 1), sizes.pop(at + 1), prices.pop(at + 1))
    return tuple(zip(ends, prices, strict=True))
