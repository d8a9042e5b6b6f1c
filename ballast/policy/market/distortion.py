"""Distort what is estimated of models' traffic, to show what estimates are worth.

Each estimate has a factor: 1 leaves it as it was learned, 0 takes it away, so that the prior stands
in its place, and any other value makes it wrong by that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ballast.core.estimates import EDGES, Gaps, Reuse
from ballast.core.traffic import Arrivals, Lengths, TrafficStats
from ballast.core.view import DeviceView


@dataclass(frozen=True, slots=True)
class Distortion:
    """Factors of the estimates of a model's traffic."""

    arrivals: float = 1.0
    """Of the rate; gaps between arrivals are shorter by as much. 0: the mean rate alone is known,
    not how gaps are distributed."""
    lengths: float = 1.0
    """Of the tokens of outputs."""
    reused: float = 1.0
    """Of the part of prompts that was found in the cache."""

    def of(self, view: DeviceView) -> DeviceView:
        """Return a view with distorted estimates; the same one if none is."""
        if self == Distortion():
            return view
        models = (replace(m, traffic=self._traffic(m.traffic)) for m in view.models)
        return replace(view, models=tuple(models))

    def _traffic(self, known: TrafficStats) -> TrafficStats:
        if self.arrivals != 1.0:
            seen = known.arrivals
            rate = Arrivals(seen.weight * (self.arrivals or 1.0), seen.at, seen.since)
            known = replace(known, arrivals=rate, gaps=_gaps(known.gaps, self.arrivals))
        if self.lengths != 1.0:
            known = replace(known, outputs=_lengths(known.outputs, self.lengths))
        if self.reused != 1.0:
            seen_reuse = known.reuse
            found = min(1.0, seen_reuse.found * self.reused)
            known = replace(known, reuse=Reuse(seen_reuse.n, found) if self.reused else Reuse())
        return known


def _lengths(known: Lengths, factor: float) -> Lengths:
    if not factor:
        return Lengths()
    n = max(1, round(known.n / factor)) if known.n else 0  # tokens that have not ended count per n
    return Lengths(n, known.mean * factor, known.variance * factor**2)


def _gaps(known: Gaps, factor: float) -> Gaps:
    """Return the distribution of gaps that are shorter by `factor`; none that is known if 0."""
    if not factor:
        return Gaps()
    bins = round(-2 * math.log2(factor))  # an edge is sqrt(2) times the one before
    counts = [0.0] * (len(EDGES) + 1)
    for i, weight in enumerate(known.counts):
        counts[min(len(EDGES), max(0, i + bins))] += weight
    return Gaps(tuple(counts))
