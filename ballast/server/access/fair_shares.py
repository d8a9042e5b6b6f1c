"""Fair shares of a capacity that all keys use: one that floods the server does not shut others out.

Dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", 1998): a key may hold as much as is left for others. Alone it gets half; of n that want
all, each gets 1/(n + 1) as places come and go, and as much is left for a newcomer.
"""

from __future__ import annotations

from collections import Counter


class FairShares:
    """How much of one capacity each key holds, in whatever unit the caller counts."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        """By key; those that hold nothing are not in it."""
        self.total = 0

    def fits(self, key: str, amount: int, capacity: int, *, divided: bool) -> bool:
        """Whether `key` may hold `amount` more; not `divided`: the capacity is the only bound."""
        left = capacity - self.total - amount
        return left >= 0 and (not divided or self.held[key] + amount <= left)

    def hold(self, key: str, amount: int) -> None:
        """Take so much, or give it back where it is negative."""
        self.total += amount
        self.held[key] += amount
        if not self.held[key]:
            del self.held[key]
