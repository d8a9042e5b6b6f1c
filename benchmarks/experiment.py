"""Experiments of papers in virtual time, described as data: rows of presets over one axis.

An `Experiment` names its rows, the points of its axis and what runs one point; `outcome_of` makes
the same figures of every run. `benchmarks.experiments` has the table of experiments, and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ballast.bench.cluster_run import ClusterRun
from ballast.bench.record import RequestRecord
from ballast.bench.report import RequestStats
from ballast.core.settings import Slo
from benchmarks.contenders import Comparison
from benchmarks.rate_curves import Curve

TARGET = 0.99
"""Share of the requests that are in time where an experiment asks up to which point they are."""


@dataclass(frozen=True)
class Outcome:
    """One row at one point; shares are of the requests that count."""

    throughput: float
    """Requests per second, weighted by the models' parts of all requests."""
    attainment: float
    worst: float
    """Attainment of the model that is served worst."""
    ttft: float
    """With their first token in time."""
    tpot: float
    requests: int
    preemptions: int
    moves: int
    complete: bool = True
    """Whether the run came to its end; else `ttft` is an upper bound below the target, and the
    other figures are 0."""

    @property
    def both(self) -> float:
        """The lower of the attainments of TTFT and TPOT."""
        return min(self.ttft, self.tpot)


Run = Callable[[str, float, int, float, bool], Outcome]
"""Row, point, seed, seconds of arrivals; whether to stop once the target cannot be met."""


@dataclass(frozen=True)
class Experiment:
    """Rows of presets over an axis, and what the paper says of them."""

    title: str
    rows: Comparison
    axis: tuple[float, ...]
    """Points, in ascending order."""
    run: Run
    seconds: float = 120.0
    """Of arrivals."""
    seeds: tuple[int, ...] = (1,)
    ours: str = "muxserve"
    over: Mapping[str, float | None] = field(default_factory=dict)
    """Rows over which the throughput of `ours` is stated, each with the paper's ratio."""
    at: float | None = None
    """The point of the ratios; None: the last."""
    fewest: bool = False
    """The axis is a number of GPUs, and the least with which the target is met is sought."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """What the paper states of each row, as text."""

    @property
    def point(self) -> float:
        """Where ratios are taken."""
        return self.axis[-1] if self.at is None else self.at


def outcome_of(
    ran: ClusterRun, slos: Mapping[str, Slo], since: float, until: float, begin: float = 0.0
) -> Outcome:
    """Figures of a run. Requests that arrived from `begin` on count; throughput is of those
    answered after `since` and by `until`, in seconds."""
    records = [r for r in ran.report.records if r.at >= begin]
    by_model = {name: [r for r in records if r.model == name] for name in slos}
    total = RequestStats.of(records, slos)
    each = [RequestStats.of(own, slos).attainment for own in by_model.values()]
    return Outcome(
        _throughput(by_model, since, until),
        total.attainment,
        min(each),
        total.attained_ttft / total.requests,
        total.attained_tpot / total.requests,
        total.requests,
        ran.total("preemptions"),
        ran.placed,
    )


def _throughput(
    by_model: Mapping[str, Sequence[RequestRecord]], since: float, until: float
) -> float:
    """Requests per second that were answered within a time, each model's weighted by its part of
    all requests."""
    ended = {
        model: sum(r.answered and since < (r.end or 0.0) <= until for r in own)
        for model, own in by_model.items()
    }
    weighted = sum(n * len(by_model[model]) for model, n in ended.items())
    return weighted / sum(map(len, by_model.values())) / (until - since)


Found = Mapping[str, Mapping[float, Sequence[Outcome]]]
"""Outcomes by row and point, one of each seed."""


def summary(experiment: Experiment, found: Found) -> dict[str, Any]:
    """`throughput_over`: of `ours` over other rows; `attained_up_to`: by row, the highest point up
    to which the target is met, between two points by interpolation."""
    ours = _mean("throughput", found[experiment.ours][experiment.point])
    return {
        "throughput_over": {
            row: ours / _mean("throughput", found[row][experiment.point]) for row in experiment.over
        },
        "attained_up_to": {
            row: Curve({p: _mean("both", of) for p, of in points.items()}).rate_at(TARGET)
            for row, points in found.items()
        },
    }


def _mean(figure: str, of: Sequence[Outcome]) -> float:
    """A figure of the outcomes, over seeds."""
    return fmean(getattr(outcome, figure) for outcome in of)


Tried = Mapping[float, Outcome]
"""What a search has run, by number of GPUs."""


def search(
    experiment: Experiment, row: str, seed: int, seconds: float
) -> tuple[float | None, Tried]:
    """Return the fewest GPUs with which the target is met, None where the most there are do not
    meet it, and all outcomes. Fewer than the most are run only as long as they can meet it."""
    tried: dict[float, Outcome] = {}
    numbers, last = experiment.axis, len(experiment.axis) - 1

    def enough(i: int) -> bool:
        tried[numbers[i]] = experiment.run(row, numbers[i], seed, seconds, i != last)
        return tried[numbers[i]].both >= TARGET

    if not enough(last):
        return None, tried
    low, high = -1, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return numbers[high], tried


def fewest(found: Mapping[str, Mapping[int, tuple[float | None, Tried]]]) -> dict[str, Any]:
    """`devices`: by row, the mean over seeds, the least and the most; None: not even the most."""
    devices = {}
    for row, by_seed in found.items():
        known = [n for n, _ in by_seed.values() if n is not None]
        all_met = len(known) == len(by_seed)
        devices[row] = {
            "mean": fmean(known) if all_met else None,
            "least": min(known, default=None),
            "most": max(known) if all_met else None,
        }
    return {"devices": devices}


def _share(outcome: Outcome) -> str:
    """The lower attainment; an upper bound where the run was cut short."""
    return f"{outcome.both:.1%}" if outcome.complete else f"<{TARGET:.0%}"
