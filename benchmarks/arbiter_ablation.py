"""What each part of `ballast` is worth: its sources and estimates off in turn, and wrong.

Workloads are those of `arbiter_sim`, each at a rate about its knee. Seeds are paired.

`source.X`, `estimate.X`: points of attainment that are lost without X, in the mean over workloads
and seeds, and the most over workloads; `added.X` is likewise what a source that is off by default
would gain. `estimate.survival`: cached prefixes are as likely to be used again, however old.

Wrong estimates: `--wrong` short workloads (200) of the same kinds, each by a seed of its own. All
estimates are wrong at once, each by a third or by three, drawn so that each is so in half of the
workloads; those of traffic are wrong for all who read them, the order of compute and admission
among them. `wrong.mean`, `wrong.interval`: points beside `recompute` in the same order of compute,
which knows what it learns. `wrong.X.low`, `wrong.X.high`: likewise where X is a third, and three
times.
`wrong.kinds`: by kind of workload; `worst_wrong`: the least of these (goal: not less than -2).
`wrong.lost`: points beside the same with estimates that are not wrong. `--wrong-alone`: nothing
else; `--minutes`: as many workloads as end in time.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.table import Table

from ballast.policy.presets import option_names, resolve
from ballast.sim.distorted_traffic import Distortion
from benchmarks.arbiter_workloads import WORKLOADS
from benchmarks.common import finish, options, verdict
from benchmarks.headroom import attained

SOURCES = ("reuse", "idle", "parking", "preempting", "resting")
ADDED = ("streaming", "in_place")
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
SAID_EVERY = 20
"""Workloads with wrong estimates after which the mean so far is printed."""
QUICK = ("bursty", "long_tail", "multi_turn")

WRONG_SECONDS = 5.0
"""Of arrivals in a workload with wrong estimates."""

Given = tuple[tuple[str, float], ...]
"""Options and factors of estimates, by name."""
Case = tuple[str, int, str, Given]
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


def ablations() -> dict[str, Given]:
    """Return the options of each ablation, by its name in the result."""
    off: dict[str, Given]
    off = {f"source.{name}": ((name, 0.0),) for name in SOURCES}
    return off | {f"estimate.{name}": ((name, 0.0),) for name in (*ESTIMATES, "survival")}


def lost(
    whole: Mapping[str, Sequence[float]], without: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the points that are lost without something, by workload and seed: mean and most."""
    by_workload = [100 * (fmean(whole[w]) - fmean(without[w])) for w in whole]
    return {"mean": fmean(by_workload), "most": max(by_workload)}


def wrong_cases(n: int, workloads: Sequence[str]) -> list[tuple[str, int, Given]]:
    """Return `n` workloads by name and seed, in turn, each with a factor for every estimate."""
    rng = np.random.default_rng(n)
    columns = [rng.permutation([WRONG[i % 2] for i in range(n)]).tolist() for _ in ESTIMATES]
    return [
        (
            workloads[i % len(workloads)],
            i // len(workloads),
            tuple(zip(ESTIMATES, row, strict=True)),
        )
        for i, row in enumerate(zip(*columns, strict=True))
    ]


def wrong_summary(
    cases: Sequence[tuple[str, int, Given]],
    wrong: Sequence[float],
    learned: Sequence[float],
    rival: Sequence[float],
) -> dict[str, Any]:
    """Return the keys of wrong estimates, from the attainment in each case: with wrong estimates,
    with those that are learned, and of the rival."""
    points = [100 * (a - b) for a, b in zip(wrong, rival, strict=True)]
    half = 1.96 * stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.inf
    each: dict[str, list[float]] = {}
    kinds: dict[str, list[float]] = {}
    for (workload, _, given), margin in zip(cases, points, strict=True):
        kinds.setdefault(workload, []).append(margin)
        for name, factor in given:
            each.setdefault(f"{name}.{'low' if factor < 1 else 'high'}", []).append(margin)
    of_kinds = {name: fmean(margins) for name, margins in kinds.items()}
    return {
        "wrong.workloads": len(points),
        "wrong.mean": fmean(points),
        "wrong.interval": (fmean(points) - half, fmean(points) + half),
        "wrong.lost": 100 * (fmean(learned) - fmean(wrong)),
        "wrong.below": sum(margin < GOAL_POINTS for margin in points) / len(points),
        **{f"wrong.{name}": fmean(margins) for name, margins in sorted(each.items())},
        "wrong.kinds": of_kinds,
        "worst_wrong": min(of_kinds.values()),
    }


