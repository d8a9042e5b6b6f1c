"""The preset `ballast` on this machine: eight models on two CPU devices, beside the best others.

The models of `fleet`, half of the memory that weights and peak KV take, half of it and of the
threads on each device, and a paced link for each. All rows have the same memory, threads, links,
options, order of compute, requests and levels (of the demo: multiples of what a copy, a prefill and
a step take on this machine), and each preset's own fleet policy. Rows take turns. (`--quick`: one
round of 12 s of arrivals: four minutes; else three rounds of 30 s: twenty.)

Workloads, each as many requests a second as would keep the machine busy for `LOAD` of the time if
each were served alone: bursts of groups of models, the Arena's trace, and models that are asked one
after the other.

- `attained`: part of the requests in time, by workload and row: median of the rounds.
- `worst_vs_best_other`, `mean_vs_best_other`: points of `ballast` beside the better of the others,
  of these medians.
- `tpot_over_balloon`: seconds a token under `ballast` over `balloon`, medians of all requests: what
  its decisions cost.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from ballast.bench.demo_terms import bursts, levels, seconds_alone
from ballast.bench.report import Report, RequestStats
from ballast.bench.servers import run_servers
from ballast.core.settings import FleetSettings
from ballast.workload.workload import Workload
from benchmarks.arbiter_workloads import alternation
from benchmarks.common import finish, interleave, options
from benchmarks.contenders import defaults
from benchmarks.setting import (
    MOST_OUTPUT,
    MOST_PROMPT,
    OUTPUT_FACTOR,
    PROMPT_FACTOR,
    Setting,
    arrivals,
    halves,
    prepare,
    trace_option,
)

BUDGET = 0.5
"""Of all weights and of KV for eight of the longest requests of each model."""
OURS, RIVALS = "ballast", ("prism", "balloon")
"""The rivals are the two best others of `arbiter_sim`."""
COMPARED = defaults(OURS, *RIVALS)
LOAD = 0.5
TRACE_RATE = 2.4
"""Requests per second of the Arena's trace; of a sample of the others, for their mean length."""
SEED = 0


def attained(report: Report) -> float:
    """The share of requests in time; those that failed are not."""
    return RequestStats.of(report.records, report.slos).attainment


def workloads(setting: Setting, trace: Path, seconds: float) -> dict[str, Workload]:
    """The arrivals by the names of the workloads, each about `seconds` long."""
    names = [s.name for s in setting.specs]

    def of_trace(rate: float) -> Workload:
        factor = rate / TRACE_RATE
        return arrivals(trace, names, factor * seconds).scale_rate(factor)

    def in_turn(rate: float) -> Workload:
        work = alternation(names, rate, seconds, SEED)
        return work.scale_lengths(PROMPT_FACTOR, OUTPUT_FACTOR, MOST_PROMPT, MOST_OUTPUT)

    made: dict[str, Callable[[float], Workload]] = {
        "bursty": lambda rate: bursts(names, rate, seconds, SEED),
        "arena": of_trace,
        "alternation": in_turn,
    }
    costs = setting.profile.lane_costs
    alone = {name: seconds_alone(make(TRACE_RATE), costs) for name, make in made.items()}
    return {name: make(LOAD / alone[name]) for name, make in made.items()}


def served(setting: Setting, row: str, budget: int) -> FleetSettings:
    chosen = setting.under(COMPARED.rows[row].preset, budget)
    return halves(replace(chosen, options=COMPARED.options(row)))


def measure(setting: Setting, name: str, work: Workload, rounds: int) -> dict[str, list[Report]]:
    """Return the reports of each row, by round; prints each as it ends."""
    budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
    slos = {s.name: s.slo for s in setting.specs}
    found: dict[str, list[Report]] = {row: [] for row in COMPARED.rows}

    def once(row: str) -> float:
        began = time.monotonic()
        ran = asyncio.run(run_servers([served(setting, row, budget)], work, slos, name=row))
        found[row].append(ran.report)
        share = attained(ran.report)
        seconds = time.monotonic() - began
        print(f"{name}, {row}: {100 * share:.1f} % in time, {seconds:.0f} s", flush=True)
        return share

    interleave({row: partial(once, row) for row in found}, rounds)
    return found


def summary(found: Mapping[str, Mapping[str, Sequence[Report]]]) -> dict[str, Any]:
    """Return the keys of the result, from reports by workload and row."""
    shares = {
        work: {row: median(map(attained, reports)) for row, reports in rows.items()}
        for work, rows in found.items()
    }
    margins = [100 * (by[OURS] - max(by[row] for row in RIVALS)) for by in shares.values()]
    tpots = {
        row: [r.tpot for rows in found.values() for report in rows[row] for r in report.records]
        for row in (OURS, "balloon")
    }
    ours, theirs = (median(t for t in tpots[row] if t is not None) for row in tpots)
    return {
        "attained": shares,
        "worst_vs_best_other": min(margins),
        "mean_vs_best_other": fmean(margins),
        "tpot_over_balloon": ours / theirs,
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        trace_option(parser)
        parser.add_argument("--rounds", type=int, help="default 3, quick 1")
        parser.add_argument("--seconds", type=float, help="of arrivals; default 30, quick 12")

    args = options(__doc__, argv, extra)
    rounds = args.rounds or (1 if args.quick else 3)
    seconds = args.seconds or (12.0 if args.quick else 30.0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, seconds)
        assert setting.roomy.link.pace is not None
        slo = levels(setting.specs, setting.profile.lane_costs, setting.roomy.link.pace.to_device)
        setting = setting.with_levels({s.name: slo for s in setting.specs})
        print(f"models made and measured in {time.monotonic() - began:.0f} s", flush=True)
        found = {}
        for name, work in workloads(setting, args.trace, seconds).items():
            print(f"{name}: {len(work.requests)} requests in {work.seconds:.0f} s", flush=True)
            found[name] = measure(setting, name, work, rounds)
    result = summary(found)
    table = Table("attained, %", *result["attained"], title="arbiter_live")
    for row in COMPARED.rows:
        table.add_row(row, *(f"{100 * by[row]:.1f}" for by in result["attained"].values()))
    table.caption = (
        f"beside the best other: worst {result['worst_vs_best_other']:+.1f}, mean "
        f"{result['mean_vs_best_other']:+.1f}; TPOT over balloon {result['tpot_over_balloon']:.2f}"
    )
    finish(args, "arbiter_live", result, table)


if __name__ == "__main__":
    main()
