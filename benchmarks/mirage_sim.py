"""MIRAGE's evaluation in virtual time: every number of its sections 7.2 to 7.6 beside ours.

GH200 of 96 GB, models C1 and C2 with the paper's fractions, arrivals of Azure's coding trace,
lengths like ShareGPT's and Alpaca's; costs by the roofline, nothing measured there. The text seldom
states rates: each case is run from below its knee to eight times it (`mirage_curves`). Presets that
are compared have equal options (`contenders`); "no shortage" is recomputation on a device of twice
the memory: what no way of finding memory can beat. `--sweeps`: also turns, chunks, links, and parts
of `mirage` switched off. `--docs` renews the tables of docs/mirage-*.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import finish, options, result_table
from benchmarks.mirage_cases import CURVES, GROUPS, Case, Result, arrivals_of, canonical, measure
from benchmarks.mirage_curves import (
    FULL_MULTIPLES,
    MULTIPLES,
    QUICK_MULTIPLES,
    anywhere,
    at_knees,
    curve_cases,
    curves,
    knee,
    knees_wanted,
)
from benchmarks.mirage_setting import ARRIVALS
from benchmarks.mirage_sweeps import SWEEPS, sweep_cases, swept
from benchmarks.mirage_tables import paper, renew, sweep_table, tables

TRACES = Path(__file__).resolve().parents[2] / "shared/traces"
QUICK = "temporal_c2", "mps_c1", "alone"


class Kept:
    """Results so far, one to a line of a file, so that a run can be resumed. Its user deletes it
    when the code has changed."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, Any] = {}
        if file is not None and file.exists():
            lines = (json.loads(line) for line in file.read_text().splitlines())
            self._known = {json.dumps(line["case"]): line["result"] for line in lines}

    def __contains__(self, case: Sequence[object]) -> bool:
        return json.dumps(case) in self._known

    def __getitem__(self, case: Sequence[object]) -> Any:
        return self._known[json.dumps(case)]

    def add(self, case: Sequence[object], result: object) -> None:
        self._known[json.dumps(case)] = result
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"case": case, "result": result}) + "\n")


def every(
    pool: ProcessPoolExecutor, kept: Kept, traces: Path, cases: Iterable[Case]
) -> dict[Case, Result]:
    """The results of these cases, without those that have equal ones."""
    wanted = list(dict.fromkeys(map(canonical, cases)))
    missing = [case for case in wanted if list(asdict(case).values()) not in kept]
    found = pool.map(functools.partial(measure, traces=traces), missing)
    for case, result in zip(missing, found, strict=True):
        kept.add(list(asdict(case).values()), result)
    return {case: kept[list(asdict(case).values())] for case in wanted}


def knee_of(what: tuple[str, str], traces: Path, quick: bool, page: int | None) -> float | None:
    """A case's knee, as a process of its own finds it."""

    def measured(case: Case, enough: float) -> Result | None:
        return measure(case, traces, enough)

    requests = len(arrivals_of(traces, what[1], quick).requests)
    return knee(*what, requests, measured, quick, page)


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, default=TRACES, help="where Azure's trace lies")
        parser.add_argument("--only", nargs="+", choices=CURVES, help="curves of some groups")
        parser.add_argument("--full", action="store_true", help="eight rates, and kvswap in shares")
        parser.add_argument("--sweeps", nargs="*", choices=list(SWEEPS), help="none named: all")
        parser.add_argument("--docs", action="store_true", help="renew docs/mirage-*.md")
        parser.add_argument("--keep", type=Path, help="a file of results, to go on from")
        parser.add_argument("--page", type=int, help="MiB; by default as the models have it")
        parser.add_argument("--seeds", type=int, default=1)
        parser.add_argument("--processes", type=int, default=1)

    args = options(__doc__, argv, extra)
    if not (args.traces / ARRIVALS).exists():
        sys.exit(f"{args.traces} has no {ARRIVALS}: say where Azure's coding trace is (--traces)")
    groups = args.only or (QUICK if args.quick else CURVES)
    sweeps = () if args.sweeps is None or args.quick else tuple(args.sweeps or SWEEPS)
    multiples = QUICK_MULTIPLES if args.quick else FULL_MULTIPLES if args.full else MULTIPLES
    kept, context = Kept(args.keep), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        asked = [*curve_cases(groups, anywhere, (1.0,)), *sweep_cases(sweeps, anywhere)]
        wanted = knees_wanted(asked)
        unknown = [what for what in wanted if ["knee", *what, args.quick, args.page] not in kept]
        seek = functools.partial(knee_of, traces=args.traces, quick=args.quick, page=args.page)
        for what, rate in zip(unknown, pool.map(seek, unknown), strict=True):
            kept.add(["knee", *what, args.quick, args.page], rate)
        knees = {what: kept["knee", *what, args.quick, args.page] for what in wanted}
        at = at_knees(knees, quick=args.quick, page=args.page)
        cases = curve_cases(groups, at, multiples, seeds=args.seeds, full=args.full)
        runs = every(pool, kept, args.traces, [*cases, *sweep_cases(sweeps, at)])
    settings = [s for g in groups for s in GROUPS[g].settings]
    arrivals = {s: arrivals_of(args.traces, s, args.quick) for s in settings}
    result: dict[str, Any] = {
        "arrivals": {s: f"{len(w.requests)}: {w.describe()}" for s, w in arrivals.items()},
        "knees": {" ".join(what): rate for what, rate in knees.items()},
        "curves": curves(runs, groups, multiples),
        "sweeps": {name: swept(name, runs, at) for name in sweeps},
        "paper": [],
        "cases": [{**asdict(case), **found} for case, found in runs.items()],
    }
    result["paper"] = paper(result)
    swept_tables = {name: sweep_table(sweep) for name, sweep in result["sweeps"].items()}
    for name, text in (tables(result) | swept_tables).items():
        Console(width=200).print(f"\n{name}\n{text}", highlight=False, markup=False)
    if args.docs:
        renew(result)
    finish(args, "mirage_sim", result, result_table("knees", result["knees"]))


if __name__ == "__main__":
    main()
