"""Bound a rate per minute, with bursts of a minute's worth: quotas and budgets of API keys.

The caller passes the time.
"""

from __future__ import annotations


class TokenBucket:
    """Token bucket that holds one minute's limit at most, and refills steadily.

    More can be spent than it holds: the next request then waits until the debt is refilled, too.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, per_minute: int, now: float) -> float:
        """Refill up to `now`, and return the level; `per_minute` is the current limit."""
        filled = self._level + (now - self._at) * self._per_minute / 60
        self._level, self._at = min(filled, per_minute), now
        self._per_minute = per_minute
        return self._level

    def wait(self, n: int, per_minute: int, now: float) -> float:
        """Seconds until the bucket holds `n`; for an `n` beyond its size, until it is full."""
        missing = min(n, per_minute) - self.level(per_minute, now)
        return max(0.0, missing * 60 / per_minute)

    def spend(self, n: int) -> None:
        self._level -= n
