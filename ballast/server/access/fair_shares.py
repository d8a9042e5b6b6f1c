"""Divide one capacity fairly between API keys, so that a key that floods the server leaves room for
the others.

Dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", 1998): a key may hold at most the amount that is still free. A single key gets half of
the capacity; of n keys that want all of it, each gets 1/(n + 1), and the last share stays free for
a newcomer. `gate` uses it for open requests and for the memory of their bodies.
"""

from __future__ import annotations

from collections import Counter


class FairShares:
    """Amounts of one capacity that each key holds, in any unit that the caller counts."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        """Amount held, by key; keys that hold nothing are left out."""
        self.total = 0

    def fits(self, key: str, amount: int, capacity: int, *, divided: bool) -> bool:
        """Whether `key` may hold `amount` more. With `divided`, only up to its fair share; else
        `capacity` is the only bound."""
        left = capacity - self.total - amount
        return left >= 0 and (not divided or self.held[key] + amount <= left)

    def hold(self, key: str, amount: int) -> None:
        """Add `amount` to the amount that `key` holds; a negative `amount` releases."""
        self.total += amount
        self.held[key] += amount
        if not self.held[key]:
            del self.held[key]
