"""The preset `ballast` against the others: ten workloads on H100s with PCIe 5, in virtual time.

Each workload at two rates: its knee, the highest at which the best of the others attains 90 % on
the first seed, and twice that. A *cell* is a workload at a rate. Seeds are paired. A preset that
lies more than ten points behind the best of a cell after the first seed is not run on further ones.
With `--state FILE` results are kept there, and a run that was stopped goes on.

`worst_vs_best_other`: the least over cells of attainment less that of the best other preset, in
points, of means over seeds. `headroom_closed`: the mean, over cells in which eight times the memory
brings a point or more, of the part of that which lies between. `mean_rate_vs_best_fixed`: mean over
workloads of the rate at which `ballast` attains 95 %, over that of the one other preset which is
best over all; between measured rates by a line. `cells`: means, with 95 % intervals of the paired
differences where there are seeds enough.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from ballast.policy.presets import resolve
from benchmarks.arbiter_workloads import SLO, TRACES, WORKLOADS
from benchmarks.common import finish, options
from benchmarks.headroom import attained
from benchmarks.rate_curves import Curve

OURS = "ballast"
OTHERS = ("lru+deadline", "recompute+deadline", "balloon", "prism")
AMPLE = "ample memory"
KNEES = tuple(2.0 ** (k / 2) for k in range(2, 11))
"""Requests per second at which a knee may lie."""
TARGET, RATE_TARGET = 0.9, 0.95
MULTIPLES = (1.0, 2.0)
"""Of the knee."""
BEHIND = 0.1
"""Of attainment, after the first seed: a rival that far behind is dropped from the cell."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Quantiles for 95 % intervals by the number of seeds."""

Runs = dict[str, float]
"""Attainment by key: workload, rate, preset, seed."""


def key(workload: str, rate: float, preset: str, seed: int) -> str:
    return f"{workload} {rate:g} {preset} {seed}"


def measure(seconds: float, workload: str, rate: float, preset: str, seed: int) -> float:
    """Return the share of requests that attain their service levels in one run."""
    of = WORKLOADS[workload]
    work = of.make(rate, seconds, seed)
    ample = preset == AMPLE
    return attained(of, work, resolve("balloon" if ample else preset), ample=ample)


class Bench:
    """Runs that are measured at most once, in several processes, kept in a file."""

    def __init__(self, pool: ProcessPoolExecutor, seconds: float, state: Path | None) -> None:
        self._pool, self._measure, self._state = pool, partial(measure, seconds), state
        self._terms = terms(seconds)
        self.runs: Runs = {}
        if state is not None and state.is_file():
            kept = json.loads(state.read_text())
            if kept["terms"] == self._terms:
                self.runs = kept["runs"]

    def run(self, wanted: Sequence[tuple[str, float, str, int]]) -> list[float]:
        """Return the attainment of each wanted run, in order."""
        missing = [w for w in dict.fromkeys(wanted) if key(*w) not in self.runs]
        coming = [(w, self._pool.submit(self._measure, *w)) for w in missing]
        for w, share in coming:
            self.runs[key(*w)] = share.result()
            self._keep()
        return [self.runs[key(*w)] for w in wanted]

    def _keep(self) -> None:
        if self._state is not None:
            self._state.write_text(json.dumps({"terms": self._terms, "runs": self.runs}))


