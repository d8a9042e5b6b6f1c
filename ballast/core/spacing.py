"""Choose layers evenly spaced on a circle (MIRAGE, 5.4), from scratch or by changing a choice.

Used only by `core.rotation`. Pure combinatorics on layer numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import gcd


def grown(
    n: int, rotatable: tuple[int, ...], m: int, beta: int, now: Mapping[int, int]
) -> dict[int, int]:
    """Return `m` layers, each with its slot of `beta`: those of `now` that can keep theirs, with
    some added where a slot's layers are far apart on the circle, or removed where they are close.

    Layers whose slot is no more are the first to be added to the others.
    """
    free = set(rotatable)
    turns: list[list[int]] = [[] for _ in range(beta)]
    for layer, slot in now.items():
        if slot < beta and layer in free:
            insort(turns[slot], layer)
            free.discard(layer)
    homeless = free.intersection(now)

    def room(layer: int, slot: int) -> tuple[int, int]:
        turn = turns[slot]
        if not turn:
            return n, n
        i, after = bisect_left(turn, layer), bisect_right(turn, layer)
        return (layer - turn[i - 1]) % n or n, (turn[after % len(turn)] - layer) % n or n

    def roomiest(choice: tuple[int, int]) -> tuple[int, int, int, int]:
        layer, slot = choice
        nearest = min(min(room(layer, s)) for s in range(beta))
        return min(room(layer, slot)), nearest, -layer, -slot

    total = sum(map(len, turns))
    while total < m:
        among = homeless or free
        layer, slot = max(((x, s) for x in among for s in range(beta)), key=roomiest)
        insort(turns[slot], layer)
        free.discard(layer)
        homeless.discard(layer)
        total += 1
    while total > m:
        closest = min(
            ((x, s) for s, turn in enumerate(turns) if len(turn) > 1 for x in turn),
            key=lambda choice: (sum(room(*choice)), choice),
        )
        turns[closest[1]].remove(closest[0])
        total -= 1
    return {layer: slot for slot, turn in enumerate(turns) for layer in turn}


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
