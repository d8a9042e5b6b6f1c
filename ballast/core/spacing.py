"""Choose layers evenly spaced on a circle (MIRAGE, 5.4), from scratch or by changing a choice.

Used only by `core.rotation`. Pure combinatorics on layer numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from functools import lru_cache
from math import gcd


def grown(n: int, rotatable: tuple[int, ...], m: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return `m` layers: `layers`, with some added in wide gaps or removed from narrow ones."""
    chosen = sorted(set(layers).intersection(rotatable))

    def room(x: int) -> tuple[int, int]:
        i = bisect_left(chosen, x)
        after = bisect_right(chosen, x)
        return (x - chosen[i - 1]) % n or n, (chosen[after % len(chosen)] - x) % n or n

    while len(chosen) < m:
        insort(chosen, max(set(rotatable).difference(chosen), key=lambda x: (min(room(x)), -x)))
    while len(chosen) > m:
        chosen.remove(min(chosen, key=lambda x: (sum(room(x)), x)))
    return tuple(chosen)


def _gaps(around: int, layers: Collection[int]) -> list[int]:
    """Return the gaps from each layer to the next on a circle of `around`."""
    ordered = sorted(layers)
    return [b - a for a, b in zip(ordered, [*ordered[1:], ordered[0] + around], strict=True)]


@lru_cache(maxsize=1024)
def even(around: int, rotatable: tuple[int, ...], m: int) -> tuple[tuple[int, ...], ...]:
    """Return the choices of `m` layers with the largest smallest gap, of these the most even.

    If every layer can rotate these are the shifts of one pattern. Otherwise each choice begins at
    one layer and takes the layers closest to even spacing from there.
    """
    if len(rotatable) == around and 0 < m <= around:
        turns = range(around // gcd(around, m))
        return tuple(tuple(sorted((i * around // m + x) % around for i in range(m))) for x in turns)
    for gap in range(around // max(m, 1), 0, -1):
        found = {c for first in rotatable if (c := _from(first, around, rotatable, m, gap))}
        if found:
            least = min(sum(g * g for g in _gaps(around, c)) for c in found)
            return tuple(sorted(c for c in found if sum(g * g for g in _gaps(around, c)) == least))
    return ()


def _from(
    first: int, around: int, rotatable: tuple[int, ...], m: int, gap: int
) -> tuple[int, ...] | None:
    """Return `m` layers at least `gap` apart, as even as possible, beginning at `first`; None if
    there are none."""
    at = sorted({(layer - first) % around for layer in rotatable})
    latest = [0] * m
    limit = around - gap
    for i in range(m - 1, 0, -1):
        latest[i] = at[bisect_right(at, limit) - 1]
        limit = latest[i] - gap
        if limit < 0:
            return None
    chosen = [0] * m
    for i in range(1, m):
        low = bisect_left(at, chosen[i - 1] + gap)
        high = bisect_right(at, latest[i])
        chosen[i] = min(at[low:high], key=lambda x: abs(x * m - i * around))
    return tuple(sorted((first + x) % around for x in chosen))
