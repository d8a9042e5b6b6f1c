"""The cases of `mirage_sim`: which runs there are, their knees, and the ratios between them.

The knee of a case is the lowest rate, to a factor of the square root of two, at which `recompute`
with fixed shares, which is how vLLM serves several models, preempts one request in a hundred; by
bisection. Below it no way of finding memory can gain anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload
from benchmarks.contenders import SHARINGS
from benchmarks.mirage_run import Enough, run
from benchmarks.mirage_setting import (
    ALONE,
    ALPACA,
    C1,
    C2,
    ENGINE,
    LONG,
    MEMORY,
    SHAREGPT,
    SHORT,
    Device,
    Lengths,
    Setting,
    arrivals_in,
)

DEVICE = "GH200-96G"
AMPLE = 2
"""Times the memory with which nothing is ever short."""
WINDOWS = {"Alpaca": (180.0, 400.0)}
WINDOW = 200.0, 100.0
"""Start and length in seconds of the part of the trace that gives the arrivals, by what is asked;
short requests take more of them to fill the same memory."""
QUICK_WINDOW = 180.0, 20.0
MULTIPLES = 0.75, 2.0, 8.0
"""Rates of a curve, over the knee's."""
QUICK_MULTIPLES = (8.0,)
SHORT_SHARE = 0.01
"""Part of the requests that are preempted at the knee."""
GRID = tuple(2.0 ** (-4 + i / 2) for i in range(27))
"""Requests per second at which a knee may lie."""
METRICS = "throughput", "frame_throughput", "p99_ttft", "p99_tbt", "p99_tpot"
FIGURES = "seconds", "drain", "preemptions", "lent_layers", "most_lent", "remaps", *METRICS
"""Figures of `mirage` and `recompute` themselves, in one pool."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that one sentence of the paper speaks of."""

    title: str
    settings: Mapping[str, Setting]
    temporal: bool = False
    paper: Mapping[str, float] = field(default_factory=dict)
    """Ratios over vLLM that the text gives as averages, by metric."""

    @property
    def shares(self) -> bool:
        """Whether models share memory for KV, so that it matters how."""
        return any(len(s.fractions) > 1 and not s.apart for s in self.settings.values())


def _both(fractions: Mapping[str, float], *, apart: bool = False) -> dict[str, Setting]:
    return {
        "Alpaca": Setting.of(fractions, ALPACA, apart),
        "ShareGPT": Setting.of(fractions, SHAREGPT, apart),
    }


def _weighted(large: float, small: float) -> Setting:
    """C2 with other rates for its models."""
    base = Setting.of(C2, SHAREGPT)
    return replace(base, weights=dict(zip(C2, (large, small), strict=True)))


def _mixed(*lengths: Lengths) -> Setting:
    return replace(Setting.of(C2, SHAREGPT), lengths=dict(zip(C2, lengths, strict=True)))


def _stated(throughput: float, ttft: float, tbt: float) -> dict[str, float]:
    return {"throughput": throughput, "p99_ttft": ttft, "p99_tbt": tbt}


