"""Run experiments of papers in virtual time: MuxServe's figures 5, 7, 9, 10; Prism's 7.2, 7.4.

`mux_cases` and `prism_cases` say what each has: models, devices, requests, rows, and the paper's
figures. Equal options give equal results, however many processes there are. Keys, by experiment:

- `throughput_over`: of the paper's system over other rows.
- `attained_up_to`: by row, the highest point of the axis up to which 99 % are in time.
- `devices`: by row, the fewest GPUs with which 99 % are in time: mean over seeds, least, most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common import finish, options
from benchmarks.experiment import (
    Experiment,
    Outcome,
    Tried,
    fewest,
    search,
    summary,
)
from benchmarks.mux_cases import MUXSERVE
from benchmarks.prism_cases import PRISM
from benchmarks.sweep import Sweep, add_processes, plain

EXPERIMENTS: dict[str, Experiment] = {**MUXSERVE, **PRISM}
QUICK = 0.5
"""Part of the seconds that `--quick` takes, with one seed and the point of the ratios alone."""


def measure(name: str, seconds: float, row: str, point: float, seed: int) -> Outcome:
    """Run one row at one point."""
    return EXPERIMENTS[name].run(row, point, seed, seconds, False)


def sought(name: str, seconds: float, row: str, seed: int) -> tuple[float | None, Tried]:
    """Search the fewest GPUs for one row."""
    return search(EXPERIMENTS[name], row, seed, seconds)


def run(name: str, experiment: Experiment, rows: Sequence[str], sweep: Sweep) -> dict[str, Any]:
    """Return the result of an experiment, with the paper's."""
    seeds = experiment.seeds
    if experiment.fewest:
        found = sweep.over((rows, seeds), partial(sought, name, experiment.seconds))
        tried = {r: plain([*by.values()]) for r, by in found.items()}
        return {**fewest(found), "paper": dict(experiment.paper), "tried": tried}
    axes = (rows, experiment.axis, seeds)
    each = sweep.over(axes, partial(measure, name, experiment.seconds))
    outcomes = {r: {p: [*of.values()] for p, of in by.items()} for r, by in each.items()}
    result = {**summary(experiment, outcomes), "paper": dict(experiment.over)}
    return {**result, "rows": plain(outcomes)}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("names", nargs="+", choices=EXPERIMENTS, metavar="EXPERIMENT")
        parser.epilog = "; ".join(f"{name}: {e.title}" for name, e in EXPERIMENTS.items())
        parser.add_argument("--seconds", type=float, help="of arrivals")
        parser.add_argument("--seeds", help="as 0,1,2")
        parser.add_argument("--points", help="of the axis, as 1,2,4; the ratios are at the last")
        add_processes(parser)

    args = options(__doc__, argv, extra)
    result: dict[str, Any] = {}
    with Sweep(args.processes) as sweep:
        for name in args.names:
            experiment = EXPERIMENTS[name]
            if args.quick:
                seconds = QUICK * experiment.seconds
                experiment = replace(experiment, seconds=seconds, seeds=experiment.seeds[:1])
                if not experiment.fewest:
                    experiment = replace(experiment, axis=(experiment.point,))
            if args.points:
                points = tuple(float(p) for p in args.points.split(","))
                experiment = replace(experiment, axis=points, at=None)
            if args.seeds:
                experiment = replace(experiment, seeds=tuple(map(int, args.seeds.split(","))))
            experiment = replace(experiment, seconds=args.seconds or experiment.seconds)
            result[name] = run(name, experiment, list(experiment.rows.rows), sweep)
            result[name] |= {"seconds": experiment.seconds, "seeds": experiment.seeds}
    finish(args, "experiments", result)


if __name__ == "__main__":
    main()