def wrong_estimates(
    pool: ProcessPoolExecutor, n: int, workloads: Sequence[str], minutes: float
) -> dict[str, Any]:
    """Run the workloads with wrong estimates, the same with learned ones, and the rival, as many as
    end within `minutes`."""
    until = time.monotonic() + 60 * minutes
    cases = wrong_cases(n, workloads)
    wanted: list[Case] = []
    for workload, seed, given in cases:
        wanted += [
            (workload, seed, "ballast", given),
            (workload, seed, "ballast", ()),
            (workload, seed, RIVAL, ()),
        ]
    shares: list[float] = []
    coming = [pool.submit(measure, WRONG_SECONDS, case) for case in wanted]
    for i, share in enumerate(coming):
        shares.append(share.result())
        if (i + 1) % (3 * SAID_EVERY) == 0:
            print(f"{(i + 1) // 3} of {n} workloads with wrong estimates", flush=True)
        if (i + 1) % 3 == 0 and time.monotonic() > until:
            pool.shutdown(wait=False, cancel_futures=True)
            break
    done = len(shares) // 3
    return wrong_summary(cases[:done], shares[::3], shares[1::3], shares[2::3])


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="workloads, by commas")
        parser.add_argument("--seeds", type=int, default=4)
        parser.add_argument("--wrong", type=int, default=200, help="workloads, wrong estimates")
        parser.add_argument("--minutes", type=float, default=math.inf, help="of wrong estimates")
        parser.add_argument("--wrong-alone", action="store_true", help="wrong estimates alone")
        parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
        parser.add_argument("--processes", type=int, default=2)

    args = options(__doc__, argv, extra)
    seconds = 10.0 if args.quick else args.seconds
    seeds = 1 if args.quick else args.seeds
    chosen = args.only.split(",") if args.only else QUICK if args.quick else tuple(WORKLOADS)
    context = multiprocessing.get_context("spawn")
    result: dict[str, Any] = {}
    with ProcessPoolExecutor(args.processes, context) as pool:
        if not args.wrong_alone:
            result = switched_off(partial(_run, pool, seconds, chosen, seeds))
        if args.wrong:
            kinds = chosen if args.only else tuple(WORKLOADS)
            result |= wrong_estimates(pool, args.wrong, kinds, args.minutes)
    finish(args, "arbiter_ablation", result, _table(result))


def switched_off(run: Callable[[str, Given], dict[str, list[float]]]) -> dict[str, Any]:
    """Return what is lost without each source and estimate, and what those off would gain."""
    whole = run("ballast", ())
    result: dict[str, Any] = {
        name: lost(whole, run("ballast", given)) for name, given in ablations().items()
    }
    for name in ADDED:
        result[f"added.{name}"] = lost(run("ballast", ((name, 1.0),)), whole)
    return result


def _table(result: Mapping[str, Any]) -> Table:
    table = Table("what", "points, mean", "most", title="attainment")
    for name, found in result.items():
        if name.startswith(("source.", "estimate.", "added.")):
            table.add_row(name, f"{found['mean']:.1f}", f"{found['most']:.1f}")
        elif name == "worst_wrong":
            table.add_row(name, f"{found:+.1f}", verdict(found, at_least=GOAL_POINTS))
        elif isinstance(found, float):
            table.add_row(name, f"{found:+.2f}", "")
    return table


def _run(
    pool: ProcessPoolExecutor,
    seconds: float,
    workloads: Sequence[str],
    seeds: int,
    preset: str,
    given: Given,
) -> dict[str, list[float]]:
    """Return attainment by workload and seed."""
    cases: list[Case] = [(w, seed, preset, given) for w in workloads for seed in range(seeds)]
    shares = iter(list(pool.map(partial(measure, seconds), cases)))
    return {w: [next(shares) for _ in range(seeds)] for w in workloads}


if __name__ == "__main__":
    main()