GROUPS: dict[str, Group] = {
    "temporal_c1": Group("C1, in turns", _both(C1), True, _stated(1.40, 0.03, 0.46)),
    "temporal_c2": Group("C2, in turns", _both(C2), True, _stated(1.45, 0.25, 0.55)),
    "rates_c2": Group(
        "C2, rates 3:1 and 1:3",
        {"3:1": _weighted(3, 1), "1:3": _weighted(1, 3)},
        True,
        _stated(1.87, 0.01, 0.18),
    ),
    "inputs_c2": Group(
        "C2, long and short inputs",
        {"L+S": _mixed(LONG, SHORT), "S+L": _mixed(SHORT, LONG)},
        True,
        _stated(1.66, 0.02, 0.43),
    ),
    "mps_c1": Group("C1, side by side", _both(C1), False, _stated(1.07, 0.79, 0.34)),
    "mig_c1": Group("C1, sliced", _both(C1, apart=True), False, _stated(1.08, 0.65, 0.43)),
    "alone": Group("OPT-13b alone", _both(ALONE)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    group: str
    setting: str
    multiple: float
    """Of the knee's rate."""
    rate: float
    """Requests per second, all models together."""
    row: str = "recompute"
    """In its comparison."""
    sharing: str = "pool"
    memory: int = 1
    """Times the device's own."""
    seed: int = 0
    quick: bool = False
    page: int | None = None
    """MiB of a page; None: as the models have by default."""


Result = Mapping[str, float]
Runs = Mapping[Case, Result]


@functools.cache
def arrivals_of(traces: Path, setting: str, quick: bool) -> Workload:
    """When requests come."""
    return arrivals_in(traces, *(QUICK_WINDOW if quick else WINDOWS.get(setting, WINDOW)))


def measure(case: Case, traces: Path, enough: float = float("inf")) -> Result | None:
    """What a run comes to; None: it preempted `enough` requests, and was stopped."""
    group = GROUPS[case.group]
    setting = replace(group.settings[case.setting], page=case.page)
    workload = setting.requests(arrivals_of(traces, case.setting, case.quick), case.rate, case.seed)
    comparison = SHARINGS[case.sharing].on(temporal=group.temporal, quantum=1.0, preemptive=False)
    options, preset = comparison.options(case.row), comparison.rows[case.row].preset
    device = Device(device_profile(DEVICE, ENGINE), case.memory * MEMORY[DEVICE])
    try:
        return run(setting, workload, preset, options, device, enough).summary()
    except Enough:
        return None


Measure = Callable[[Case, float], Result | None]
"""Runs a case until it has preempted so many requests."""


def knee(first: Case, requests: int, measured: Measure) -> float | None:
    """The rate at which a case begins to be short of KV; None: at none that was looked at."""
    enough = SHORT_SHARE * requests
    low, high = 0, len(GRID)
    while low < high:
        middle = (low + high) // 2
        found = measured(replace(first, sharing="shares", rate=GRID[middle]), enough)
        short = found is None or found["preemptions"] >= enough
        low, high = (low, middle) if short else (middle + 1, high)
    return GRID[low] if low < len(GRID) else None


def at_multiple(first: Case, knee_rate: float | None, multiple: float) -> Case:
    """The case at a multiple of its knee; where there is none, so that 8 times it is the highest
    rate."""
    rate = knee_rate if knee_rate is not None else GRID[-1] / MULTIPLES[-1]
    return replace(first, multiple=multiple, rate=multiple * rate)


def curve_cases(case: Case) -> Iterator[Case]:
    """Runs at one point: below the knee, where nothing is short, a row for each preset in one pool;
    from there on all."""
    yield from (replace(case, row=row) for row in ("recompute", "kvswap", "mirage"))
    if case.multiple < 1:
        return
    yield replace(case, memory=AMPLE)
    if GROUPS[case.group].shares:
        for sharing in ("shares", "paper"):
            for row in ("recompute", "mirage"):
                yield replace(case, row=row, sharing=sharing)


Side = tuple[str, str, int]
"""Row, sharing, memory."""
COMPARED: dict[str, tuple[Side, Side]] = {
    "layers": (("mirage", "pool", 1), ("recompute", "pool", 1)),
    "layers_shares": (("mirage", "shares", 1), ("recompute", "shares", 1)),
    "layers_paper": (("mirage", "paper", 1), ("recompute", "paper", 1)),
    "pool": (("recompute", "pool", 1), ("recompute", "shares", 1)),
    "no_shortage": (("recompute", "pool", AMPLE), ("recompute", "pool", 1)),
    "kvswap": (("mirage", "pool", 1), ("kvswap", "pool", 1)),
}
"""What is compared. Both sides are presets on equal terms, but for `pool`, which compares the
terms, and `no_shortage`, whose other side has twice the memory."""


def on_side(case: Case, side: Side) -> Case:
    """The case as one side of a comparison has it."""
    row, sharing, memory = side
    return replace(case, row=row, sharing=sharing, memory=memory)


def ratio(runs: Runs, points: Sequence[Case], name: str, metric: str) -> float | None:
    """A comparison's ratio at some points; geometric means, first over a setting's seeds, so that
    settings weigh alike. None: no point has both sides."""
    of, over = COMPARED[name]
    logs: dict[str, list[float]] = {}
    for point in points:
        own, base = runs.get(on_side(point, of)), runs.get(on_side(point, over))
        if own and base and own[metric] > 0 and base[metric] > 0:
            logs.setdefault(point.setting, []).append(np.log(own[metric] / base[metric]))
    return float(np.exp(np.mean([np.mean(each) for each in logs.values()]))) if logs else None


def curves(
    runs: Runs, multiples: Sequence[float], never_short: Collection[tuple[str, str]] = ()
) -> dict[str, Any]:
    """By group: for each comparison and metric the mean ratio at each of `multiples`; the same by
    setting, with the rates. `never_short`: groups and settings that have no knee; these are in no
    mean, unless the group has no others."""
    points = list(dict.fromkeys(on_side(case, ("recompute", "pool", 1)) for case in runs))
    result: dict[str, Any] = {}
    for group in dict.fromkeys(p.group for p in points):
        own = [p for p in points if p.group == group]
        short = [p for p in own if (group, p.setting) not in never_short]
        result[group] = {
            "multiples": list(multiples),
            "paper": dict(GROUPS[group].paper),
            "over": _over(runs, short or own, multiples),
            "never_short": [s for g, s in never_short if g == group],
            "settings": {
                setting: _of_setting(runs, [p for p in own if p.setting == setting], multiples)
                for setting in dict.fromkeys(p.setting for p in own)
            },
        }
    return result


def _over(
    runs: Runs, points: Sequence[Case], multiples: Sequence[float]
) -> dict[str, dict[str, list[float | None]]]:
    at = [[p for p in points if p.multiple == m] for m in multiples]
    found = {
        name: {metric: [ratio(runs, of, name, metric) for of in at] for metric in METRICS}
        for name in COMPARED
    }
    return {
        n: by for n, by in found.items() if any(v is not None for vs in by.values() for v in vs)
    }


def _of_setting(runs: Runs, points: Sequence[Case], multiples: Sequence[float]) -> dict[str, Any]:
    def figure(row: str, key: str, multiple: float) -> float:
        """The mean over seeds."""
        of = [replace(p, row=row) for p in points if p.multiple == multiple]
        return float(np.mean([runs[case][key] for case in of]))

    return {
        "rates": [min(p.rate for p in points if p.multiple == m) for m in multiples],
        "over": _over(runs, points, multiples),
        **{
            f"{key}_{row}": [figure(row, key, m) for m in multiples]
            for row in ("mirage", "recompute")
            for key in FIGURES
        },
    }


def first_cases(groups: Iterable[str], *, quick: bool, page: int | None) -> list[Case]:
    """A case of every setting of these groups, at no rate yet."""
    return [
        Case(group, setting, 1.0, 1.0, quick=quick, page=page)
        for group in groups
        for setting in GROUPS[group].settings
    ]