def terms(seconds: float) -> str:
    """Return what runs that are kept depend on, code of policies and workloads included."""
    here = Path(__file__).resolve().parents[1]
    files = [
        *sorted((here / "ballast/policy").rglob("*.py")),
        here / "benchmarks/arbiter_workloads.py",
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    traces = sorted(p.name for p in TRACES.glob("*.gz")) if TRACES.is_dir() else []
    return json.dumps([digest.hexdigest(), seconds, asdict(SLO), traces])


def knee(bench: Bench, workload: str) -> float:
    """Return the highest rate of `KNEES` up to which the best other preset attains `TARGET`."""
    found: float = KNEES[0]
    for rate in KNEES:
        if max(bench.run([(workload, rate, other, 0) for other in OTHERS])) < TARGET:
            break
        found = rate
    return found


def cell(bench: Bench, workload: str, rate: float, seeds: int) -> dict[str, list[float]]:
    """Return attainment by preset and seed; those dropped have the first seed's alone."""
    presets = (OURS, *OTHERS)
    first = bench.run([(workload, rate, p, 0) for p in presets])
    kept = [p for p, share in zip(presets, first, strict=True) if share >= max(first) - BEHIND]
    kept = [OURS, *(p for p in kept if p != OURS)]
    wanted = [(workload, rate, p, seed) for seed in range(1, seeds) for p in kept]
    bench.run(wanted)
    return {
        p: [bench.runs[key(workload, rate, p, s)] for s in range(seeds if p in kept else 1)]
        for p in presets
    }


def interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of paired differences, in points; None: too few."""
    differences = [100 * (a - b) for a, b in zip(ours, other, strict=True)]
    n = len(differences)
    if n not in STUDENT:
        return None
    half = STUDENT[n] * stdev(differences) / math.sqrt(n)
    return fmean(differences) - half, fmean(differences) + half


def summary(cells: Mapping[tuple[str, float], Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return the keys of the result, from attainment by cell, preset and seed."""
    found: dict[str, Any] = {}
    margins: list[float] = []
    closed: list[float] = []
    for (workload, rate), by_preset in cells.items():
        means = {p: 100 * fmean(shares) for p, shares in by_preset.items()}
        full = {p for p in OTHERS if len(by_preset[p]) == len(by_preset[OURS])}
        best = max(full or OTHERS, key=lambda p: means[p])
        margins.append(means[OURS] - means[best])
        room = means[AMPLE] - means[best]
        if room >= 1.0:
            closed.append((means[OURS] - means[best]) / room)
        found[f"{workload}.{rate:g}"] = {
            **means,
            "best_other": best,
            "interval": interval(by_preset[OURS], by_preset[best]) if full else None,
        }
    return {
        "worst_vs_best_other": min(margins),
        "mean_vs_best_other": fmean(margins),
        "headroom_closed": fmean(closed) if closed else None,
        "mean_rate_vs_best_fixed": _rates(cells),
        "cells": found,
    }


def _rates(cells: Mapping[tuple[str, float], Mapping[str, Sequence[float]]]) -> float | None:
    """Return the mean of rates at `RATE_TARGET` over those of the best other preset over all."""
    of_all = {p: fmean(fmean(by[p]) for by in cells.values()) for p in OTHERS}
    fixed = max(of_all, key=lambda p: of_all[p])
    ratios = []
    for workload in dict.fromkeys(w for w, _ in cells):
        rows = {rate: by for (w, rate), by in cells.items() if w == workload}
        ours, other = (
            Curve({rate: fmean(by[p]) for rate, by in rows.items()}).rate_at(RATE_TARGET)
            for p in (OURS, fixed)
        )
        if ours and other:
            ratios.append(ours / other)
    return fmean(ratios) if ratios else None


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, by commas")
        parser.add_argument("--seeds", type=int, default=4)
        parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
        parser.add_argument("--processes", type=int, default=2)
        parser.add_argument("--state", type=Path, help="keep results here, and go on from them")

    args = options(__doc__, argv, extra)
    seconds = 15.0 if args.quick else args.seconds
    seeds = 1 if args.quick else args.seeds
    cells: dict[tuple[str, float], dict[str, list[float]]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        bench = Bench(pool, seconds, args.state)
        for workload in args.only.split(","):
            at = knee(bench, workload)
            for rate in (k * at for k in MULTIPLES):
                found = cell(bench, workload, rate, seeds)
                found[AMPLE] = bench.run([(workload, rate, AMPLE, 0)])
                cells[workload, rate] = found
    result = summary(cells)
    columns = (OURS, *OTHERS, AMPLE)
    table = Table("cell", *columns, "best other, interval", title="attainment, %")
    for name, row in result["cells"].items():
        between = row["interval"]
        said = "" if between is None else f" {between[0]:+.1f} to {between[1]:+.1f}"
        table.add_row(name, *(f"{row[c]:.1f}" for c in columns), row["best_other"] + said)
    finish(args, "arbiter_sim", result, table)


if __name__ == "__main__":
    main()
