"""How far a simulation is from what it simulates: `fleet`'s models live, and in virtual time.

Each preset serves the trace at 80 % of its own highest rate, and at that of the slowest preset,
where presets can be compared. A preset's highest rate is that at which 99 % of the requests that it
answers have their first token within 0.5 s and 50 ms for each further one, by bisection in virtual
time; live runs say whether that held. (The levels of `fleet`, taken at low load, are missed long
before the device is busy.)

Presets run in turns, on equal terms. Right before and after a preset's live runs of a turn, one at
each rate, the machine is profiled as `ballast profile` does it, on other work: its speed drifts.
Each run is simulated with both profiles as read back from their files; the mean of both counts. A
run takes the same time at every rate: where the trace is too short it begins anew. Compared are
medians over turns. The goal of a cell is an error of at most 10 % (throughput, P50) or 20 % (P99);
that of the whole is met where all cells meet theirs. Noise stands beside the errors and changes no
verdict: `live_spread` is (greatest - least) / median of a cell's live runs, `drift` the same of the
simulations, which differ in nothing but when the machine was profiled. `same_order`: of two presets
at one rate that differ by more than the goal, and whose live runs do not overlap, the simulation
has the same one ahead; not stated where there is no such pair. TTFT counts from when a request was
sent: a client that shares the cores is late by a millisecond or so (`send_late_p50`), and is not
simulated. `others_cpu`: cores that other processes and the hypervisor took.

`capacity`: the highest rate of every preset, by the same bisection live and in virtual time, there
with the profiles taken before and after (the median counts); `capacity_error_max` is the largest
error, with a goal of 15 %. Rates are 9 % apart.

`--quick`: the presets `QUICK`, one turn, and the highest rate of the one that moves models.

Part `two`: the same figures, and rates, of two devices with half of the cores and the budget each,
served by worker processes, and profiled behind them (`worker_profile`). Virtual devices have the
models that the live server gives them. `decisions_alike`: the part of what the fleet policy of
`prism` decides, looking every 2 s, that it decides live and in virtual time in the same order, on
the same arrivals; not stated where it decides nothing.

With `--keep DIR` a run is resumed: what has been measured there is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from ballast.policy.presets import PRESETS
from benchmarks.common import MET, NOT_STATED, finish, options, verdict
from benchmarks.contenders import defaults
from benchmarks.fidelity_runs import (
    FIRST,
    MOVES,
    Document,
    Point,
    Runs,
    capacity_errors,
    on,
    summary,
)
from benchmarks.setting import trace_option

SHARE = 0.8
"""Of a preset's highest rate."""
TURNS = 3
COMPARED = defaults(*PRESETS)
QUICK = defaults("static", "balloon", MOVES)
GOALS = {
    "output_tokens_per_second": 0.1,
    "ttft_p50": 0.1,
    "tpot_p50": 0.1,
    "ttft_p99": 0.2,
    "tpot_p99": 0.2,
}
CAPACITY_GOAL = 0.15
PARTS = {"one": 1, "two": 2}
"""Devices of each part."""


@dataclass(frozen=True)
class Cell:
    """One figure of one point."""

    point: Point
    metric: str
    live: tuple[float, ...]
    """Run by run."""
    virtual: tuple[float, ...]
    """Mean of each run's simulations, by the profiles taken before and after it."""

    @property
    def error(self) -> float:
        """Of the simulations' median, relative to that of the live runs; negative: too low."""
        return statistics.median(self.virtual) / statistics.median(self.live) - 1

    @property
    def verdict(self) -> str:
        return verdict(abs(self.error), at_most=GOALS[self.metric])

    def to_json(self) -> Document:
        return {
            "live": list(self.live),
            "virtual": list(self.virtual),
            "error": self.error,
            "verdict": self.verdict,
            "live_spread": spread(self.live),
            "drift": spread(self.virtual),
        }


def spread(values: Sequence[float]) -> float:
    """(greatest - least) / median."""
    return (max(values) - min(values)) / statistics.median(values)


