"""Profiles against what was measured: each point left out of its fit, each model of its derate.

Reads the tables that `scripts.fit_profiles` reads. Errors are mean absolute ones relative to the
measured seconds, in per cent, over the points of one model on one device (a row); then the median
and the worst of rows. `loo`: a point is predicted by a fit to the others of its row. `roofline`: a
model is predicted by its device's peaks, derated by the other models on it, none of its shape;
models with experts, which no derate is fitted to, are left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.roofline import Sizes, roofline
from benchmarks.common import finish, options
from scripts.derating import GroupDerate
from scripts.fit_profiles import derate_of, groups, least_per_context, least_per_pair
from scripts.measured import Pair, Tables, read_tables
from scripts.point_fits import DecodeFit, Points, PrefillFit, errors, fit_decode, fit_prefill

GOALS = {"prefill": 4.5, "decode": 3.5}
BATCHES, LENGTHS = (1, 4, 16, 64, 128), (16, 64, 256, 512)
QUICK = 6
"""Every so manieth point is left out in a quick run."""


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=Path, default=Path("../shared/profiles"))


def left_out(tables: Tables, pair: Pair, phase: str, stride: int) -> list[float]:
    """Of each point, its error when it is predicted by a fit to the others."""
    hardware, model = tables.hardware[pair[0]], tables.models[pair[1]]
    points = tables.phase(phase)[pair]
    found = []
    for i in range(0, len(points), stride):
        rest = points.without(i)
        fit: PrefillFit | DecodeFit
        if phase == "prefill":
            fit = fit_prefill(rest, least_per_pair(model, hardware))
        else:
            fit = fit_decode(rest, least_per_context(model, hardware))
        found.append(float(errors(fit, points.only(i))[0]))
    return found


def predicted(costs: StepCosts, points: Points, phase: str) -> list[float]:
    """Errors of `costs` at each point."""
    found = []
    columns = zip(points.batch, points.tokens, points.pairs, points.seconds, strict=True)
    for batch, tokens, pairs, seconds in columns:
        load = (
            JobLoad(int(tokens), int(batch), int(pairs), 0, 0)
            if phase == "prefill"
            else JobLoad(0, 0, 0, int(batch), int(tokens))
        )
        found.append(costs.of(load) / float(seconds) - 1)
    return found


def unseen(tables: Tables, pair: Pair, group: GroupDerate) -> StepCosts:
    """By the roofline, derated by models of other shapes on the device."""
    device, name = pair
    shape = tables.models[name].shape
    others = [m for d, m in tables.decode if d == device and tables.models[m].shape != shape]
    derate = derate_of(tables, device, others, group)
    return roofline(Sizes.of_facts(tables.models[name]), tables.hardware[device], derate)


def percent(found: Iterable[float]) -> float:
    return 100 * float(np.mean(np.abs(list(found))))


def measured(tables: Tables, folder: Path, stride: int) -> dict[str, dict[str, dict[str, float]]]:
    """By phase and pair: errors of both predictions."""
    group = groups(tables, folder)
    found: dict[str, dict[str, dict[str, float]]] = {phase: {} for phase in GOALS}
    for pair in track(tables.decode, description="leaving points out"):
        other = unseen(tables, pair, group)
        for phase in GOALS:
            if pair in tables.phase(phase):
                row = {"loo": percent(left_out(tables, pair, phase, stride))}
                if not tables.models[pair[1]].experts:
                    points = tables.phase(phase)[pair]
                    row["roofline"] = percent(predicted(other, points, phase))
                found[phase]["/".join(pair)] = row
    return found


def main() -> None:
    args = options(__doc__, extra=extra)
    rows = measured(read_tables(args.tables), args.tables, QUICK if args.quick else 1)
    result: dict[str, Any] = {}
    for phase, goal in GOALS.items():
        for column in ("loo", "roofline"):
            values = [row[column] for row in rows[phase].values() if column in row]
            median, worst = statistics.median(values), max(values)
            result[f"{phase}_{column}_median_pct"] = median
            result[f"{phase}_{column}_worst_pct"] = worst
        result[f"{phase}_goal_met"] = result[f"{phase}_loo_median_pct"] <= goal
    finish(args, "sim_profiles", {**result, **rows})


if __name__ == "__main__":
    main()
