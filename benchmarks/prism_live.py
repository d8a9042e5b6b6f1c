"""Prism on this machine: eight models on two CPU devices, the Arena's trace, all presets in turns.

The models of `fleet`, with memory for a part of their weights and KV, half of it and of the threads
on each device, and a paced link. All rows have the same memory, threads, link, options, requests
and levels (TTFT 5 times and TPOT twice the P95 with memory for everything, at the trace's own
rate), order requests by deadline, and begin with the same placement, by weights; `prism` alone
moves models, and requests with their KV.

- `attained`: part of the requests in time, by factor on the trace's rate: median of the rounds,
  the least and the most. `over_static`: points that `prism` adds there, round by round.
- `moves`: models that `prism` moved, of all runs.
- `activation_over_link`: seconds from the order to the last byte, over bytes by the link's pace; of
  each model three times, median and most (goal 1.2).
- `constant_load_overhead`: TPOT under `prism` over that under `static` where requests come evenly
  and memory is ample, so that nothing is to be decided: medians of as many rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.report import Report, RequestStats
from ballast.bench.servers import ServersRun, run_servers
from ballast.core.actions import ActivateCommand, EvictCommand
from ballast.core.command import DeviceCommand
from ballast.core.settings import FleetSettings, Slo
from ballast.core.view import Residency
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.setting import (
    ROOMY,
    Setting,
    halves,
    no_levels,
    prepare,
    service_levels,
    trace_option,
)

BUDGET = 0.5
"""Of all weights and of KV for eight of the longest requests of each model."""
FACTORS = (2.0, 4.0, 8.0)
"""On the trace's rate: so many times as much of it comes in the same time."""
COMPARED = Comparison(
    {},
    {
        "static": Contender("static+deadline"),
        "recompute": Contender("recompute+deadline"),
        "swap": Contender("swap+deadline"),
        "mirage": Contender("mirage+deadline"),
        "balloon": Contender("balloon+deadline"),
        "prism": Contender("prism"),
    },
)
ACTIVATIONS = 3
CONSTANT = 2.0
"""Requests per second, evenly, in turn to each model."""


def served(setting: Setting, row: str, budget: int) -> FleetSettings:
    chosen = setting.under(COMPARED.rows[row].preset, budget)
    both = halves(replace(chosen, options=COMPARED.options(row)))
    return replace(both, placement="kvpr" if row == "prism" else "weights")


def run(
    setting: Setting, row: str, budget: int, work: Workload, slos: Mapping[str, Slo]
) -> ServersRun:
    return asyncio.run(run_servers([served(setting, row, budget)], work, slos, name=row))


def attained(report: Report) -> float:
    """Those that failed are not in time."""
    return RequestStats.of(report.records, report.slos).attainment


def constant(setting: Setting, seconds: float) -> Workload:
    names = [s.name for s in setting.specs]
    n = round(seconds * CONSTANT)
    return Workload.of(
        "constant",
        [
            WorkloadRequest(
                id=i,
                at=i / CONSTANT,
                model=names[i % len(names)],
                prompt_tokens=64,
                output_tokens=48,
            )
            for i in range(n)
        ],
    )


def overhead(setting: Setting, rounds: int, seconds: float) -> float:
    """TPOT under `prism` over that under `static`."""
    work, slos = constant(setting, seconds), no_levels(setting)

    def tpot(row: str) -> float:
        records = run(setting, row, ROOMY, work, slos).report.records
        return median(r.tpot for r in records if r.tpot is not None)

    found = interleave({row: partial(tpot, row) for row in ("static", "prism")}, rounds)
    return found["prism"].median / found["static"].median


def activations(setting: Setting) -> list[float]:
    """Seconds over what the paced link takes, of each model several times."""
    fleet = setting.under("balloon", ROOMY)
    assert fleet.link.pace is not None
    found = []
    with InProcess(fleet) as server:

        def ordered(order: DeviceCommand, model: str, wanted: Residency) -> float:
            began = time.perf_counter()
            server.device.command(order, lambda outcome: None)
            while server.device.state.models[model].residency is not wanted:
                time.sleep(0.0002)
            return time.perf_counter() - began

        for _ in range(ACTIVATIONS):
            for spec in setting.specs:
                seconds = ordered(ActivateCommand(spec.name), spec.name, Residency.RESIDENT)
                found.append(seconds * fleet.link.pace.to_device / sum(spec.segment_bytes))
                ordered(EvictCommand(spec.name), spec.name, Residency.ABSENT)
    return found


def measure(
    setting: Setting, factors: Sequence[float], rounds: int, seconds: float
) -> dict[str, Any]:
    budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
    first = setting.workload.window(0.0, seconds)
    alone = run(setting, "static", 2 * ROOMY, first, no_levels(setting)).report
    slos = service_levels(alone)
    levelled = setting.with_levels(slos)
    moves = 0
    rows: dict[str, dict[str, Any]] = {row: {} for row in COMPARED.rows}
    over: dict[str, Any] = {}
    for factor in factors:
        work = setting.workload.window(0.0, factor * seconds).scale_rate(factor)

        def once(row: str, work: Workload = work) -> float:
            nonlocal moves
            ran = run(levelled, row, budget, work, slos)
            moves += sum(m["action"] == "Withdraw" and "refused" not in m for m in ran.moves)
            return attained(ran.report)

        found = interleave({row: partial(once, row) for row in rows}, rounds)
        for row, samples in found.items():
            rows[row][f"{factor:g}"] = samples.to_json()
        ours, theirs = found["prism"].values, found["static"].values
        points = tuple(100 * (a - b) for a, b in zip(ours, theirs, strict=True))
        over[f"{factor:g}"] = Samples(points).to_json()
    return {
        "budget_bytes": budget,
        "seconds": seconds,
        "attained": rows,
        "over_static": over,
        "moves": moves,
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        trace_option(parser)
        parser.add_argument("--rounds", type=int, help="default 3, quick 1")
        parser.add_argument("--seconds", type=float, help="of arrivals; default 36, quick 18")

    args = options(__doc__, argv, extra)
    rounds = args.rounds or (1 if args.quick else 3)
    seconds = args.seconds or (18.0 if args.quick else 36.0)
    with tempfile.TemporaryDirectory() as scratch:
        factors = FACTORS[-1:] if args.quick else FACTORS
        setting = prepare(Path(scratch), args.trace, max(factors) * seconds)
        ratios = activations(setting)
        result = measure(setting, factors, rounds, seconds)
        result |= {
            "activation_over_link": {"median": median(ratios), "most": max(ratios)},
            "constant_load_overhead": overhead(setting, rounds, min(seconds, 20.0)),
        }
    table = Table("attained", *result["over_static"], title="prism_live: x the trace's rate")
    for row, by in result["attained"].items():
        table.add_row(
            row, *(f"{s['median']:.1%} ({s['low']:.1%}-{s['high']:.1%})" for s in by.values())
        )
    table.caption = (
        f"models moved: {result['moves']}; activation over link: "
        f"{result['activation_over_link']['median']:.2f}, most "
        f"{result['activation_over_link']['most']:.2f}; constant load, TPOT over static: "
        f"{result['constant_load_overhead']:.2f}"
    )
    finish(args, "prism_live", result, table)


if __name__ == "__main__":
    main()
