"""The preset `ballast` against the others: ten workloads on H100s with PCIe 5, three of them also
on a GH200, four H20s with NVLink and eight A100s, in virtual time.

Each workload at two rates: its knee, the highest up to which one of `KNEE_OF` attains 90 % on the
first seed, and twice that. A *cell* is a workload at a rate. Seeds are paired. Each rival has, in
each cell, the better of its own order of compute and `deadline`, on the first seed, and the same
options as ours. Rivals more than ten points behind the best after that seed are not run on further
ones. With `--state FILE` results are kept there, and a run that was stopped goes on. `--quick`:
H100s alone, fewer rivals, one seed, 10 s of arrivals, knees by powers of two of one preset, and
orders of compute chosen at the knee alone.

`worst_vs_best_other`: the least over cells of attainment less that of the best rival, in points, of
means over seeds. `mean_vs_unseen_best`: the mean, each seed beside the rival that is best on the
other seeds, as the best of many on few seeds is so by chance in part. `headroom_closed`: the mean,
over cells in which eight times the memory brings a point or more to the best of `KNEE_OF`, of the
part of that which lies between. Such a part is large where little lies between, so that a few cells
decide the mean: `closed_of_sums` is what lies between best rivals and `ballast` in all these cells
over what lies between best rivals and ample memory, with `closed_interval`, 95 % by drawing cells
again. `mean_rate_vs_best_fixed`: mean over workloads of the rate at which `ballast` attains 95 %,
over that of the one rival which is best over all; between measured rates by a line. `cells`: means,
with 95 % intervals of the paired differences where there are seeds enough.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.table import Table

from ballast.policy.presets import Preset, resolve
from benchmarks.arbiter_workloads import ALL, SLO, TRACES, WORKLOADS
from benchmarks.common import finish, options
from benchmarks.contenders import defaults
from benchmarks.headroom import attained
from benchmarks.rate_curves import Curve

OURS = "ballast"
SYSTEMS = {"aegaeon": ("swap", {"preemptive": 1.0}), "warmserve": ("balloon", {"restore": 1.0})}
"""Rivals that are a preset with an option: turns between tokens, prewarming by forecast."""
RIVALS = (
    "recompute",
    "balloon",
    "prism",
    "lru",
    "mirage",
    "kvswap",
    "swap",
    "static",
    "superinfer",
    *SYSTEMS,
)
"""Presets of the papers that serve several models from one device."""
QUICK_RIVALS = RIVALS[:3]
ORDERS = ("round-robin", "deadline")
"""Each rival has the better of these."""
ROWS = {rival: tuple(f"{rival}+{order}" for order in ORDERS) for rival in RIVALS}
COMPARED = defaults(OURS, *chain.from_iterable(ROWS[r] for r in RIVALS if r not in SYSTEMS))
OWN = (
    "admission/least_harm.py",
    "memory/absences.py",
    "memory/arbiter.py",
    "market/clearing.py",
    "market/coming_pages.py",
    "market/harm.py",
    "fleet/by_price.py",
    "market/outlook.py",
    "market/published_prices.py",
    "market/work_ahead.py",
    "supply/",
    "presets.py",
)
"""Files of policies that `ballast` alone uses, and the table that names it."""
KNEE_OF = ("prism+deadline", "balloon+deadline")
AMPLE = "ample memory"
KNEES = tuple(2.0 ** (k / 2) for k in range(2, 11))
"""Requests per second at which a knee may lie, times a workload's `scale`."""
TARGET, RATE_TARGET = 0.9, 0.95
MULTIPLES = (1.0, 2.0)
"""Of the knee."""
BEHIND = 0.1
"""Of attainment, after the first seed: a rival that far behind is dropped from the cell."""
STATED = ("worst_vs_best_other", "mean_vs_best_other", "headroom_closed", "closed_of_sums")
"""Keys below the table."""
LEAST_CELLS, DRAWS = 5, 2000
"""Cells from which an interval of their ratio is stated, and how often they are drawn again."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Quantiles for 95 % intervals by the number of seeds."""

Shares = dict[str, list[float]]
"""Attainment by preset and seed."""
Cells = dict[tuple[str, float], Shares]
"""By workload and rate."""
Runs = dict[str, float]
"""Attainment by key: workload, rate, preset, seed."""


def key(workload: str, rate: float, preset: str, seed: int) -> str:
    return f"{workload} {rate:g} {preset} {seed}"


def measure(seconds: float, workload: str, rate: float, row: str, seed: int) -> float:
    """Return the share of requests that attain their service levels in one run."""
    of = ALL[workload]
    work = of.make(rate, seconds, seed)
    if row.startswith(AMPLE):
        return attained(of, work, resolve(row.removeprefix(AMPLE).strip()), ample=True)
    return attained(of, work, preset_of(row))


def preset_of(row: str) -> Preset:
    """Return the preset of a row, with its options."""
    rival, _, order = row.partition("+")
    if rival not in SYSTEMS:
        return resolve(row, COMPARED.options(row))
    preset, own = SYSTEMS[rival]
    return resolve(f"{preset}+{order}", own)


