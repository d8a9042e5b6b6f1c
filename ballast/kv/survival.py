"""Learn how likely cached blocks are used again, by how long ago they were used last.

Kept by `Slabs`, read by the engine's views. Age is counted in blocks of the same cache that have
come out of use since, so that a cache which nobody asks does not age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

_BINS = 24
"""Of ages, each twice as wide as the one before."""
_EDGES = (0.0, *(2.0**i for i in range(_BINS - 1)), float("inf"))
PARTS = 4
"""Parts of a cache, by age, whose chances are told apart."""


class Survival:
    """Chances of cached blocks: from those used again, those dropped before, and those still there,
    of which it is known only that they have not been used until now (Kaplan, Meier 1958)."""

    __slots__ = ("_ended", "_known", "_used", "now")

    def __init__(self) -> None:
        self.now = 0
        """Blocks that have come out of use so far: ages are differences of it."""
        self._used = [0.0] * _BINS
        self._ended = [0.0] * _BINS
        self._known = False

    def used(self, since: int, blocks: int) -> None:
        """Count blocks that are used again, and were used last at `since`."""
        self._used[_bin(self.now - since)] += blocks
        self.dropped(since, blocks)

    def dropped(self, since: int, blocks: int) -> None:
        """Count blocks that were dropped before they were used again."""
        self._ended[_bin(self.now - since)] += blocks
        self._known = True

    def chances(self, oldest: int, newest: int, blocks: int) -> Callable[[], tuple[float, ...]]:
        """Return what computes, from what is known now, the chances to be used again of `PARTS` of
        so many cached blocks, oldest first, which were used last between `oldest` and `newest`,
        evenly spread; none if nothing is known. Few policies ask for them."""
        if not self._known:
            return tuple
        young, old = max(0, self.now - newest), max(0, self.now - oldest)
        return partial(_chances, tuple(self._used), tuple(self._ended), young, old, blocks)


def _chances(
    used: Sequence[float], ended: Sequence[float], young: int, old: int, blocks: int
) -> tuple[float, ...]:
    """Return the chances of blocks of ages from `young` to `old`, by blocks used again and ended by
    the bin of their age."""
    first, last = _bin(young), _bin(old)
    beyond = [1.0] * _BINS  # by the bin of its age: that a block is never used again
    never, at_risk = 1.0, 1.0  # one that never was, so that little is certain of few
    for i in range(_BINS - 1, -1, -1):
        there = 0.0
        if first == last == i:
            there = 1.0 * blocks
        elif first <= i <= last:
            low, high = _EDGES[i : i + 2]
            there = (min(old, high) - max(young, low)) / (old - young) * blocks
        at_risk += ended[i] + there
        never *= 1.0 - used[i] / at_risk
        beyond[i] = never
    ages = (old - (old - young) * (k + 0.5) / PARTS for k in range(PARTS))
    return tuple(1.0 - beyond[_bin(round(age))] for age in ages)


def _bin(age: int) -> int:
    return min(_BINS - 1, max(0, age).bit_length())
