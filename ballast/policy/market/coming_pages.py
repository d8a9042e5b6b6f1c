"""Forecast how many pages become free by themselves, as running requests end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ballast.core.view import ModelView
from ballast.policy.market.work_ahead import Floats, expected_length

FOREVER = 10.0
"""Seconds for which a request is taken to wait if nothing that runs will free its pages."""
_TIMES = np.concatenate(([0.0], FOREVER * 2.0 ** np.arange(-10.0, 0.5, 0.5)))
"""Seconds at which pages are counted; in between they come evenly."""

_LEAST = 1e-9


class HeldPages(NamedTuple):
    """Pages that the running requests of a model hold, by what is known of their ends."""

    length: int
    """Tokens that a request is expected to generate still, however many it has."""
    requests: int
    """Those that may generate at least as many, and hold pages."""
    pages: int
    """Of these."""
    growth: float
    """Bytes by which these grow with each token."""
    bounded: Sequence[tuple[int, int]]
    """Tokens that each of the others may generate, and its pages."""


def held_pages(m: ModelView) -> HeldPages:
    """Return the pages that a model's running requests hold."""
    length, pages, n = m.derived(expected_length), 0, 0
    bounded: list[tuple[int, int]] = []
    for r in m.running:
        if r.left < length:
            bounded.append((r.left, r.pages))
        else:
            pages, n = pages + r.pages, n + (r.pages > 0)
    return HeldPages(length, n, pages, float(n * m.spec.kv_bytes_per_token), bounded)


class FreedPagesForecast:
    """Pages that become free by themselves, beside those by which other requests grow.

    How long an answer will be is exponential, as in `work_ahead.Lateness`: of many that run some
    end soon, though each is expected to end late; the last of a few is not waited for forever (of
    `n` alike the k-th ends, in the mean, after the log of (n + 1/2) / (n - k + 1/2) of its length).
    One that is bounded to fewer tokens than expected ends then.
    """

    def __init__(self, held: Sequence[HeldPages], token: float, page_bytes: int) -> None:
        """`token`: seconds until every request has generated one more."""
        token = max(token, _LEAST)
        times, free = _with_ends(held, token)
        if held:
            length, n, pages, growth = np.array([h[:4] for h in held], np.float64).T
            tokens = times[:, np.newaxis] / token
            grown = pages + tokens * (growth / page_bytes)
            ended = (pages - grown * np.exp(-tokens / length)).sum(1)
            free = free + ended * (1.0 + 0.5 / max(1.0, n.sum()))
        self._free, self._times = np.maximum.accumulate(np.maximum(free, 0.0)), times
        self._free_list: list[float] = self._free.tolist()

    def wait(self, pages: int) -> float:
        """Return the seconds until so many pages have become free; `FOREVER` at most."""
        free, times = self._free_list, self._times
        if pages <= 0:
            return 0.0
        after = bisect_left(free, pages)
        if after == len(free):
            return FOREVER
        part = (pages - free[after - 1]) / (free[after] - free[after - 1])
        return float(times[after - 1] + part * (times[after] - times[after - 1]))

    def waits(self, pages: Floats) -> Floats:
        """Return the seconds as `wait` for each number of pages."""
        free, times = self._free, self._times
        asked = np.minimum(pages, free[-1])
        after = np.maximum(1, free.searchsorted(asked))
        rise = np.maximum(free[after] - free[after - 1], _LEAST)
        part = (asked - free[after - 1]) / rise
        found = times[after - 1] + part * (times[after] - times[after - 1])
        seconds: Floats = np.where(pages > free[-1], FOREVER, found)
        return np.where(pages > 0, seconds, 0.0)


def _with_ends(held: Sequence[HeldPages], token: float) -> tuple[Floats, Floats]:
    """Return the times at which pages are counted, twice those at which bounded requests end, and
    the pages of those that have ended."""
    ends = [(min(left * token, FOREVER), pages) for h in held for left, pages in h.bounded]
    if not ends:
        return _TIMES, np.zeros(len(_TIMES))
    seconds, pages = np.array(sorted(ends), np.float64).T
    ended = pages.cumsum()
    before = np.concatenate(([0.0], ended))[seconds.searchsorted(_TIMES)]
    times = np.concatenate((_TIMES, seconds, seconds))
    freed = np.concatenate((before, ended - pages, ended))
    order = np.lexsort((freed, times))
    return times[order], freed[order]
