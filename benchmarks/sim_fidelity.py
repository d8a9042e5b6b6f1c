"""How far a simulation is from what it simulates: `fleet`'s models live, and in virtual time.

Each preset serves the trace at 80 % of its own highest rate, and at that of the slowest preset,
where presets can be compared. A preset's highest rate is that at which 99 % of the requests that it
answers have their first token within 0.5 s and 50 ms for each further one, by bisection in virtual
time; live runs say whether that held. (The levels of `fleet`, taken at low load, are missed long
before the device is busy.)

Presets run in turns, on equal terms. Right before each live run the machine is profiled as
`ballast profile` does it, on other work, and the run is simulated with that profile as read back
from its file. Compared are medians over turns. The goal of a cell is an error of at most 10 %
(throughput, P50) or 20 % (P99); that of the whole is met where all cells meet theirs. Noise stands
beside the errors and changes no verdict: `live_spread` is (greatest - least) / median of a cell's
live runs, `drift` the same of the simulations, which differ in nothing but when the machine was
profiled. `same_order`: of two presets at one rate that differ by more than the goal, and whose live
runs do not overlap, the simulation has the same one ahead; not stated where there is no such pair.
TTFT counts from when a request was sent: a client that
shares the cores is late by a millisecond or so (`send_late_p50`), and is not simulated.
`others_cpu`: cores that other processes and the hypervisor took.

With `--keep DIR` a run is resumed: what has been measured there is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.demo_terms import LINK_RATIO, pace
from ballast.bench.others import DISTURBED, Others
from ballast.bench.report import Report, Spread
from ballast.bench.run import specs_of
from ballast.bench.search import bisect_max_rate
from ballast.bench.worlds import Ran
from ballast.core.settings import LinkSettings, Slo
from ballast.policy.presets import PRESETS
from ballast.sim.calibrate import calibrate
from ballast.sim.device import Profile
from ballast.sim.profile import device_profile, profile_of
from ballast.sim.toml_file import as_toml
from ballast.workload.workload import Workload
from benchmarks.common import MET, NOT_STATED, finish, options, verdict, write_json
from benchmarks.contenders import defaults
from benchmarks.seam import write_story
from benchmarks.setting import Setting, arrivals, fleet_in, trace_option

BUDGET = 0.4
"""Of all weights and peak KV."""
LEVEL = Slo(ttft=0.5, tpot=0.05)
TARGET = 0.99
SHARE = 0.8
"""Of a preset's highest rate."""
TURNS = 3
TRIES = 2
COMPARED = defaults(*PRESETS)
GOALS = {
    "output_tokens_per_second": 0.1,
    "ttft_p50": 0.1,
    "tpot_p50": 0.1,
    "ttft_p99": 0.2,
    "tpot_p99": 0.2,
}
TRACE_SECONDS = 300.0
FIRST = "first"
"""The profile that rates and the link's pace are taken from."""

Told = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A preset at a rate, as a factor on the trace's."""

    preset: str
    rate: float

    def __str__(self) -> str:
        return f"{self.preset}@{self.rate:.2f}"


@dataclass(frozen=True)
class Cell:
    """One figure of one point."""

    point: Point
    metric: str
    live: tuple[float, ...]
    """Run by run."""
    virtual: tuple[float, ...]
    """By the profile taken before each run."""

    @property
    def error(self) -> float:
        """Of the simulations' median, relative to that of the live runs; negative: too low."""
        return statistics.median(self.virtual) / statistics.median(self.live) - 1

    @property
    def verdict(self) -> str:
        return verdict(abs(self.error), at_most=GOALS[self.metric])

    def to_json(self) -> Told:
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


def figures(report: Report) -> dict[str, float]:
    """What is compared, in seconds and tokens per second; over answered requests."""
    answered = [r for r in report.records if r.answered]
    ttft = Spread.of(None if r.first_token is None else r.first_token - r.sent for r in answered)
    tpot = report.total.tpot
    assert ttft is not None
    assert tpot is not None
    return {
        "output_tokens_per_second": report.output_tokens_per_second,
        "ttft_p50": ttft.p50,
        "tpot_p50": tpot.p50,
        "ttft_p99": ttft.p99,
        "tpot_p99": tpot.p99,
    }