class Bench:
    """Runs that are measured at most once, in several processes, kept in a file.

    Runs of rivals stay when code changes that `ballast` alone uses.
    """

    def __init__(self, pool: ProcessPoolExecutor, seconds: float, state: Path | None) -> None:
        self._pool, self._measure, self._state = pool, partial(measure, seconds), state
        self._terms = {whose: terms(seconds, ours=whose == "ours") for whose in ("ours", "rivals")}
        self._runs: dict[str, Runs] = {"ours": {}, "rivals": {}}
        if state is not None and state.is_file():
            for whose, kept in json.loads(state.read_text()).items():
                if kept["terms"] == self._terms[whose]:
                    self._runs[whose] = kept["runs"]

    def run(self, wanted: Sequence[tuple[str, float, str, int]]) -> list[float]:
        """Return the attainment of each wanted run, in order."""
        missing = [w for w in dict.fromkeys(wanted) if key(*w) not in self._kept(w)]
        coming = [(w, self._pool.submit(self._measure, *w)) for w in missing]
        for w, share in coming:
            self._kept(w)[key(*w)] = share.result()
            self._write()
        return [self._kept(w)[key(*w)] for w in wanted]

    def _kept(self, wanted: tuple[str, float, str, int]) -> Runs:
        return self._runs["ours" if wanted[2] == OURS else "rivals"]

    def _write(self) -> None:
        if self._state is not None:
            kept = {w: {"terms": self._terms[w], "runs": runs} for w, runs in self._runs.items()}
            self._state.write_text(json.dumps(kept))


def terms(seconds: float, *, ours: bool) -> str:
    """Return what runs that are kept depend on, code of policies and workloads included; of rivals,
    without the code that `ballast` alone uses."""
    here = Path(__file__).resolve().parents[1]
    policy = here / "ballast/policy"
    digest = hashlib.sha256()
    for file in [*sorted(policy.rglob("*.py")), here / "benchmarks/arbiter_workloads.py"]:
        if ours or not is_own(file.relative_to(here).as_posix()):
            digest.update(file.read_bytes())
    traces = sorted(p.name for p in TRACES.glob("*.gz")) if TRACES.is_dir() else []
    return json.dumps([digest.hexdigest(), seconds, asdict(SLO), traces])


def is_own(file: str) -> bool:
    """Return whether a file of policies is used by `ballast` alone, or is a table that names it."""
    return any(file.startswith(f"ballast/policy/{own}") for own in OWN)


def knee(
    bench: Bench,
    workload: str,
    presets: Sequence[str] = KNEE_OF,
    rates: Sequence[float] = KNEES,
) -> float:
    """Return the highest of `rates`, found by bisection, at which one of the presets attains
    `TARGET`; the lowest if none does."""
    rates = [rate * ALL[workload].scale for rate in rates]
    low, high = 0, len(rates)
    while high - low > 1:
        middle = (low + high) // 2
        shares = bench.run([(workload, rates[middle], row, 0) for row in presets])
        low, high = (middle, high) if max(shares) >= TARGET else (low, middle)
    return float(rates[low])


def better_rows(bench: Bench, workload: str, rate: float, rivals: Sequence[str]) -> dict[str, str]:
    """Return the row of each rival in its better order, on the first seed."""
    rows = [row for rival in rivals for row in ROWS[rival]]
    first = dict(zip(rows, bench.run([(workload, rate, row, 0) for row in rows]), strict=True))
    return {rival: max(ROWS[rival], key=lambda row: first[row]) for rival in rivals}


def cell(
    bench: Bench,
    workload: str,
    rate: float,
    seeds: int,
    better: Mapping[str, str],
    ample: Sequence[str] = KNEE_OF,
) -> Shares:
    """Return attainment by preset and seed, of rivals by the rows of `better`; those dropped have
    the first seed's alone. `ample`: presets of which the best, on the first seed, has ample
    memory."""
    large = [f"{AMPLE} {preset}" for preset in ample]
    rows = [OURS, *large, *better.values()]
    first = dict(zip(rows, bench.run([(workload, rate, row, 0) for row in rows]), strict=True))
    best = max(first[row] for row in better.values())
    largest = max(large, key=lambda row: first[row])
    kept = {OURS: OURS, AMPLE: largest}
    kept |= {r: row for r, row in better.items() if first[row] >= best - BEHIND}
    wanted = [(workload, rate, row, seed) for seed in range(1, seeds) for row in kept.values()]
    shares = iter(bench.run(wanted))
    found = {p: [first[row]] for p, row in ({OURS: OURS} | dict(better)).items()}
    found[AMPLE] = [first[largest]]
    for _ in range(1, seeds):
        for preset in kept:
            found[preset].append(next(shares))
    return found


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
    unseen: list[float] = []
    closed: list[tuple[float, float]] = []
    for (workload, rate), by_preset in cells.items():
        means = {p: 100 * fmean(shares) for p, shares in by_preset.items()}
        others = by_preset.keys() - {OURS, AMPLE}
        full = sorted(p for p in others if len(by_preset[p]) == len(by_preset[OURS]))
        best = max(full, key=lambda p: means[p])
        margins.append(means[OURS] - means[best])
        room = means[AMPLE] - means[best]
        if room >= 1.0:
            closed.append((means[OURS] - means[best], room))
        unseen += beside_unseen({p: by_preset[p] for p in (OURS, *full)})
        found[f"{workload}.{rate:g}"] = {
            **means,
            "best_other": best,
            "interval": interval(by_preset[OURS], by_preset[best]),
        }
    return {
        "worst_vs_best_other": min(margins),
        "mean_vs_best_other": fmean(margins),
        "mean_vs_unseen_best": fmean(unseen) if unseen else None,
        "headroom_closed": fmean(gain / room for gain, room in closed) if closed else None,
        "closed_of_sums": _of_sums(closed) if closed else None,
        "closed_interval": drawn_again(closed),
        "mean_rate_vs_best_fixed": _rates(cells),
        "cells": found,
    }


