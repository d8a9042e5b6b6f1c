"""Measure the harm of delays: the expected rise in weighted misses of deadlines.

The unit of prices and gains of the preset `ballast`: pages, admission and order are decided by it.
Pure arithmetic on forecasts.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

TIE = 1e-3
"""Harm of a second of delay beside that of missing deadlines: breaks ties, also between requests
that will be late whatever is done."""
WEIGHT = 8.0
"""Factor between the weights of requests of neighbouring priorities."""
MOST_RANKS = 8
"""Most priorities above or below 0 that weigh differently."""
_LOGISTIC = math.sqrt(3.0) / math.pi
"""Scale of the logistic distribution whose standard deviation is 1."""


class Forecast(NamedTuple):
    """When a request is expected to reach its next deadline, if nothing delays it."""

    slack: float
    """Seconds from the expected time to the deadline; negative: it is expected to be late; -inf: it
    has missed its service level for certain."""
    spread: float
    """Standard deviation of the expected time, in seconds."""
    weight: float = 1.0
    """Misses that a miss counts for."""


@cache
def weight_of(rank: int) -> float:
    """Return the weight of a request of priority `-rank`."""
    return float(WEIGHT ** -max(-MOST_RANKS, min(MOST_RANKS, rank)))


def miss_probability(slack: float, spread: float) -> float:
    """Return the probability to miss a deadline that is `slack` seconds after the expected time."""
    if spread <= 0.0:
        return 1.0 if slack < 0.0 else 0.0
    x = slack / (spread * _LOGISTIC)
    if x >= 0.0:
        tail = math.exp(-x)
        return tail / (1.0 + tail)
    return 1.0 / (1.0 + math.exp(x))


def harm(delay: float, forecast: Forecast) -> float:
    """Return the harm of delaying a request by `delay` seconds (0 or more; may be infinite).

    The rise of its probability to miss its next deadline, which is nothing for the hopeless, and a
    small part of the delay; times its weight.
    """
    slack, spread, weight = forecast
    if delay <= 0.0:
        return 0.0
    rise = 0.0
    if slack > -math.inf:
        rise = miss_probability(slack - delay, spread) - miss_probability(slack, spread)
    return weight * (rise + TIE * delay)
