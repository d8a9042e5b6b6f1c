"""Track arrival rates and lengths of one model's recent requests, as immutable values.

Updated by the engine, read by policies through the view. Decay with time is computed at the moment
of reading, so that a snapshot does not become stale while nothing happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ballast.core.cost import Traffic
from ballast.core.estimates import Gaps, Reuse

WINDOW = 60.0
"""Time constant of the decay: seconds after which an arrival weighs 1/e of a new one."""
LEAST_SECONDS = 1.0
"""Minimum seconds by which arrivals are divided, so that the first one alone gives no high rate."""
LENGTHS_WEIGHT = 0.05
"""Weight of the latest ended request in the averages of lengths, once there were many."""
PRIOR_OUTPUT, PRIOR_REQUESTS = 256, 2
"""Tokens of an answer as long as nothing is known, and how many answers that counts as."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of requests, each weighing exp(-age / WINDOW). Times in seconds of one clock."""

    weight: float = 0.0
    """Sum of all weights at the time `at`."""
    at: float = 0.0
    """Time of the latest arrival."""
    since: float = 0.0
    """Time at which counting began."""

    def and_one(self, at: float) -> Arrivals:
        """Return these with one more arrival at the time `at`, which may be before the latest."""
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
        """Return these with one more request of `tokens` tokens: the first ones weigh alike, later
        ones LENGTHS_WEIGHT."""
        weight = max(LENGTHS_WEIGHT, 1.0 / (self.n + 1))
        off = tokens - self.mean
        variance = (1 - weight) * (self.variance + weight * off * off)
        return Lengths(self.n + 1, self.mean + off * weight, variance)

    @property
    def spread(self) -> float:
        """Standard deviation, in tokens."""
        return math.sqrt(self.variance)


@dataclass(slots=True)
class LongestRequest:
    """The longest request of the last one to two `WINDOW`s: a maximum over two windows, of which
    the older one is forgotten."""

    _since: float = 0.0
    _current: int = 0
    _before: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Count a request of `tokens` tokens at `now`."""
        self._turn(now)
        self._current = max(self._current, tokens)

    def tokens(self, now: float) -> int:
        """Return the tokens of the longest request; 0 if there was none."""
        windows = (now - self._since) / WINDOW
        if windows >= 2:
            return 0
        return self._current if windows >= 1 else max(self._current, self._before)

    def _turn(self, now: float) -> None:
        windows = int((now - self._since) / WINDOW)
        if windows >= 1:
            self._before = self._current if windows == 1 else 0
            self._current = 0
            self._since += windows * WINDOW


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """Arrivals and lengths of the requests of one model, its adapters' included."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    """Accepted requests, in the order of receipt; those that another worker had accepted before do
    not count."""
    prompts: Lengths = field(default_factory=Lengths)
    """Prompt lengths of requests that have ended with their whole output; `outputs` likewise."""
    outputs: Lengths = field(default_factory=Lengths)
    gaps: Gaps = field(default_factory=Gaps)
    """Times between arrivals."""
    reuse: Reuse = field(default_factory=Reuse)
    """What prompts of requests that have ended found in the prefix cache."""

    @classmethod
    def since(cls, now: float) -> TrafficStats:
        """Return empty statistics whose counting begins at `now`."""
        return cls(Arrivals(0.0, now, now))

    def restarted(self, now: float) -> TrafficStats:
        """Return statistics whose counting begins at `now`, without what was observed before."""
        return TrafficStats.since(now)

    def arrived(self, at: float) -> TrafficStats:
        """Return these with one more arrival."""
        before = self.arrivals
        gaps = self.gaps.and_one(max(0.0, at - before.at)) if before.weight else self.gaps
        return replace(self, arrivals=before.and_one(at), gaps=gaps)

    def ended(self, prompt: int, output: int, cached: int = 0) -> TrafficStats:
        """Return these with one more ended request of `prompt` and `output` tokens, of whose prompt
        `cached` tokens were found in the cache."""
        return replace(
            self,
            prompts=self.prompts.and_one(prompt),
            outputs=self.outputs.and_one(output),
            reuse=self.reuse.and_one(prompt, cached),
        )

    def rate(self, now: float) -> float:
        """Return the mean requests per second over about the last `WINDOW` seconds."""
        return self.arrivals.per_second(now)

    def chance(self, now: float, seconds: float) -> float:
        """Return the probability that a request arrives within `seconds` from `now`."""
        arrivals = self.arrivals
        if not arrivals.weight:
            return 0.0
        return self.gaps.chance(max(0.0, now - arrivals.at), seconds, arrivals.per_second(now))

    def reused(self, prior: float) -> float:
        """Return how often cached tokens are used again; `prior` if no request has ended."""
        return self.reuse.times(prior)

    def expected(self, now: float) -> Traffic:
        """Return the expected traffic: the recent rate as of `now`, and the mean lengths."""
        return Traffic(self.rate(now), self.prompts.mean, self.outputs.mean)

    def mean_output(self, unended: int = 0) -> float | None:
        """Return the expected length of an answer in tokens; None: no request has ended. `unended`:
        tokens generated by requests that have not ended; without them (0) the mean is of those that
        have, which were the short ones at first."""
        n = self.outputs.n
        seen = PRIOR_REQUESTS * PRIOR_OUTPUT + n * self.outputs.mean + unended
        return seen / (PRIOR_REQUESTS + n) if n else None

    def expected_outputs(self, left: int, unended: int = 0) -> int:
        """Return the expected number of tokens that a request will still generate, at least 1.

        That is the mean output (`mean_output`), however many it has generated, up to the `left`
        allowed ones; `PRIOR_OUTPUT` before any request has ended.
        """
        return self.expecting(unended)(left)

    def expecting(self, unended: int = 0) -> Callable[[int], int]:
        """Return `expected_outputs` as a function of `left`, for many requests."""
        mean = self.mean_output(unended)
        most = max(1, PRIOR_OUTPUT if mean is None else round(mean))
        return lambda left: most if left > most else left if left > 1 else 1