def beside_unseen(by_preset: Mapping[str, Sequence[float]]) -> list[float]:
    """Return, for each seed, the points of `ballast` beside the rival that is best in the mean of
    the other seeds; none where there is but one seed."""
    n = len(by_preset[OURS])
    found = []
    for seed in range(n if n > 1 else 0):
        others = {p: sum(of) - of[seed] for p, of in by_preset.items() if p != OURS}
        best = max(others, key=lambda p: others[p])
        found.append(100 * (by_preset[OURS][seed] - by_preset[best][seed]))
    return found


def _of_sums(closed: Sequence[tuple[float, float]]) -> float:
    return sum(gain for gain, _ in closed) / sum(room for _, room in closed)


def drawn_again(closed: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of sums, from cells drawn again with replacement; None:
    too few cells."""
    if len(closed) < LEAST_CELLS:
        return None
    rng = np.random.default_rng(0)
    draws = rng.integers(len(closed), size=(DRAWS, len(closed)))
    gains, rooms = (np.array(part)[draws].sum(1) for part in zip(*closed, strict=True))
    low, high = np.quantile(gains / rooms, (0.025, 0.975)).tolist()
    return low, high


def _rates(cells: Mapping[tuple[str, float], Mapping[str, Sequence[float]]]) -> float | None:
    """Return the mean of rates at `RATE_TARGET` over those of the best other preset over all."""
    rivals = set.intersection(*(by.keys() - {OURS, AMPLE} for by in cells.values()))
    of_all = {p: fmean(fmean(by[p]) for by in cells.values()) for p in sorted(rivals)}
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
        parser.add_argument("--only", default="", help="workloads, by commas")
        parser.add_argument("--seeds", type=int, default=4)
        parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
        parser.add_argument("--processes", type=int, default=2)
        parser.add_argument("--state", type=Path, help="keep results here, and go on from them")

    args = options(__doc__, argv, extra)
    seconds = 10.0 if args.quick else args.seconds
    cells: Cells = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        bench = Bench(pool, seconds, args.state)
        for workload in args.only.split(",") if args.only else WORKLOADS if args.quick else ALL:
            found = quick(bench, workload) if args.quick else thorough(bench, workload, args.seeds)
            for rate, shares in found:
                cells[workload, rate] = shares
                texts = (f"{p} {100 * fmean(of):.1f}" for p, of in shares.items())
                print(f"{workload}.{rate:g}: {', '.join(texts)}", flush=True)
    result = summary(cells)
    columns = (OURS, *(QUICK_RIVALS if args.quick else RIVALS), AMPLE)
    table = Table("cell", *columns, "best other, interval", title="attainment, %")
    for name, row in result["cells"].items():
        between = row["interval"]
        said = "" if between is None else f" {between[0]:+.1f} to {between[1]:+.1f}"
        table.add_row(name, *(f"{row[c]:.1f}" for c in columns), row["best_other"] + said)
    table.caption = ", ".join(
        f"{name} {result[name]:+.2f}"
        for name in (
            "worst_vs_best_other",
            "mean_vs_best_other",
            "headroom_closed",
            "closed_of_sums",
        )
        if result[name] is not None
    )
    finish(args, "arbiter_sim", result, table)


def thorough(bench: Bench, workload: str, seeds: int) -> Iterator[tuple[float, Shares]]:
    """Yield the rates of a workload's cells, and what was attained there."""
    at = knee(bench, workload)
    for rate in (k * at for k in MULTIPLES):
        better = better_rows(bench, workload, rate, RIVALS)
        yield rate, cell(bench, workload, rate, seeds, better)


def quick(bench: Bench, workload: str) -> Iterator[tuple[float, Shares]]:
    """Yield cells as `thorough`, of fewer runs."""
    presets = KNEE_OF[:1]
    at = knee(bench, workload, presets, KNEES[::2])
    better = better_rows(bench, workload, at, QUICK_RIVALS)
    for rate in (k * at for k in MULTIPLES):
        yield rate, cell(bench, workload, rate, 1, better, presets)


if __name__ == "__main__":
    main()
