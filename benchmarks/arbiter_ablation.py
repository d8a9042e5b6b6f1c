"""What each part of `ballast` is worth: its sources and estimates off in turn, and wrong.

Workloads are those of `arbiter_sim`, each at a rate about its knee, and, for estimates that are
wrong by three times either way, many more of the same kinds, by seed. Seeds are paired. Estimates
of traffic are wrong for all who read them, the order of compute and admission among them.

`source.X`, `estimate.X`: points of attainment that are lost without X, in the mean over workloads
and seeds, and the most over workloads; `added.X` is likewise what a source that is off by default
would gain. `wrong.X`: the least over workloads of attainment less that
of `recompute` in the same order of compute, with X wrong by a third and by three times (goal: not
less than -2 points). `estimate.survival`: cached prefixes are as likely to be used again, however
old.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any

from rich.table import Table

from ballast.policy.presets import option_names, resolve
from ballast.sim.distorted_traffic import Distortion
from benchmarks.arbiter_workloads import WORKLOADS
from benchmarks.common import finish, options, verdict
from benchmarks.headroom import attained

SOURCES = ("reuse", "idle", "parking", "preempting")
ADDED = ("streaming", "in_place", "resting")
"""Sources that are off by default: what is lost without them is what they would gain."""
TRAFFIC = ("arrivals", "lengths", "reused")
"""Estimates of traffic (`sim.distorted_traffic`)."""
ESTIMATES = (*TRAFFIC, "freed")
WRONG = (1 / 3, 3.0)
"""Factors of an estimate that is wrong."""
RATE = 8.0
"""Requests per second: about the knees of most of the workloads."""
RIVAL = "recompute+deadline"
GOAL_POINTS = -2.0
QUICK = ("bursty", "long_tail", "multi_turn")

Case = tuple[str, int, str, tuple[tuple[str, float], ...]]
"""A workload, its seed, a preset, and its options and factors of estimates."""


def measure(seconds: float, case: Case) -> float:
    """Return the share of requests that attain their service levels in one run."""
    workload, seed, preset, given = case
    of, known = WORKLOADS[workload], option_names(preset)
    work = of.make(RATE, seconds, seed)
    options = {name: factor for name, factor in given if name in known}
    factors = {name: factor for name, factor in given if name not in known}
    estimates = Distortion(**factors).impose if factors else None
    return attained(of, work, resolve(preset, options), estimates=estimates)


def ablations() -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the options of each ablation, by its name in the result."""
    off: dict[str, tuple[tuple[str, float], ...]]
    off = {f"source.{name}": ((name, 0.0),) for name in SOURCES}
    return off | {f"estimate.{name}": ((name, 0.0),) for name in (*ESTIMATES, "survival")}


def lost(
    whole: Mapping[str, Sequence[float]], without: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the points that are lost without something, by workload and seed: mean and most."""
    by_workload = [100 * (fmean(whole[w]) - fmean(without[w])) for w in whole]
    return {"mean": fmean(by_workload), "most": max(by_workload)}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="workloads, by commas")
        parser.add_argument("--seeds", type=int, default=4)
        parser.add_argument("--wrong-seeds", type=int, default=20, help="of each workload")
        parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
        parser.add_argument("--processes", type=int, default=2)

    args = options(__doc__, argv, extra)
    seconds = 10.0 if args.quick else args.seconds
    seeds = 1 if args.quick else args.seeds
    wrong_seeds = 1 if args.quick else args.wrong_seeds
    chosen = args.only.split(",") if args.only else QUICK if args.quick else tuple(WORKLOADS)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        run = partial(_run, pool, seconds, chosen)
        whole = run(seeds, "ballast", ())
        result: dict[str, Any] = {
            name: lost(whole, run(seeds, "ballast", given)) for name, given in ablations().items()
        }
        for name in ADDED:
            result[f"added.{name}"] = lost(run(seeds, "ballast", ((name, 1.0),)), whole)
        rival = run(wrong_seeds, RIVAL, ())
        for name in ESTIMATES:
            margins = []
            for factor in WRONG:
                off = run(wrong_seeds, "ballast", ((name, factor),))
                margins += [100 * (fmean(off[w]) - fmean(rival[w])) for w in chosen]
            result[f"wrong.{name}"] = min(margins)
    result["worst_wrong"] = min(result[f"wrong.{name}"] for name in ESTIMATES)
    table = Table("without", "points lost, mean", "most", title="attainment")
    for name in ablations():
        table.add_row(name, f"{result[name]['mean']:.1f}", f"{result[name]['most']:.1f}")
    for name in ADDED:
        gained = result[f"added.{name}"]
        table.add_row(f"{name}, off by default", f"{gained['mean']:.1f}", f"{gained['most']:.1f}")
    for name in ESTIMATES:
        worst = result[f"wrong.{name}"]
        table.add_row(f"{name} wrong by 3", f"{worst:+.1f}", verdict(worst, at_least=GOAL_POINTS))
    finish(args, "arbiter_ablation", result, table)


def _run(
    pool: ProcessPoolExecutor,
    seconds: float,
    workloads: Sequence[str],
    seeds: int,
    preset: str,
    given: tuple[tuple[str, float], ...],
) -> dict[str, list[float]]:
    """Return attainment by workload and seed."""
    cases: list[Case] = [(w, seed, preset, given) for w in workloads for seed in range(seeds)]
    shares = iter(list(pool.map(partial(measure, seconds), cases)))
    return {w: [next(shares) for _ in range(seeds)] for w in workloads}


if __name__ == "__main__":
    main()
