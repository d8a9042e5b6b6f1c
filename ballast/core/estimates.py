"""Estimate what policies cannot know: when the next request comes, and what is used again.

Immutable values, updated by the engine with events and read by policies through the view
(`ballast.core.traffic.TrafficStats`). Each begins with a prior that few observations outweigh.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

EDGES = tuple(0.1 * 2.0 ** (k / 2) for k in range(24))
"""Upper ends of the bins of gaps, in seconds: from 0.1 s to five minutes; one bin is beyond."""
GAPS_WEIGHT = 0.02
"""Weight of the latest gap in the distribution."""
PRIOR = 0.05
"""Weight of an exponential distribution of the recent rate beside the gaps that were seen."""
REUSE_WEIGHT = 0.05
"""Weight of the latest prompt in the part of prompts that is found in the cache."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Distribution of the times between a model's arrivals: how likely is the next one soon, given
    how long ago the last one was. Periodic arrivals make a peak at their period."""

    counts: tuple[float, ...] = (0.0,) * (len(EDGES) + 1)
    """Weights of the gaps in each bin."""

    def and_one(self, gap: float) -> Gaps:
        """Return these with one more gap, in seconds; earlier ones fade."""
        at = bisect_right(EDGES, gap)
        kept = [c * (1.0 - GAPS_WEIGHT) for c in self.counts]
        kept[at] += 1.0
        return Gaps(tuple(kept))

    def chance(self, age: float, seconds: float, rate: float) -> float:
        """Return the probability that a request comes within `seconds`, `age` seconds after the
        last one. `rate`: the recent mean of arrivals per second, which stands for what has not been
        seen."""
        more = PRIOR * (1.0 + sum(self.counts))
        later = self._beyond(age) + more * math.exp(-rate * age)
        latest = self._beyond(age + seconds) + more * math.exp(-rate * (age + seconds))
        return 1.0 - latest / later if later > 0.0 else 0.0

    def _beyond(self, gap: float) -> float:
        """Return the weight of the gaps longer than `gap`, those of its bin in proportion."""
        at = bisect_right(EDGES, gap)
        beyond = sum(self.counts[at + 1 :])
        if at == len(EDGES):
            return float(self.counts[at] * EDGES[-1] / gap)
        low = EDGES[at - 1] if at else 0.0
        return float(beyond + self.counts[at] * (EDGES[at] - gap) / (EDGES[at] - low))


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of the prompts is found in the prefix cache."""

    n: int = 0
    """Prompts seen."""
    found: float = 0.0
    """Part of their tokens that was cached, the latest weighing most."""

    def and_one(self, prompt: int, cached: int) -> Reuse:
        """Return this with one more prompt of `prompt` tokens, of which `cached` were found."""
        part = cached / max(1, prompt)
        weight = max(REUSE_WEIGHT, 1.0 / (self.n + 1))
        return Reuse(self.n + 1, self.found + weight * (part - self.found))

    def times(self, prior: float) -> float:
        """Return how often a token that is cached now is expected to be used again; `prior` as long
        as no prompt has been seen."""
        if not self.n:
            return prior
        return min(1.0, self.found / max(1e-9, 1.0 - self.found))
