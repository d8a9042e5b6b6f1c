"""Overload: whether a preset that shares memory serves fewer requests than fixed shares do.

Three models of the catalogue on one H100, in virtual time: 300 s of LMSYS Chatbot Arena (22 models
folded onto the three by popularity; lengths as they are), or bursts where that trace is not at
hand. Rates are multiples of the knee: the lowest rate, to a factor of the square root of two, at
which `static` misses 99 % in either order of compute.

Every preset runs under both orders of compute, and is compared with `static` in the same order:
`worst_below_static_points` is by how many points of attainment one falls short of it, at the worst
rate; `preemptions_per_request_max` is the highest number of preemptions per request.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run_options import workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import catalogue
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.contenders import TURNS_AND_DEADLINES, defaults
from benchmarks.doc_tables import markdown
from benchmarks.sweep import Sweep, add_processes

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/arena27_vtc_prism_0-300s.csv.gz"
DEVICE = "1xH100-80G"
MODELS = ("Llama-2-13b", "Llama-2-7b", "Llama-3-8b")
"""56 GB of weights; the first two keep a head of keys for each of queries."""
CONTEXT = 4096
SLO = Slo(ttft=2.0, tpot=0.1)
BASELINE = "static"
ELASTIC = ("recompute", "kvswap", "mirage", "balloon")
COMPARED = defaults(*(f"{p}+{o}" for p in (BASELINE, *ELASTIC) for o in TURNS_AND_DEADLINES))
MULTIPLES = tuple(2.0 ** (k / 2) for k in range(-2, 5))
"""Of the knee."""
QUICK_MULTIPLES = (1.0, 4.0)
KNEES = tuple(2.0 ** (k / 2) for k in range(-2, 10))
"""Requests per second at which the knee may lie."""
TARGET = 0.99
GOAL_POINTS = 2.0


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    attainment: float
    requests: int
    preemptions: int
    evictions: int

    @property
    def preemptions_per_request(self) -> float:
        return self.preemptions / self.requests


def specs() -> list[ModelSpec]:
    """The three models."""
    known = catalogue()
    served = {"max_model_len": CONTEXT, "slo": SLO}
    return [replace(known[n].spec(**served), fingerprint=n) for n in MODELS]


def arrivals(trace: Path, *, quick: bool) -> Workload:
    """The trace on the three models, at its own rate."""
    if trace.is_file():
        found = load_trace(trace).map_models(MODELS)
        return found.window(0.0, 100.0) if quick else found
    seconds = 100.0 if quick else 300.0
    return workload_of("bursty", MODELS, rate=2.4, seconds=seconds, most_tokens=1024, seed=1)


def measure(row: str, rate: float, trace: Path, *, quick: bool) -> Result:
    """One run, at `rate` requests a second."""
    work = arrivals(trace, quick=quick)
    work = work.scale_rate(rate * work.seconds / len(work.requests))
    preset = resolve(COMPARED.rows[row].preset, COMPARED.options(row))
    ran = run_cluster(preset, parse_kinds(DEVICE), specs(), work, dict.fromkeys(MODELS, SLO))
    total = ran.report.total
    n = len(work.requests)
    return Result(total.attained / n, n, ran.total("preemptions"), ran.total("evictions"))


def below(results: Mapping[str, Mapping[float, Result]]) -> dict[str, dict[float, float]]:
    """By row and rate, points by which a preset falls short of `static` in the same order; negative
    where it is ahead."""
    found: dict[str, dict[float, float]] = {}
    for row, by_rate in results.items():
        preset, _, order = row.partition("+")
        if preset != BASELINE:
            over = results[f"{BASELINE}+{order}"]
            found[row] = {
                rate: 100 * (over[rate].attainment - r.attainment) for rate, r in by_rate.items()
            }
    return found


def knee(measured: Mapping[float, Sequence[Result]]) -> float:
    """The lowest rate at which one of the results misses the target, or the highest there is."""
    short = [r for r, found in measured.items() if any(f.attainment < TARGET for f in found)]
    return min(short, default=max(measured))


def table(results: Mapping[str, Mapping[float, Result]], at: float) -> str:
    """Attainment in per cent (preemptions per request), by row and multiple of the knee."""
    rates = sorted(next(iter(results.values())))
    header = ["preset", *(f"{rate / at:.2g} x" for rate in rates)]
    return markdown(
        header,
        (
            [f"`{row}`", *(_cell(by_rate[rate]) for rate in rates)]
            for row, by_rate in results.items()
        ),
    )


def _cell(r: Result) -> str:
    return f"{100 * r.attainment:.0f} ({r.preemptions_per_request:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=Path, default=TRACE, help="the Arena's trace")
        add_processes(parser)

    args = options(__doc__, argv, extra)
    run = partial(measure, trace=args.trace, quick=args.quick)
    baselines = [f"{BASELINE}+{order}" for order in TURNS_AND_DEADLINES]
    with Sweep(args.processes) as sweep:
        sought = sweep.over((baselines, KNEES), run)
        at = knee({rate: [by_rate[rate] for by_rate in sought.values()] for rate in KNEES})
        rates = [at * m for m in (QUICK_MULTIPLES if args.quick else MULTIPLES)]
        results = sweep.over((COMPARED.rows, rates), run)
    short = below(results)
    work = arrivals(args.trace, quick=args.quick)
    result: dict[str, Any] = {
        "workload": f"{len(work.requests)}: {work.describe()}",
        "knee_requests_per_s": at,
        "worst_below_static_points": max(p for by in short.values() for p in by.values()),
        "below_static_points": {row: max(by.values()) for row, by in short.items()},
        "goal_points": GOAL_POINTS,
        "preemptions_per_request_max": max(
            r.preemptions_per_request for by in results.values() for r in by.values()
        ),
        "rows": {
            row: {f"{rate / at:.3g}": asdict(r) for rate, r in by.items()}
            for row, by in results.items()
        },
    }
    Console(width=140).print(table(results, at), highlight=False, markup=False)
    shown = Table("", "", title="overload_presets")
    for key in ("knee_requests_per_s", "worst_below_static_points", "preemptions_per_request_max"):
        shown.add_row(key, f"{result[key]:.3g}")
    missed = result["worst_below_static_points"] > GOAL_POINTS
    shown.add_row("goal: at most 2 points below static", "missed" if missed else "met")
    finish(args, "overload_presets", result, shown)


if __name__ == "__main__":
    main()