class Fidelity:
    """What has been measured, in files of a folder; measures what is missing."""

    def __init__(self, folder: Path, trace: Path, seconds: float, rounds: int) -> None:
        """`seconds` of each live run; `rounds` of each calibration."""
        self.folder = folder
        self.seconds = seconds
        self.rounds = rounds
        self.fleet = fleet_in(folder / "fleet")
        self.specs = specs_of(self.fleet)
        names = [m.name for m in self.fleet.models]
        self.trace = arrivals(trace, names, TRACE_SECONDS)
        self.levels = dict.fromkeys(names, LEVEL)

    def steps(self, turns: int) -> Iterator[str]:
        """Measures; says what it has measured, step by step."""
        self._measured(FIRST)
        yield f"max rates {self.rates}"
        for turn in range(turns):
            for point in self.points[:: 1 if turn % 2 == 0 else -1]:
                self._measured(f"{point}-{turn}")
                told = self._live(point, turn)
                values = (f"{key} {value:.4g}" for key, value in told["figures"].items())
                yield f"turn {turn + 1} {point}: {', '.join(values)}"

    @cached_property
    def link(self) -> float:
        """Bytes per second, the same for all runs."""
        return pace(self.specs, self._measured(FIRST).costs, LINK_RATIO)

    @cached_property
    def rates(self) -> dict[str, float]:
        """By preset, the highest rate, by bisection in virtual time."""
        file = self.folder / f"rates-{self.seconds:g}s.json"
        if not file.is_file():
            write_json(file, {preset: self._max_rate(preset) for preset in COMPARED.rows})
        found: dict[str, float] = json.loads(file.read_text())
        return found

    @property
    def common(self) -> float:
        """The rate at which presets are compared."""
        return SHARE * min(self.rates.values())

    @property
    def points(self) -> list[Point]:
        pairs = [Point(p, r) for p in COMPARED.rows for r in (self.common, SHARE * self.rates[p])]
        return list(dict.fromkeys(pairs))

    def cells(self, turns: int) -> list[Cell]:
        """Of the points that have run in every turn."""
        cells = []
        for point in self.points:
            ran = [self._told(point, turn) for turn in range(turns)]
            live = [told["figures"] for told in ran if told is not None]
            if len(live) < turns:
                continue
            profiles = [f"{point}-{turn}" for turn in range(turns)]
            virtual = [figures(self._virtual(point, p).report) for p in profiles]
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

    def live_runs(self, turns: int) -> dict[str, list[Told]]:
        """What else came of the live runs, by point."""
        runs = {str(p): [self._told(p, turn) for turn in range(turns)] for p in self.points}
        return {point: [told for told in ran if told is not None] for point, ran in runs.items()}

    def simulated(self, point: Point) -> Told:
        """The same of the first simulation."""
        return self._summary(self._virtual(point, f"{point}-0"))

    def disturbed(self) -> dict[str, float]:
        """Cores that others took while the machine was profiled."""
        files = self.folder.glob("disturbed-*.json")
        return {f.stem: json.loads(f.read_text())["others_cpu"] for f in sorted(files)}

    def _measured(self, name: str) -> Profile:
        """The profile of that name, measured now if it was not; again where others disturbed."""
        file = self.folder / f"profile-{name}.toml"
        if not file.is_file():
            for _ in range(TRIES):
                with Others() as others:
                    measured = calibrate(self.fleet, self.rounds)
                if others.cores < DISTURBED:
                    break
            text = as_toml(profile_of("here", measured, self.fleet.device))
            file.write_text(text, encoding="utf-8")
            write_json(self.folder / f"disturbed-{name}.json", {"others_cpu": others.cores})
        return device_profile(file).of(self.specs)

    def _setting(self, profile: str) -> Setting:
        roomy = replace(self.fleet, link=LinkSettings(bytes_per_second=self.link))
        return Setting(roomy, self.specs, self._measured(profile), self.trace)

    def _workload(self, rate: float) -> Workload:
        return self.trace.window(0.0, self.seconds * rate).scale_rate(rate)

    def _max_rate(self, preset: str) -> float:
        def run(rate: float) -> float:
            total = self._virtual(Point(preset, rate), FIRST).report.total
            return total.attained / total.answered

        return bisect_max_rate(run, TARGET, lo=3.0, hi=6.0, steps=3, widen=3).rate

    def _virtual(self, point: Point, profile: str) -> Ran:
        setting = self._setting(profile)
        fleet = setting.under(point.preset, self._budget(setting))
        return setting.virtual(fleet, self._workload(point.rate), self.levels)

    def _live(self, point: Point, turn: int) -> Told:
        told = self._told(point, turn)
        if told is None:
            setting = self._setting(f"{point}-{turn}")
            fleet = setting.under(point.preset, self._budget(setting))
            with Others() as others:
                ran = setting.live(fleet, self._workload(point.rate), self.levels)
            told = {**self._summary(ran), "others_cpu": others.cores}
            write_json(self._file(point, turn), told)
            write_story(self.folder / "stories", f"{point}-{turn}", ran)
        return told

    def _told(self, point: Point, turn: int) -> Told | None:
        file = self._file(point, turn)
        told: Told | None = json.loads(file.read_text()) if file.is_file() else None
        return told

    def _file(self, point: Point, turn: int) -> Path:
        return self.folder / f"live-{point}-{self.seconds:g}s-{turn}.json"

    @staticmethod
    def _budget(setting: Setting) -> int:
        return int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))

    @staticmethod
    def _summary(ran: Ran) -> Told:
        total = ran.report.total
        return {
            "figures": figures(ran.report),
            "requests": total.requests,
            "answered": total.answered,
            "attainment_of_answered": total.attained / total.answered,
            "send_late_p50": statistics.median(r.sent - r.at for r in ran.report.records),
            "send_late_max": ran.report.latest_send,
            **ran.counts,
        }


