"""What `mirage_sim` runs: rates around each case's knee, and sweeps of what else matters.

The knee of a case is the lowest rate, to a factor of the square root of two, at which
`recompute` with fixed shares, which is how vLLM serves several models, preempts one request in a
hundred; by bisection. Below it no way of finding memory can gain anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.mirage_cases import AMPLE, GROUPS, Case, Runs, ratios
from benchmarks.mirage_setting import STEP_TOKENS

MULTIPLES = 0.75, 2.0, 8.0
"""Rates of a curve, over the knee's."""
FULL_MULTIPLES = 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0
QUICK_MULTIPLES = (8.0,)
SHORT_SHARE = 0.01
"""Part of the requests that are preempted at the knee."""
STEPS_PER_DOUBLING = 2
LEAST, MOST = -4, 9
"""Powers of two, requests per second, between which a knee is sought."""
METRICS = "throughput", "frame_throughput", "p99_ttft", "p99_tbt", "p99_tpot"
POOL_ROWS = "recompute", "kvswap", "mirage"
SHARE_ROWS = "recompute", "mirage"
SHARED = {"sharing": "shares"}
PAPER = {"sharing": "paper"}

Changed = Mapping[str, object]
COMPARED: dict[str, tuple[Changed, Changed]] = {
    "layers": ({"row": "mirage"}, {"row": "recompute"}),
    "layers_shares": ({"row": "mirage", **SHARED}, {"row": "recompute", **SHARED}),
    "layers_paper": ({"row": "mirage", **PAPER}, {"row": "recompute", **PAPER}),
    "pool": ({"row": "recompute"}, {"row": "recompute", **SHARED}),
    "no_shortage": ({"row": "recompute", "memory": AMPLE}, {"row": "recompute"}),
    "kvswap": ({"row": "mirage"}, {"row": "kvswap"}),
    "kvswap_shares": ({"row": "mirage", **SHARED}, {"row": "kvswap", **SHARED}),
    "kvswap_over_recompute": ({"row": "kvswap"}, {"row": "recompute"}),
}
"""What is compared: fields of a case over fields of another that is else the same. Both sides are
presets on equal terms, but for `pool`, which compares the terms, and `no_shortage`, whose other
side has twice the memory."""

Measure = Callable[[Case, float], Mapping[str, float] | None]
"""Runs a case until it has preempted so many requests."""
Knees = Mapping[tuple[str, str], float | None]
At = Callable[[str, str, float], Case]
"""The case of a group and setting at a multiple of its knee."""


def grid() -> list[float]:
    """Rates at which a knee may lie."""
    n = (MOST - LEAST) * STEPS_PER_DOUBLING
    return [2.0 ** (LEAST + i / STEPS_PER_DOUBLING) for i in range(n + 1)]


def knee(
    group: str,
    setting: str,
    requests: int,
    measured: Measure,
    quick: bool,
    page: int | None = None,
) -> float | None:
    """The rate at which a case begins to be short of KV; None: at none that was looked at."""
    first = Case(group, setting, 1.0, 1.0, "recompute", "shares", quick=quick, page=page)
    rates, enough = grid(), SHORT_SHARE * requests
    low, high = 0, len(rates)
    while low < high:
        middle = (low + high) // 2
        found = measured(replace(first, rate=rates[middle]), enough)
        short = found is None or found["preemptions"] >= enough
        low, high = (low, middle) if short else (middle + 1, high)
    return rates[low] if low < len(rates) else None


def at_knees(knees: Knees, *, quick: bool = False, page: int | None = None) -> At:
    """Cases at multiples of these knees; where there is none, so that 8 times it is the highest
    rate."""

    def at(group: str, setting: str, multiple: float) -> Case:
        found = knees[GROUPS[group].knee_of or group, setting]
        rate = multiple * (found if found is not None else grid()[-1] / FULL_MULTIPLES[-1])
        return Case(group, setting, multiple, rate, "recompute", quick=quick, page=page)

    return at


def anywhere(group: str, setting: str, multiple: float) -> Case:
    """A case at some rate, to see which cases there are."""
    return Case(group, setting, multiple, 1.0, "recompute")


def knees_wanted(cases: Iterable[Case]) -> list[tuple[str, str]]:
    """Groups and settings at whose knees these cases are run."""
    return list(dict.fromkeys((GROUPS[c.group].knee_of or c.group, c.setting) for c in cases))


