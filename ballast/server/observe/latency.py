"""Record the token times of one request (TTFT, TPOT), and quantiles over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ballast.core.clock import Clock

KEPT = 2000
"""Most latencies kept of one model and kind; the oldest go first."""


@dataclass(slots=True)
class Timing:
    """Seconds on the server's clock."""

    arrived: float
    first: float | None = None
    last: float | None = None
    """Of the latest token."""
    queued: float | None = None
    """Seconds, not a moment: from arrival at the worker to its first admission."""

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first is None else self.first - self.arrived

    def tpot(self, output_tokens: int) -> float | None:
        """Mean time per output token after the first; None where there is no second."""
        if self.first is None or self.last is None or output_tokens < 2:
            return None
        return (self.last - self.first) / (output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `count` latencies, in seconds."""

    count: int
    p50: float
    p99: float


class Recent:
    """Latencies of the last `seconds`, by nearest rank."""

    def __init__(self, clock: Clock, seconds: float = 60.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def add(self, latency: float) -> None:
        self._seen.append((self._clock.now(), latency))

    def quantiles(self) -> Quantiles | None:
        """None where nothing came of late."""
        since = self._clock.now() - self._seconds
        return quantiles(latency for at, latency in list(self._seen) if at >= since)


def quantiles(latencies: Iterable[float]) -> Quantiles | None:
    """By nearest rank; None of none."""
    ranked = sorted(latencies)
    if not ranked:
        return None

    def at(percent: int) -> float:
        return ranked[-(-percent * len(ranked) // 100) - 1]

    return Quantiles(len(ranked), at(50), at(99))
