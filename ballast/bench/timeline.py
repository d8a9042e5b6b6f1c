"""Compute a run's series over time for plots and pages: memory by use and model, marks, queue.

Used by `bench.plot` and `bench.page_data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ballast.bench.palette import MARKS
from ballast.bench.report import Report
from ballast.bench.sample import use_of

ACTIONS = {"Activate": "activations", "Evict": "evictions", "Preempt": "preemptions"}
"""Decisions that have a kind of mark of their own."""
FROM_BELOW = ("activations", "weights")
FROM_ABOVE = ("kv", "cached", "lent", "reclaiming")
"""Uses in the order in which they are stacked: from 0 upwards, and from the budget downwards. What
is left between the two stacks is free."""

Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Band:
    """One model's bytes of one use over time, or those that no model has."""

    use: str
    model: str
    """Empty: no single model's."""
    n_bytes: Series
    """Bytes at each sample."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run. Times are seconds from the start of the workload."""

    at: Series
    """Times of the samples, then the run's end, up to which the last sample holds."""
    budget: float
    """Bytes of all devices."""
    below: tuple[Band, ...]
    """Stacked from 0 upwards; bands that stay empty are left out."""
    above: tuple[Band, ...]
    """Stacked from the budget downwards."""
    waiting: Series
    """Requests of all models that wait to be admitted, at each sample."""
    marks: dict[str, tuple[float, ...]]
    """By kind of `palette.MARKS`, when it happened. A request counts as refused when it failed for
    whatever reason."""

    @classmethod
    def of(cls, report: Report, models: Sequence[str]) -> Timeline:
        """`models`: in the order in which their bands are stacked; any others come last."""
        samples = [(s.at, s.owners) for s in report.memory]
        if samples and samples[-1][0] < report.wall_seconds:
            samples.append((report.wall_seconds, samples[-1][1]))
        at = np.array([at for at, _ in samples], dtype=np.float64)
        sums: dict[tuple[str, str], Series] = {}
        for owner in sorted({owner for _, owners in samples for owner in owners}):
            kind, _, name = owner.partition(":")
            key = (use_of(owner), name if kind in ("weights", "slots", "kv", "cached") else "")
            series = np.array([owners.get(owner, 0) for _, owners in samples], dtype=np.float64)
            sums[key] = sums[key] + series if key in sums else series
        waiting = [sum(s.waiting.values()) for s in report.memory]
        order = {model: i for i, model in enumerate(models)}

        def bands(uses: Sequence[str]) -> tuple[Band, ...]:
            found = [Band(*key, series) for key, series in sums.items() if series.any()]
            chosen = [b for b in found if b.use in uses]
            place = len(order)
            return tuple(
                sorted(chosen, key=lambda b: (uses.index(b.use), order.get(b.model, place)))
            )

        return cls(
            at=at,
            budget=float(sum(samples[0][1].values())) if samples else 0.0,
            below=bands(FROM_BELOW),
            above=bands(FROM_ABOVE),
            waiting=np.array(waiting + waiting[-1:] * (at.size - len(waiting)), dtype=np.float64),
            marks=marks_of(report),
        )

    @property
    def uses(self) -> tuple[str, ...]:
        """Uses that the run has bands of, in the order of stacking."""
        there = {b.use for b in (*self.below, *self.above)}
        return tuple(use for use in (*FROM_BELOW, *FROM_ABOVE) if use in there)


def marks_of(report: Report) -> dict[str, tuple[float, ...]]:
    """By kind of mark, when each of them happened; every kind is there."""
    found: dict[str, list[float]] = {kind: [] for kind in MARKS}
    for d in report.decisions:
        if d.refused is None and d.action in ACTIONS:
            found[ACTIONS[d.action]].append(d.at)
    failed = [r.at if r.end is None else r.end for r in report.records if not r.answered]
    found["refused requests"] = sorted(failed)
    return {kind: tuple(times) for kind, times in found.items()}


def stacked(bands: Sequence[Band]) -> list[tuple[Series, Series]]:
    """The lower and the upper bound of each band, stacked in order from 0."""
    bounds: list[tuple[Series, Series]] = []
    total: Series | None = None
    for band in bands:
        lower = np.zeros_like(band.n_bytes) if total is None else total
        total = lower + band.n_bytes
        bounds.append((lower, total))
    return bounds
