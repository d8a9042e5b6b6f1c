"""The fewest devices with which a service level is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Fewest:
    """What a search found."""

    number: int | None
    """The fewest tried that met the target; None: no number up to the bound did."""
    tried: dict[int, float]
    """Attainment by number of devices, in ascending order."""
    steady: bool
    """Whether, in what was tried, more devices never missed a target that fewer had met."""


def fewest(run: Callable[[int], float], target: float, most: int) -> Fewest:
    """Doubling, then bisection, of `run(devices) -> attainment`, up to `most` devices.

    Both assume that more devices serve no worse, which need not hold: models are placed anew for
    every number. So the neighbours of what was found are tried as well: one more, and two fewer,
    one fewer having failed; should two fewer do, the search goes on from there.
    """
    tried: dict[int, float] = {}

    def meets(number: int) -> bool:
        if number not in tried:
            tried[number] = run(number)
        return tried[number] >= target

    low, high = 0, 1
    while not meets(high):
        if high == most:
            return Fewest(None, dict(sorted(tried.items())), True)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    while high > 2 and meets(high - 2):
        high -= 2
        if meets(high - 1):
            high -= 1
    if high < most:
        meets(high + 1)
    met = [attainment >= target for _, attainment in sorted(tried.items())]
    steady = not any(fewer and not more for fewer, more in pairwise(met))
    return Fewest(high, dict(sorted(tried.items())), steady)
