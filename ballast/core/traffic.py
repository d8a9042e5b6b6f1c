"""How often requests of one model arrive, and how long those that have ended were.

Values that never change: a snapshot shows the one that was true when it was made, and what decays
with time is computed for the moment of reading, so that no snapshot goes stale while nothing
happens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ballast.core.cost import Traffic

WINDOW = 60.0
"""Seconds after which an arrival weighs 1/e of a new one."""
LEAST_SECONDS = 1.0
"""Seconds that arrivals are divided by at least: the first one alone is no rate."""
LENGTHS_WEIGHT = 0.05
"""Weight of the request that ended last in the averages of lengths."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of requests, each weighing exp(-age / WINDOW). Times in seconds of one clock."""

    weight: float = 0.0
    """Sum of all weights at the time `at`."""
    at: float = 0.0
    """When the latest request arrived."""
    since: float = 0.0
    """When counting began."""

    def and_one(self, at: float) -> Arrivals:
        """These and one at the time `at`, which may lie before the latest."""
        if at < self.at:
            return replace(self, weight=self.weight + math.exp((at - self.at) / WINDOW))
        return Arrivals(self.weight * math.exp((self.at - at) / WINDOW) + 1, at, self.since)

    def per_second(self, now: float) -> float:
        """Return the mean rate until `now`, older arrivals and older time weighing less: over about
        the last `WINDOW` seconds, or over the time since counting began if that is shorter."""
        seconds = -WINDOW * math.expm1((self.since - now) / WINDOW)
        return self.weight * math.exp((self.at - now) / WINDOW) / max(LEAST_SECONDS, seconds)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per request: exponentially weighted averages over those that have ended."""

    n: int = 0
    """Requests that have ended."""
    mean: float = 0.0
    variance: float = 0.0

    def and_one(self, tokens: int) -> Lengths:
        """These and one more request of so many tokens, weighing `LENGTHS_WEIGHT`; the first one
        weighs 1."""
        before = self.mean if self.n else float(tokens)
        off = tokens - before
        variance = (1 - LENGTHS_WEIGHT) * (self.variance + LENGTHS_WEIGHT * off * off)
        return Lengths(self.n + 1, before + off * LENGTHS_WEIGHT, variance)

    @property
    def spread(self) -> float:
        """Standard deviation, in tokens."""
        return math.sqrt(self.variance)


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """Arrivals and lengths of the requests of one model, its adapters' included."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    """Requests that were accepted, in the order in which the device took them in. One that another
    worker had accepted before is no arrival."""
    prompts: Lengths = field(default_factory=Lengths)
    """Prompts of requests that have ended with all of their output, like what follows."""
    outputs: Lengths = field(default_factory=Lengths)

    @classmethod
    def since(cls, now: float) -> TrafficStats:
        """Nothing has been seen yet; counting begins."""
        return cls(Arrivals(0.0, now, now))

    def arrived(self, at: float) -> TrafficStats:
        """One more request arrived."""
        return TrafficStats(self.arrivals.and_one(at), self.prompts, self.outputs)

    def ended(self, prompt: int, output: int) -> TrafficStats:
        """One more request has ended, of so many tokens."""
        return TrafficStats(
            self.arrivals, self.prompts.and_one(prompt), self.outputs.and_one(output)
        )

    def expected(self, now: float) -> Traffic:
        """Return what the model may be expected to be asked: as lately before `now`."""
        return Traffic(self.arrivals.per_second(now), self.prompts.mean, self.outputs.mean)

    def expected_outputs(self, left: int) -> int:
        """Return how many tokens a request is expected to generate from now on, at least 1, where
        `left` are allowed: the mean output, however many it has generated, and before any request
        has ended all that are allowed."""
        return max(1, min(left, round(self.outputs.mean)) if self.outputs.n else left)