def same_order(cells: Sequence[Cell], rate: float) -> tuple[int, int]:
    """Pairs of presets that differ live at `rate`, by more than the goal and in every run; in how
    many of them the simulation has the same one ahead."""
    compared = agreed = 0
    for metric, goal in GOALS.items():
        row = [c for c in cells if c.metric == metric and c.point.rate == rate]
        for a, b in itertools.combinations(row, 2):
            live = statistics.median(a.live) / statistics.median(b.live)
            apart = min(a.live) > max(b.live) or min(b.live) > max(a.live)
            if apart and abs(live - 1) > goal:
                compared += 1
                virtual = statistics.median(a.virtual) / statistics.median(b.virtual)
                agreed += (virtual > 1) == (live > 1)
    return compared, agreed


def table_of(cells: Sequence[Cell]) -> Table:
    columns = ("point", "", "live", "virtual", "error", "goal", "", "live spread", "drift")
    table = Table(*columns, title="sim_fidelity", padding=(0, 0))
    for c in cells:
        table.add_row(
            str(c.point),
            c.metric.replace("output_tokens_per_second", "tokens/s"),
            f"{statistics.median(c.live):.4g}",
            f"{statistics.median(c.virtual):.4g}",
            f"{c.error:+.1%}",
            f"{GOALS[c.metric]:.0%}",
            "" if c.verdict == MET else c.verdict,
            f"{spread(c.live):.0%}",
            f"{spread(c.virtual):.0%}",
        )
    return table


def summary_of(cells: Sequence[Cell], common: float) -> Told:
    summary: Told = {}
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


def by_point(cells: Sequence[Cell]) -> Mapping[str, Mapping[str, Told]]:
    told: dict[str, dict[str, Told]] = {}
    for c in cells:
        told.setdefault(str(c.point), {})[c.metric] = c.to_json()
    return told


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--keep", type=Path, help="folder of what was measured, to go on from")
    parser.add_argument("--seconds", type=float, help="of a live run; default 28, quick 12")
    parser.add_argument("--turns", type=int, default=None, help="default 3, quick 1")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds to begin steps in"
    )


def main() -> None:
    args = options(__doc__, extra=extra)
    console = Console(width=150)
    began = time.monotonic()
    turns = args.turns or (1 if args.quick else TURNS)
    with tempfile.TemporaryDirectory() as scratch:
        fidelity = Fidelity(
            args.keep or Path(scratch),
            args.trace,
            args.seconds or (12.0 if args.quick else 28.0),
            rounds=1 if args.quick else 2,
        )
        for step in fidelity.steps(turns):
            console.print(f"{time.monotonic() - began:4.0f} s  {step}", highlight=False)
            if time.monotonic() - began > args.stop_after:
                console.print(f"stopped; go on with --keep {args.keep}")
                return
        cells = fidelity.cells(turns)
        result = {
            **summary_of(cells, fidelity.common),
            "workload": fidelity.trace.describe(),
            "seconds": fidelity.seconds,
            "turns": turns,
            "max_rate_virtual": fidelity.rates,
            "cells": by_point(cells),
            "profiled_others_cpu": fidelity.disturbed(),
            "live": fidelity.live_runs(turns),
            "virtual": {str(p): fidelity.simulated(p) for p in fidelity.points},
        }
    table = table_of(cells)
    for key, value in summary_of(cells, fidelity.common).items():
        console.print(key, f"{value:.3g}" if isinstance(value, float) else value, highlight=False)
    finish(args, "sim_fidelity", result, table)


if __name__ == "__main__":
    main()