def curve_cases(
    groups: Iterable[str],
    at: At,
    multiples: Sequence[float],
    *,
    seeds: int = 1,
    full: bool = False,
) -> Iterator[Case]:
    """Every run of the curves: below a knee, where nothing is short, a row for each preset in one
    pool; from there on all. `full`: also KV swapping with fixed shares."""
    for name in groups:
        for setting in GROUPS[name].settings:
            for multiple in multiples:
                for seed in range(seeds):
                    case = replace(at(name, setting, multiple), seed=seed)
                    yield from (replace(case, row=row) for row in POOL_ROWS)
                    if multiple < 1:
                        continue
                    yield replace(case, memory=AMPLE)
                    if GROUPS[name].shares:
                        rows = SHARE_ROWS + ("kvswap",) * full
                        yield from (replace(case, row=row, sharing="shares") for row in rows)
                        yield from (replace(case, row=row, sharing="paper") for row in SHARE_ROWS)


def averaged(found: Mapping[Case, float]) -> float | None:
    """The geometric mean over settings, each of which weighs alike however many runs it has."""
    logs: dict[str, list[float]] = {}
    for case, value in found.items():
        logs.setdefault(case.setting, []).append(np.log(value))
    return float(np.exp(np.mean([np.mean(of) for of in logs.values()]))) if logs else None


def curves(runs: Runs, groups: Iterable[str], multiples: Sequence[float]) -> dict[str, Any]:
    """By group: for each comparison and metric the mean ratio at each of `multiples`; the same by
    setting, with the rates. `runs` may have others beside."""
    result: dict[str, Any] = {}
    for group in groups:
        own = [
            case
            for case in runs
            if case.group == group
            and case.multiple in multiples
            and case == replace(case, **_AS_CURVES)  # type: ignore[arg-type]
        ]
        result[group] = {
            "multiples": list(multiples),
            "over": _by_multiple(runs, own, multiples),
            "settings": {
                setting: {
                    "rates": [min(c.rate for c in at) for at in _at(of, multiples)],
                    "over": _by_multiple(runs, of, multiples),
                    **{
                        f"{key}_{row}": _figures(runs, of, multiples, key, row)
                        for row in ("mirage", "recompute")
                        for key in FIGURES
                    },
                }
                for setting in dict.fromkeys(c.setting for c in own)
                for of in ([c for c in own if c.setting == setting],)
            },
        }
    return result


FIGURES = "seconds", "drain", "preemptions", "lent_layers", "most_lent", "remaps", *METRICS
"""Figures of `mirage` and `recompute` themselves, in one pool."""
_AS_CURVES = {
    "quantum": 1.0,
    "preemptive": False,
    "step_tokens": STEP_TOKENS,
    "kind": "GH200-96G",
    "link": None,
}
"""Fields of a case that only sweeps change."""


def _at(cases: Sequence[Case], multiples: Sequence[float]) -> list[list[Case]]:
    return [[c for c in cases if c.multiple == m] for m in multiples]


def _by_multiple(
    runs: Runs, cases: Sequence[Case], multiples: Sequence[float]
) -> dict[str, dict[str, list[float | None]]]:
    found: dict[str, dict[str, list[float | None]]] = {}
    for name, (of, over) in COMPARED.items():
        per_metric: dict[str, list[float | None]] = {
            metric: [
                averaged(ratios(runs, _with(at, of), metric, **_whole(over)))
                for at in _at(cases, multiples)
            ]
            for metric in METRICS
        }
        if any(v is not None for values in per_metric.values() for v in values):
            found[name] = per_metric
    return found


_SIDE = {"row": "recompute", "sharing": "pool", "memory": 1}


def _whole(fields: Changed) -> dict[str, object]:
    return {**_SIDE, **fields}


def _with(cases: Sequence[Case], fields: Changed) -> list[Case]:
    wanted = _whole(fields)
    return [c for c in cases if all(getattr(c, k) == v for k, v in wanted.items())]


def _figures(
    runs: Runs, cases: Sequence[Case], multiples: Sequence[float], key: str, row: str
) -> list[float]:
    """Means over seeds of a figure of one row."""
    return [
        float(np.mean([runs[c][key] for c in _with(at, {"row": row})]))
        for at in _at(cases, multiples)
    ]