class Fidelity:
    """What is measured in which order, on so many devices, and what came of it."""

    def __init__(self, runs: Runs, devices: int) -> None:
        self.runs = runs
        self.devices = devices

    def steps(self, turns: int, capacity: Sequence[str]) -> Iterator[str]:
        """Measures; says what it has measured, step by step."""
        self.runs.measured(FIRST, self.devices)
        yield f"max rates {self.rates}"
        for turn in range(turns):
            points = self.points[:: 1 if turn % 2 == 0 else -1]
            for point in points:
                outcome = self.runs.live(point, turn)
                values = (f"{key} {value:.4g}" for key, value in outcome["figures"].items())
                yield f"turn {turn + 1} {point}: {', '.join(values)}"
            self.runs.measured(self.runs.around(points[-1].preset, turn)[1], self.devices)
        if self.devices > 1:
            yield f"decisions: {self.decisions}"
        for preset in capacity:
            yield f"{on(preset, self.devices)}: {self.runs.capacity(preset, self.devices)}"

    @cached_property
    def rates(self) -> dict[str, float]:
        """By preset, the highest rate in virtual time, which `points` go by."""
        return self.runs.rates(self.devices)

    @property
    def common(self) -> float:
        """The rate at which presets are compared."""
        return SHARE * min(self.rates.values())

    @property
    def points(self) -> list[Point]:
        rows = self.runs.compared.rows
        pairs = [(p, r) for p in rows for r in (self.common, SHARE * self.rates[p])]
        return list(dict.fromkeys(Point(p, r, self.devices) for p, r in pairs))

    def cells(self, turns: int) -> list[Cell]:
        """Of the points that have run in every turn."""
        cells = []
        for point in self.points:
            ran = [self.runs.recorded(point, turn) for turn in range(turns)]
            live = [outcome["figures"] for outcome in ran if outcome is not None]
            if len(live) < turns:
                continue
            virtual = [self.runs.simulated(point, turn) for turn in range(turns)]
            for metric in GOALS:
                cells.append(
                    Cell(
                        point,
                        metric,
                        tuple(f[metric] for f in live),
                        tuple(f[metric] for f in virtual),
                    )
                )
        return cells

    @property
    def decisions(self) -> Document:
        """What a fleet policy that moves models decides, at the rate at which presets compare."""
        return self.runs.decisions(self.devices, self.rates[MOVES])

    def capacities(self, presets: Sequence[str]) -> dict[str, Document]:
        """By preset, as `Runs.capacity` found it, with the median of virtual time."""
        found = {}
        for preset in presets:
            outcome = self.runs.capacity(preset, self.devices)
            found[on(preset, self.devices)] = {
                **outcome,
                "virtual_median": statistics.median(outcome["virtual"]),
            }
        return found

    def live_runs(self, turns: int) -> dict[str, list[Document]]:
        """What else came of the live runs, by point."""
        runs = {str(p): [self.runs.recorded(p, turn) for turn in range(turns)] for p in self.points}
        return {
            point: [outcome for outcome in ran if outcome is not None]
            for point, ran in runs.items()
        }

    def simulated(self) -> dict[str, Document]:
        """The same of each point's first simulation."""
        first = {p: self.runs.around(p.preset, 0)[0] for p in self.points}
        return {str(p): summary(self.runs.virtual(p, before)) for p, before in first.items()}


def same_order(cells: Sequence[Cell], rates: Sequence[float]) -> tuple[int, int]:
    """Pairs of presets that differ live at one of `rates`, on as many devices, by more than the
    goal and in every run; in how many of them the simulation has the same one ahead."""
    compared = agreed = 0
    rows = itertools.product(GOALS.items(), rates, PARTS.values())
    for (metric, goal), rate, devices in rows:
        row = [
            c for c in cells if (c.metric, c.point.rate, c.point.devices) == (metric, rate, devices)
        ]
        for a, b in itertools.combinations(row, 2):
            live = statistics.median(a.live) / statistics.median(b.live)
            apart = min(a.live) > max(b.live) or min(b.live) > max(a.live)
            if apart and abs(live - 1) > goal:
                compared += 1
                virtual = statistics.median(a.virtual) / statistics.median(b.virtual)
                agreed += (virtual > 1) == (live > 1)
    return compared, agreed


