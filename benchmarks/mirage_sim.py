"""MIRAGE's evaluation in virtual time: the averages of its sections 7.2 and 7.3 beside ours.

GH200 of 96 GB, models C1 and C2 with the paper's fractions, arrivals of Azure's coding trace,
lengths like ShareGPT's and Alpaca's; costs by the roofline, nothing measured there. The text seldom
states rates: each case is run from below its knee to eight times it (`mirage_cases`). Presets that
are compared have equal options (`contenders`); `no_shortage` is recomputation on a device of twice
the memory: what no way of finding memory can beat. Key: `curves.GROUP.over.COMPARISON.METRIC`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish, options
from benchmarks.mirage_cases import (
    GROUPS,
    MULTIPLES,
    QUICK_MULTIPLES,
    Case,
    Result,
    arrivals_of,
    at_multiple,
    curve_cases,
    curves,
    first_cases,
    knee,
    measure,
)
from benchmarks.mirage_setting import ARRIVALS

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

    def each(self, pool: ProcessPoolExecutor, call: Any, cases: Sequence[Case]) -> dict[Case, Any]:
        """What `call` returns for these cases, as far as it is not known."""
        keys = {case: json.dumps([call.func.__name__, *astuple(case)]) for case in cases}
        missing = [case for case, key in keys.items() if key not in self._known]
        for case, result in zip(missing, pool.map(call, missing), strict=True):
            self._known[keys[case]] = result
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as lines:
                    line = {"case": json.loads(keys[case]), "result": result}
                    lines.write(json.dumps(line) + "\n")
        return {case: self._known[key] for case, key in keys.items()}


def knee_of(first: Case, traces: Path) -> float | None:
    """A case's knee, as a process of its own finds it."""

    def measured(case: Case, enough: float) -> Result | None:
        return measure(case, traces, enough)

    requests = len(arrivals_of(traces, first.setting, first.quick).requests)
    return knee(first, requests, measured)


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, default=TRACES, help="where Azure's trace lies")
        parser.add_argument("--only", nargs="+", choices=GROUPS, help="curves of some groups")
        parser.add_argument("--keep", type=Path, help="a file of results, to go on from")
        parser.add_argument("--page", type=int, help="MiB; by default as the models have it")
        parser.add_argument("--seeds", type=int, default=1)
        parser.add_argument("--processes", type=int, default=1)

    args = options(__doc__, argv, extra)
    if not (args.traces / ARRIVALS).exists():
        sys.exit(f"{args.traces} has no {ARRIVALS}: say where Azure's coding trace is (--traces)")
    groups = args.only or (QUICK if args.quick else tuple(GROUPS))
    multiples = QUICK_MULTIPLES if args.quick else MULTIPLES
    kept, context = Kept(args.keep), multiprocessing.get_context("spawn")
    firsts = first_cases(groups, quick=args.quick, page=args.page)
    with ProcessPoolExecutor(args.processes, context) as pool:
        knees = kept.each(pool, functools.partial(knee_of, traces=args.traces), firsts)
        points = [at_multiple(first, knees[first], m) for first in firsts for m in multiples]
        seeded = [replace(point, seed=seed) for point in points for seed in range(args.seeds)]
        cases = [case for point in seeded for case in curve_cases(point)]
        runs = kept.each(pool, functools.partial(measure, traces=args.traces), cases)
    never_short = [(case.group, case.setting) for case, rate in knees.items() if rate is None]
    result = {
        "curves": curves(runs, multiples, never_short),
        "knees": {f"{case.group} {case.setting}": rate for case, rate in knees.items()},
    }
    finish(args, "mirage_sim", result)


if __name__ == "__main__":
    main()
