"""Record the token times of one request (TTFT, TPOT), and quantiles over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ballast.core.clock import Clock

KEPT = 2000
"""Most latencies kept for each model and kind; the oldest are dropped first."""


@dataclass(slots=True)
class Timing:
    """Token times of one request, in seconds on the server's clock."""

    arrived: float
    first: float | None = None
    last: float | None = None
    """Time of the latest token."""
    queued: float | None = None
    """Duration in seconds from arrival at the worker to the first admission."""
    activating: float = 0.0
    """Seconds of `queued` during which the model's weights were coming."""

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds; None before it."""
        return None if self.first is None else self.first - self.arrived

    def tpot(self, output_tokens: int) -> float | None:
        """Mean time per output token after the first, in seconds; None with fewer than two
        tokens."""
        if self.first is None or self.last is None or output_tokens < 2:
            return None
        return (self.last - self.first) / (output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of `count` latencies, in seconds."""

    count: int
    p50: float
    p99: float


class Recent:
    """Latencies of the last `seconds`, and their quantiles."""

    def __init__(self, clock: Clock, seconds: float = 60.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def add(self, latency: float) -> None:
        self._seen.append((self._clock.now(), latency))

    def quantiles(self) -> Quantiles | None:
        """Quantiles of the recent latencies; None if there are none."""
        since = self._clock.now() - self._seconds
        return quantiles(latency for at, latency in list(self._seen) if at >= since)


def quantiles(latencies: Iterable[float]) -> Quantiles | None:
    """Quantiles of latencies by nearest rank; None if there are none."""
    ranked = sorted(latencies)
    if not ranked:
        return None

    def at(percent: int) -> float:
        return ranked[-(-percent * len(ranked) // 100) - 1]

    return Quantiles(len(ranked), at(50), at(99))