def summary_of(cells: Sequence[Cell], common: Sequence[float]) -> Document:
    summary: Document = {}
    for name, tail in (("median", False), ("p99", True)):
        of = [c for c in cells if c.metric.endswith("p99") == tail]
        goal = max(GOALS[c.metric] for c in of)
        worst = max(abs(c.error) for c in of)
        summary |= {
            f"{name}_error_max": worst,
            f"{name}_error_goal": goal,
            f"{name}_error": verdict(worst, at_most=goal),
            f"{name}_cells_met": f"{sum(c.verdict == MET for c in of)} of {len(of)}",
        }
    compared, agreed = same_order(cells, common)
    return {
        **summary,
        "same_order": agreed == compared if compared else NOT_STATED,
        "pairs_compared": compared,
        "pairs_agreed": agreed,
        "live_spread_max": max(spread(c.live) for c in cells),
        "profile_drift_max": max(spread(c.virtual) for c in cells),
    }


def by_point(cells: Sequence[Cell]) -> Mapping[str, Mapping[str, Document]]:
    outcome: dict[str, dict[str, Document]] = {}
    for c in cells:
        outcome.setdefault(str(c.point), {})[c.metric] = c.to_json()
    return outcome


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--keep", type=Path, help="folder of what was measured, to go on from")
    parser.add_argument("--seconds", type=float, help="of a live run; default 28, quick 12")
    parser.add_argument("--turns", type=int, default=None, help="default 3, quick 1")
    parser.add_argument("--parts", default="one,two", help="devices; default one,two")
    parser.add_argument("--no-capacity", action="store_true", help="no highest rates")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds to begin steps in"
    )


def main() -> None:
    args = options(__doc__, extra=extra)
    console = Console(width=150)
    began = time.monotonic()
    turns = args.turns or (1 if args.quick else TURNS)
    compared = QUICK if args.quick else COMPARED
    capacity = [] if args.no_capacity else [MOVES] if args.quick else list(compared.rows)
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(
            args.keep or Path(scratch),
            args.trace,
            args.seconds or (12.0 if args.quick else 28.0),
            rounds=1 if args.quick else 2,
            compared=compared,
        )
        parts = [Fidelity(runs, PARTS[name]) for name in args.parts.split(",")]
        for step in itertools.chain(*(part.steps(turns, capacity) for part in parts)):
            console.print(f"{time.monotonic() - began:4.0f} s  {step}", highlight=False)
            if time.monotonic() - began > args.stop_after:
                console.print(f"stopped; go on with --keep {args.keep}")
                return
        cells = [cell for part in parts for cell in part.cells(turns)]
        found = {k: v for part in parts for k, v in part.capacities(capacity).items()}
        capacities = capacity_errors(
            {name: outcome["live"] for name, outcome in found.items()},
            {name: outcome["virtual_median"] for name, outcome in found.items()},
            CAPACITY_GOAL,
        )
        outcome = {**summary_of(cells, [part.common for part in parts]), **capacities}
        decisions = [part.decisions for part in parts if part.devices > 1]
        for decided in decisions:
            outcome["decisions_alike"] = (
                NOT_STATED if decided["alike"] is None else decided["alike"]
            )
        result = {
            **outcome,
            "workload": runs.trace.describe(),
            "seconds": runs.seconds,
            "turns": turns,
            "max_rate_virtual": {on(p, f.devices): r for f in parts for p, r in f.rates.items()},
            "capacities": found,
            "decisions": decisions,
            "cells": by_point(cells),
            "profiled_others_cpu": runs.disturbed(),
            "live": {k: v for part in parts for k, v in part.live_runs(turns).items()},
            "virtual": {k: v for part in parts for k, v in part.simulated().items()},
        }
    finish(args, "sim_fidelity", result)


if __name__ == "__main__":
    main()
