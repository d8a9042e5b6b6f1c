"""Search the highest arrival rate at which a service level is met, by bisection.

Used by benchmarks, which pass a function that runs a workload at a rate.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import sqrt

from ballast.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Result of a search. Rates are factors on the workload's arrival rate."""

    rate: float
    """The highest rate tried that met the target with no failure tried below it; 0 if none did."""
    failed_at: float | None
    """The lowest rate tried that missed the target; None: all met it and the maximum is higher."""
    tried: tuple[tuple[float, float], ...]
    """(rate, attainment), in the order tried."""


Run = Callable[[float], float]
"""rate -> attainment (0 to 1)."""


def bisect_max_rate(
    run: Run,
    target: float = 0.99,
    *,
    lo: float,
    hi: float,
    steps: int = 6,
    widen: int = 4,
) -> RateSearch:
    """Bisection, in the logarithm of the rate, of `run(rate) -> attainment` (0 to 1).

    First `lo` is halved until it meets `target` and `hi` doubled until it misses it, each at most
    `widen` times; then `steps` halvings of the interval. No rate is run twice. Attainment that
    rises and falls with the rate by chance cannot fool it into a rate that was not seen to pass:
    the result passed, and the next higher rate tried did not. Runs should use the same seeds at
    every rate; that is the caller's part. Raises ConfigError for bounds that make no interval.
    """
    search = searching(target, lo=lo, hi=hi, steps=steps, widen=widen)
    return search_in_turns({"": (run, search)})[""]


def search_in_turns(
    searches: Mapping[str, tuple[Run, Generator[float, float, RateSearch]]],
) -> dict[str, RateSearch]:
    """Several searches, each made by `searching`, a run of each in every round.

    The order is reversed in every other round. A search that has ended is left out.
    """
    found: dict[str, RateSearch] = {}
    due = {name: next(search) for name, (_, search) in searches.items()}
    turn = 0
    while due:
        for name in list(due)[:: 1 if turn % 2 == 0 else -1]:
            run, search = searches[name]
            try:
                due[name] = search.send(run(due[name]))
            except StopIteration as ended:
                found[name] = ended.value
                del due[name]
        turn += 1
    return {name: found[name] for name in searches}


def searching(
    target: float, *, lo: float, hi: float, steps: int, widen: int
) -> Generator[float, float, RateSearch]:
    """Bisect as `bisect_max_rate`: yield each rate to run, receive its attainment."""
    if not 0 < lo < hi < float("inf"):
        raise ConfigError("lo, hi", (lo, hi), "0 < lo < hi")
    tried: list[tuple[float, float]] = []

    def passes(rate: float) -> Generator[float, float, bool]:
        attainment = yield rate
        tried.append((rate, attainment))
        return attainment >= target

    low, high = lo, hi
    failed: float | None = None
    for _ in range(widen + 1):
        if (yield from passes(low)):
            break
        failed, low = low, low / 2
    else:
        return RateSearch(0.0, failed, tuple(tried))
    if failed is None:
        for _ in range(widen + 1):
            if not (yield from passes(high)):
                failed = high
                break
            low, high = high, high * 2
        else:
            return RateSearch(low, None, tuple(tried))
    for _ in range(steps):
        middle = sqrt(low * failed)
        if (yield from passes(middle)):
            low = middle
        else:
            failed = middle
    return RateSearch(low, failed, tuple(tried))
