"""Profiles against what was measured: each point left out of its fit, each model of its derate.

Reads the tables that `scripts.fit_profiles` reads. Errors are mean absolute ones relative to the
measured seconds, in per cent, over the points of one model on one device (a row); then the median
and the worst of rows. `loo`: a point is predicted by a fit to the others of its row. `shipped`: by
the costs that come with Ballast. `roofline`: a model is predicted by its device's peaks, derated by
the other models on it, none of its shape; `unseen_device`: by the median of other devices' derates.
Models with experts, which no derate is fitted to, stand apart. `group`: models split among A100s,
by the roofline whose group part leaves the model out, against fits (their points are not at hand),
without the host's work per sequence, which that engine does not show.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad, chunk_pairs
from ballast.sim.derating import GroupDerate, median_derate
from ballast.sim.fitting import DecodeFit, Points, PrefillFit, errors, fit_decode, fit_prefill
from ballast.sim.profile import device_profile
from ballast.sim.roofline import Sizes, roofline
from benchmarks.common import finish, options
from scripts.fit_profiles import (
    EAGER,
    all_reduces,
    derate_of,
    groups,
    least_per_context,
    least_per_pair,
    stated_rows,
)
from scripts.measured import Pair, Tables, read_tables

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


def on_unseen_device(tables: Tables, pair: Pair, group: GroupDerate) -> StepCosts:
    """By the roofline, derated by what other devices show."""
    device, name = pair
    devices = sorted({d for d, _ in tables.decode if d != device})
    derates = [
        derate_of(tables, d, [m for e, m in tables.decode if e == d], group) for d in devices
    ]
    sizes = Sizes.of_facts(tables.models[name])
    return roofline(sizes, tables.hardware[device], median_derate(derates))


def in_groups(tables: Tables, folder: Path) -> dict[str, dict[str, float]]:
    """Per model and number of devices, errors of prefill and decode over a grid of jobs."""
    device = "A100-80G"
    reduces = {a.tp: a for a in all_reduces(folder, device, tables.hardware[device])}
    on = [m for d, m in tables.decode if d == device]
    found = {}
    for row in stated_rows(tables, folder, device):
        if row.tp == 1 or row.sm_percent != 100:
            continue
        derate = derate_of(tables, device, on, groups(tables, folder, without=row.model))
        derate = derate.model_copy(update={"sequence_seconds": 0.0})
        sizes = Sizes.of_facts(tables.models[row.model])
        costs = roofline(sizes, tables.hardware[device], derate, reduces[row.tp])
        stated = StepCosts(**row.costs.model_dump())
        off: dict[str, list[float]] = {phase: [] for phase in GOALS}
        for batch, length in itertools.product(BATCHES, LENGTHS):
            n = batch * length
            loads = {
                "prefill": JobLoad(n, batch, batch * chunk_pairs(length, 0), 0, 0),
                "decode": JobLoad(0, 0, 0, batch, n),
            }
            for phase, load in loads.items():
                off[phase].append(costs.of(load) / stated.of(load) - 1)
        found[f"{row.model}/tp{row.tp}"] = {p: percent(e) for p, e in off.items()}
    return found


def percent(found: Iterable[float]) -> float:
    return 100 * float(np.mean(np.abs(list(found))))


def summary(rows: dict[str, dict[str, Any]], key: str, experts: bool = False) -> dict[str, float]:
    """Median and worst of the rows that have `key`."""
    values = [row[key] for row in rows.values() if key in row and row["experts"] == experts]
    return {"median_pct": statistics.median(values), "worst_pct": max(values)}


def main() -> None:
    args = options(__doc__, extra=extra)
    tables = read_tables(args.tables)
    stride = QUICK if args.quick else 1
    result: dict[str, Any] = {}
    columns = ("loo", "roofline", "unseen_device")
    table = Table(title="sim_profiles: mean relative error, per cent", box=SIMPLE_HEAD)
    table.add_column("device, model", no_wrap=True)
    for phase in GOALS:
        for shown in ("loo", "roofline", "unseen"):
            table.add_column(f"{phase}\n{shown}", justify="right")
    group = groups(tables, args.tables)
    by_pair: dict[Pair, dict[str, dict[str, Any]]] = {}
    elsewhere = {pair: on_unseen_device(tables, pair, group) for pair in tables.decode}
    for pair in track(tables.decode, description="leaving points out"):
        own = by_pair[pair] = {}
        shipped, other = device_profile(pair[0], EAGER).costs(pair[1]), unseen(tables, pair, group)
        for phase in GOALS:
            if pair not in tables.phase(phase):
                continue
            points = tables.phase(phase)[pair]
            own[phase] = {
                "experts": bool(tables.models[pair[1]].experts),
                "points": len(points),
                "loo": percent(left_out(tables, pair, phase, stride)),
                "shipped": percent(predicted(shipped, points, phase)),
                "roofline": percent(predicted(other, points, phase)),
                "unseen_device": percent(predicted(elsewhere[pair], points, phase)),
            }
        cells = [f"{own[p][c]:.1f}" if p in own else "" for p in GOALS for c in columns]
        if pair[0] not in {device for device, _ in list(by_pair)[:-1]}:
            table.add_section()
            table.add_row(pair[0])
        table.add_row(pair[1], *cells)
    for phase, goal in GOALS.items():
        rows = {"/".join(pair): own[phase] for pair, own in by_pair.items() if phase in own}
        everything = [row["loo"] for row in rows.values()]
        result[f"{phase}_loo_median_pct"] = statistics.median(everything)
        result[f"{phase}_loo_worst_pct"] = max(everything)
        result[f"{phase}_goal_met"] = result[f"{phase}_loo_median_pct"] <= goal
        for column in columns[1:]:
            for experts in (False, True):
                name = f"{column}_experts" if experts else column
                for statistic, value in summary(rows, column, experts).items():
                    result[f"{phase}_{name}_{statistic}"] = value
        result[phase] = rows
    result["group"] = in_groups(tables, args.tables)
    for phase in GOALS:
        values = [row[phase] for row in result["group"].values()]
        result[f"{phase}_group_median_pct"] = statistics.median(values)
        result[f"{phase}_group_worst_pct"] = max(values)
    table.add_section()
    for statistic in ("median", "worst"):
        cells = [f"{result[f'{p}_{c}_{statistic}_pct']:.1f}" for p in GOALS for c in columns]
        table.add_row(statistic, *cells)
    finish(args, "sim_profiles", result, table)


if __name__ == "__main__":
    main()
