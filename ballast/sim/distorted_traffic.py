"""Estimates of traffic that are taken away, or wrong by a factor: what estimates are worth.

Takes the place of `core.traffic.TrafficStats` in runs for ablations, so that whatever reads an
estimate reads the wrong one: admission, memory, published prices, the order of compute, the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ballast.core.estimates import EDGES, Gaps, Reuse
from ballast.core.traffic import Arrivals, Lengths, TrafficStats
from ballast.engine.model import ModelState
from ballast.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Distortion:
    """Factors of the estimates of a model's traffic: 1 leaves one as it is learned, 0 takes it away
    (its prior stands), another value makes it wrong by that."""

    arrivals: float = 1.0
    """Of the rate; gaps between arrivals are shorter by as much. 0: the mean rate alone is known,
    not how gaps are distributed."""
    lengths: float = 1.0
    """Of the tokens of outputs."""
    reused: float = 1.0
    """Of the part of prompts that was found in the cache."""

    def of(self, truth: TrafficStats) -> TrafficStats:
        """Return what is estimated in place of `truth`."""
        seen, outputs, reuse = truth.arrivals, truth.outputs, truth.reuse
        scaled = outputs.mean * self.lengths, outputs.variance * self.lengths**2
        found = min(1.0, reuse.found * self.reused)
        return DistortedTraffic(
            Arrivals(seen.weight * (self.arrivals or 1.0), seen.at, seen.since),
            truth.prompts,
            Lengths(outputs.n, *scaled) if self.lengths else Lengths(),
            truth.gaps if self.arrivals == 1 else _gaps(truth.gaps, self.arrivals),
            Reuse(reuse.n, found) if self.reused else Reuse(),
            truth=truth,
            by=self,
        )

    def impose(self, models: Iterable[ModelState], workload: Workload) -> None:
        """Distort the estimates of a device's models, before its first turn."""
        for m in models:
            m.traffic = self.of(m.traffic)


@dataclass(frozen=True, slots=True)
class DistortedTraffic(TrafficStats):
    """Traffic of a model as it is wrongly estimated."""

    truth: TrafficStats = field(default_factory=TrafficStats)
    by: Distortion = field(default_factory=Distortion)

    def restarted(self, now: float) -> TrafficStats:
        return self.by.of(self.truth.restarted(now))

    def arrived(self, at: float) -> TrafficStats:
        return self.by.of(self.truth.arrived(at))

    def ended(self, prompt: int, output: int, cached: int = 0) -> TrafficStats:
        return self.by.of(self.truth.ended(prompt, output, cached))

    def mean_output(self, unended: int = 0) -> float | None:
        mean = self.truth.mean_output(unended)
        return mean * self.by.lengths if mean is not None and self.by.lengths else None


def _gaps(known: Gaps, factor: float) -> Gaps:
    """Return the distribution of gaps that are shorter by `factor`; none that is known if 0."""
    if not factor:
        return Gaps()
    bins = round(-2 * math.log2(factor))  # an edge is sqrt(2) times the one before
    counts = [0.0] * (len(EDGES) + 1)
    for i, weight in enumerate(known.counts):
        counts[min(len(EDGES), max(0, i + bins))] += weight
    return Gaps(tuple(counts))
