"""Search the fewest devices that meet a service level, and when further random draws can stop.

Used by `bench.planning`, which passes a function that runs a workload on a number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SETTLED = 3
"""Draws in a row that must not widen an interval before it counts as settled."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Fewest:
    """Result of a search for one draw of the workload."""

    number: int | None
    """The fewest tried that met the target; None: no number up to the bound did."""
    tried: dict[int, float]
    """Attainment by number of devices, in ascending order."""
    steady: bool
    """Whether, in what was tried, more devices never missed a target that fewer had met."""


def fewest(
    run: Callable[[int], float],
    target: float,
    most: int,
    guess: int = 1,
    *,
    neighbours: bool = True,
) -> Fewest:
    """From a `guess` up or down in doubling steps, then bisection, of `run(devices) -> attainment`,
    up to `most` devices.

    Both assume that more devices serve no worse, which need not hold: models are placed anew for
    every number. So the `neighbours` of what was found are tried as well: one more, and two fewer,
    one fewer having failed; should two fewer do, the search goes on from there.
    """
    tried: dict[int, float] = {}

    def meets(number: int) -> bool:
        if number not in tried:
            tried[number] = run(number)
        return tried[number] >= target

    low, high, step = 0, min(guess, most), 1
    if meets(high):
        while high - step > 0 and meets(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    else:
        while not meets(high):
            if high == most:
                return Fewest(None, dict(sorted(tried.items())), True)
            low, high, step = high, min(high + step, most), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    while neighbours and high > 2 and meets(high - 2):
        high -= 2
        if meets(high - 1):
            high -= 1
    if neighbours and high < most:
        meets(high + 1)
    met = [attainment >= target for _, attainment in sorted(tried.items())]
    steady = not any(fewer and not more for fewer, more in pairwise(met))
    return Fewest(high, dict(sorted(tried.items())), steady)


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure an answer is that was found for several draws of a workload."""

    least: int
    """The fewest devices that sufficed for any of them."""
    most: int
    """The fewest that sufficed for all."""
    draws: int

    @property
    def at_least(self) -> float:
        """Share of further draws for which `most` devices suffice, with 95 % confidence: the
        one-sided tolerance bound of the maximum of the draws (Wilks 1941). Somewhat too high where
        draws ended because the last ones widened nothing."""
        return float((1 - CONFIDENCE) ** (1 / self.draws))


def settled(draws: Sequence[int]) -> bool:
    """Whether the last `SETTLED` draws left the interval of those before as it was."""
    before = draws[:-SETTLED]
    return bool(before) and all(min(before) <= n <= max(before) for n in draws[-SETTLED:])
