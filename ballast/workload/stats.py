"""Compute statistics of a workload: rates, burstiness, lengths, and models in use at once.

The rules are those of Prism, appendix A.1: a model is *active* at a moment if it received a
request within the last two minutes; a *switch* is any change of the set of active models; an *idle
interval* is a gap of more than 10 s between two requests of a model. Activity is also reported with
10 s in place of two minutes, which hide what a memory manager can use. Used by `Workload.stats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ACTIVE_SECONDS = 120.0
IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts over all requests."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Activity:
    """Use of the models under the rule "active for `memory` seconds after each request"."""

    memory: float
    share: float
    """Mean share of the workload's models that are active, over time; 0 to 1."""
    switches_per_hour: float
    """Moments, strictly between first and last arrival, at which the active set changes."""


@dataclass(frozen=True, slots=True)
class WorkloadStats:
    """Statistics of one workload. Times in seconds, rates per second unless named otherwise."""

    requests: int
    models: int
    seconds: float
    """From the first arrival to the last."""
    rate: float
    """Requests / seconds."""
    cv: float
    """Standard deviation / mean of the gaps between arrivals, all models together."""
    prompt: TokenCounts
    output: TokenCounts
    top1: float
    """Share of requests that go to the most popular model."""
    top5: float
    active: Activity
    """Activity by Prism's idle threshold of two minutes."""
    active_10s: Activity
    idle_per_hour: float
    """Idle intervals per hour and model, mean over the models."""
    minute_cv: float
    """CV of requests per minute, mean over the models."""
    volatile: float
    """Share of the models whose CV of requests per minute is above 1."""


def measure(
    arrivals: Mapping[str, Sequence[float]], prompts: Iterable[int], outputs: Iterable[int]
) -> WorkloadStats:
    """Statistics from each model's arrival times (seconds, ascending) and all token counts.

    Raises ValueError if there is no request at all.
    """
    times = np.sort(np.concatenate([np.asarray(a, dtype=np.float64) for a in arrivals.values()]))
    if times.size == 0:
        raise ValueError("no requests")
    start, end = float(times[0]), float(times[-1])
    seconds = end - start
    counts = sorted((len(a) for a in arrivals.values()), reverse=True)
    minute_cvs = [minute_cv(a, start, end) for a in arrivals.values()]
    idle = [idle_intervals(a) for a in arrivals.values()]
    return WorkloadStats(
        requests=int(times.size),
        models=len(arrivals),
        seconds=seconds,
        rate=times.size / seconds if seconds > 0 else 0.0,
        cv=gap_cv(times),
        prompt=lengths(prompts),
        output=lengths(outputs),
        top1=counts[0] / times.size,
        top5=sum(counts[:5]) / times.size,
        active=activity(arrivals, ACTIVE_SECONDS),
        active_10s=activity(arrivals, IDLE_SECONDS),
        idle_per_hour=float(np.mean(idle)) * 3600 / seconds if seconds > 0 else 0.0,
        minute_cv=float(np.mean(minute_cvs)),
        volatile=sum(cv > 1 for cv in minute_cvs) / len(minute_cvs),
    )


def lengths(tokens: Iterable[int]) -> TokenCounts:
    """Mean, median and 99th percentile (linear interpolation)."""
    values = np.fromiter(tokens, dtype=np.float64)
    p50, p99 = np.percentile(values, (50, 99))
    return TokenCounts(float(values.mean()), float(p50), float(p99))


def gap_cv(times: Sequence[float] | np.ndarray) -> float:
    """Coefficient of variation of the gaps between ascending `times`; 0 for fewer than two gaps."""
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean()) if gaps.size > 1 and gaps.mean() > 0 else 0.0


def minute_cv(times: Sequence[float], start: float, end: float) -> float:
    """CV of requests per whole minute of [start, end]; 0 where there are not two minutes."""
    minutes = int((end - start) // 60)
    if minutes < 2:
        return 0.0
    bins = ((np.asarray(times, dtype=np.float64) - start) // 60).astype(np.int64)
    counts = np.bincount(bins, minlength=minutes)[:minutes]
    return float(counts.std() / counts.mean()) if counts.any() else 0.0


def idle_intervals(times: Sequence[float], longer_than: float = IDLE_SECONDS) -> int:
    """Gaps of more than `longer_than` seconds between a model's requests."""
    return int((np.diff(times) > longer_than).sum())


def activity(arrivals: Mapping[str, Sequence[float]], memory: float) -> Activity:
    """Active share and switches between the first and the last arrival of all."""
    start = min(times[0] for times in arrivals.values())
    end = max(times[-1] for times in arrivals.values())
    if end <= start:
        return Activity(memory, 1.0, 0.0)
    active = 0.0
    changes: set[float] = set()
    for times in arrivals.values():
        for begin, until in active_intervals(times, memory):
            active += min(until, end) - begin
            changes |= {begin, until}
    inside = sum(start < moment < end for moment in changes)
    share = active / (end - start) / len(arrivals)
    return Activity(memory, share, inside * 3600 / (end - start))


def active_intervals(times: Sequence[float], memory: float) -> list[tuple[float, float]]:
    """Half-open intervals in which a model with ascending arrival `times` is active."""
    intervals = []
    begin = times[0]
    for earlier, later in pairwise(times):
        if later > earlier + memory:
            intervals.append((begin, earlier + memory))
            begin = later
    intervals.append((begin, times[-1] + memory))
    return intervals
