"""How far a simulation is from a server over HTTP at light load.

The models of `fleet`, all in memory, behind `ballast serve`; a client on the same machine sends the
trace at half its rate: mostly one request at a time. In turns, the machine is profiled as `ballast
profile --http` does it, the server serves, and the run is simulated with that profile's engine
`ballast-http` and, for comparison, with the engine as measured in one process. Cells, goals and
verdicts are those of `sim_fidelity`. `error_in_process`: by figure, of the simulation that knows
nothing of HTTP. TTFT counts from when a request was sent.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ballast.bench.device_run import run_virtual
from ballast.bench.http_profile import calibrate_over_http
from ballast.bench.record import prompts_of, vocabularies_of
from ballast.bench.run import report_http
from ballast.bench.server_process import serving
from ballast.core.settings import Slo
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS
from ballast.sim.calibrate import calibrated
from benchmarks.common import finish, options
from benchmarks.fidelity_runs import Point, figures
from benchmarks.setting import ROOMY, arrivals, trace_option
from benchmarks.sim_fidelity import GOALS, Cell, summary_of, table_of

RATE = 0.5
"""Of the trace's."""
PRESET = "static"


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--turns", type=int, help="default 3, quick 1")


def turn(file: Path, trace: Path, seconds: float, rounds: int) -> Mapping[str, dict[str, float]]:
    """Profile the machine, serve and simulate: figures of `live`, `http` and `in_process`."""
    fleet = replace(load_fleet(file, presets=PRESETS), preset=PRESET, options={})
    in_process, specs = calibrated(fleet, rounds)
    over_http = calibrate_over_http(file, fleet, specs, in_process, rounds)
    workload = arrivals(trace, [m.name for m in fleet.models], RATE * seconds).scale_rate(RATE)
    slos = {spec.name: Slo(ttft=1e9, tpot=1e9) for spec in specs}
    prompts = prompts_of(vocabularies_of(specs))
    with serving(file, "--preset", PRESET, "--no-changes", "--log-level", "error") as server:
        live = report_http(server.url, workload, prompts, slos, name=PRESET)
    found = {"live": figures(live)}
    for name, profile in (("http", over_http), ("in_process", in_process)):
        found[name] = figures(run_virtual(fleet, specs, workload, slos, profile).report)
    return found


def main() -> None:
    args = options(__doc__, extra=extra)
    turns = args.turns or (1 if args.quick else 3)
    seconds, rounds = (30.0, 2) if args.quick else (60.0, 4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fleet"
        make_fleet(folder, steps=0, budget=ROOMY)
        ran = []
        for i in range(turns):
            ran.append(turn(folder / "fleet.yaml", args.trace, seconds, rounds))
            for name, values in ran[-1].items():
                text = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
                Console(width=150).print(f"turn {i + 1} {name}: {text}", highlight=False)

    def cells(name: str) -> list[Cell]:
        def of(way: str, metric: str) -> tuple[float, ...]:
            return tuple(found[way][metric] for found in ran)

        point = Point(PRESET, RATE)
        return [Cell(point, metric, of("live", metric), of(name, metric)) for metric in GOALS]

    over_http = cells("http")
    table = table_of(over_http)
    table.title = "sim_http"
    summary = summary_of(over_http, [])
    result: dict[str, Any] = {
        **{key: value for key, value in summary.items() if "_error" in key or "_met" in key},
        "error_in_process": {c.metric: c.error for c in cells("in_process")},
        "turns": turns,
        "seconds": seconds,
        "cells": {c.metric: c.to_json() for c in over_http},
    }
    finish(args, "sim_http", result, table)


if __name__ == "__main__":
    main()
