"""Costs of what was not measured: a model, a group's size, an engine left out of the fits.

Reads the public tables of latencies that the profiles are fitted to. Errors are mean absolute ones
relative to the measured seconds, in per cent, of one row; `left_out_median_pct` is the median over
all rows of jobs that an engine ran: all but `kernels`. A row is one phase of:

- `model`: one model on one device, by what other models show there. Steps: the longer of the
  device's work and the host's launches, and what the host does alone. Prefills: the derate.
- `group`: a model of MuxServe's split among `tp` devices, by the other group sizes.
- `kernels`: a layer split among `tp` devices, and all-reduces among so many, by the other sizes.
- `engine`: Aegaeon's engine on a device, by kernels that were timed there without an engine and by
  its host on other devices. MuxServe's, of which nothing else is known, by Aegaeon's host.
- `stated`: decode steps and activations of engines of today, each by the others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad, chunk_pairs
from ballast.sim.fitting import Vector
from ballast.sim.model_catalogue import facts
from ballast.sim.profile_tables import MeasuredModel
from ballast.sim.roofline import AllReduce, Derate, Sizes, step_costs
from benchmarks.common import finish, options
from benchmarks.sim_profiles import BATCHES, LENGTHS, percent, predicted, unseen
from scripts.derating import Beside, decode_terms, fit_beside
from scripts.fit_engines import (
    ACTIVATIONS,
    ON,
    STEPS,
    fit_steps,
    graphs_engine,
    kernels,
    kernels_reach,
)
from scripts.fit_profiles import (
    all_reduces,
    derate_of,
    groups,
    reaches_of,
    stated_rows,
)
from scripts.measured import Pair, read_tables
from scripts.point_fits import Points, fit_floored

GOAL = 8.0
GROUPS_ON = "A100-80G"
BEYOND_FLOOR = 1024
"""Tokens from which a prefill is not what its host or its launches need."""
MESSAGES = tuple(2**i for i in range(10, 27, 2))
"""Bytes of an all-reduce."""
QUICK = ("A10", "H100-80G")
"""Devices whose models a quick run leaves out."""
KERNELS = "kernels"


@dataclass
class Errors:
    """Per cent by part, row and phase."""

    rows: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def add(self, part: str, row: str, phase: str, off: Iterable[float]) -> None:
        """`off`: predicted / measured - 1."""
        self.rows[part][row][phase] = percent(off)

    def values(self, part: str | None = None, phase: str | None = None) -> list[float]:
        """Collect those of one part, or of all but `kernels`; of one phase, or of all."""
        return [
            value
            for name, rows in self.rows.items()
            if name == part or (part is None and name != KERNELS)
            for row in rows.values()
            for of, value in row.items()
            if phase in (None, of)
        ]

    def summary(self) -> dict[str, float]:
        found = {"left_out_median_pct": statistics.median(self.values())}
        for part in self.rows:
            phases = {name for row in self.rows[part].values() for name in row}
            for phase in sorted(phases):
                values = self.values(part, phase)
                found[f"{part}_{phase}_median_pct"] = statistics.median(values)
                found[f"{part}_{phase}_worst_pct"] = max(values)
        return found


class Known:
    """The tables, and what of them several parts need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = read_tables(folder)
        self.group = groups(self.tables, folder)
        devices = self.tables.hardware
        self.timed = {d: k for d in devices if (k := kernels(self.tables, folder, d))}
        derates = {d: self.derate(d) for d in {d for d, _ in self.tables.decode}}
        self.reaches, _ = reaches_of(self.tables, folder, derates)

    def derate(self, device: str) -> Derate:
        """Fit the derate of all models that were measured there."""
        on = [m for d, m in self.tables.decode if d == device]
        return derate_of(self.tables, device, on, self.group)

    def sizes(self, model: str) -> Sizes:
        return Sizes.of_facts(self.tables.models[model])

    def terms(self, pair: Pair) -> Vector:
        points, hardware = self.tables.decode[pair], self.tables.hardware[pair[0]]
        return decode_terms(self.sizes(pair[1]), points, hardware)

    def dense(self, device: str) -> list[Pair]:
        """Measured there, without experts."""
        return [p for p in self.tables.decode if p[0] == device and not self.experts(p[1])]

    def experts(self, model: str) -> bool:
        return bool(self.tables.models[model].experts)

    def beside(self, device: str, pairs: Sequence[Pair]) -> Beside:
        """Fitted to the steps of `pairs`; kernels that were timed there are known."""
        reading = self.reaches[device].reading if device in self.timed else None
        return fit_beside(
            np.vstack([self.terms(p) for p in pairs]),
            np.concatenate([self.tables.decode[p].seconds for p in pairs]),
            self.reaches[device].layer_seconds,
            reading,
        )


def models_left_out(known: Known, devices: Sequence[str], found: Errors) -> None:
    """Each model, and those of its shape, of its device's fit."""
    tables = known.tables
    for pair in tables.decode:
        device, name = pair
        if device not in devices:
            continue
        shape = tables.models[name].shape
        others = [p for p in known.dense(device) if tables.models[p[1]].shape != shape]
        fit = known.beside(device, others)
        off = fit.seconds(known.terms(pair)) / tables.decode[pair].seconds - 1
        found.add("model", "/".join(pair), "decode", off)
        if pair in tables.prefill:
            costs = unseen(tables, pair, known.group)
            prefills = predicted(costs, tables.prefill[pair], "prefill")
            found.add("model", "/".join(pair), "prefill", prefills)


@dataclass(frozen=True)
class Split:
    """A model split among devices, by a fit that stands for its measurements."""

    row: MeasuredModel
    sizes: Sizes
    group: AllReduce | None
    decode: Points
    prefill: Points


def splits(known: Known) -> list[Split]:
    """MuxServe's, on whole devices, at a grid of jobs."""
    hardware = known.tables.hardware[GROUPS_ON]
    reduces = {a.tp: a for a in all_reduces(known.folder, GROUPS_ON, hardware)}
    found = []
    for row in stated_rows(known.tables, known.folder, GROUPS_ON):
        if row.sm_percent != 100:
            continue
        costs = StepCosts(**row.costs.model_dump())
        jobs: dict[str, list[tuple[float, float, float]]] = {"decode": [], "prefill": []}
        for batch, length in itertools.product(BATCHES, LENGTHS):
            n, pairs = batch * length, batch * chunk_pairs(length, 0)
            jobs["decode"].append((batch, n, costs.of(JobLoad(0, 0, 0, batch, n))))
            jobs["prefill"].append((batch, n, costs.of(JobLoad(n, batch, pairs, 0, 0))))
        points = {phase: Points.of(jobs[phase]) for phase in jobs}
        found.append(Split(row, known.sizes(row.model), reduces.get(row.tp), **points))
    return found


def _prefill_terms(known: Known, s: Split) -> tuple[Vector, Vector, float, Vector]:
    """Layers, seconds of arithmetic, the factor of attention, and seconds of messages."""
    hardware, tp, p = known.tables.hardware[GROUPS_ON], s.row.tp, s.prefill
    arithmetic = 2 * s.sizes.active * p.tokens / hardware.flops / tp
    assert s.row.costs.per_pair is not None
    factor = s.row.costs.per_pair * hardware.flops * tp / s.sizes.pair_flops
    per_byte = 0.0 if s.group is None else s.group.per_byte
    messages = 2 * s.sizes.layers * per_byte * 2 * s.sizes.hidden * p.tokens
    return np.full(len(p), float(s.sizes.layers)), arithmetic, factor, messages


def groups_left_out(known: Known, found: Errors) -> None:
    """Each size of MuxServe's groups."""
    hardware, reach = known.tables.hardware[GROUPS_ON], known.reaches[GROUPS_ON]
    everything = splits(known)

    def terms(s: Split) -> Vector:
        return decode_terms(s.sizes, s.decode, hardware, s.group)

    def attention(s: Split, factor: float) -> Vector:
        seconds: Vector = factor * s.sizes.pair_flops * s.prefill.pairs / hardware.flops / s.row.tp
        return seconds

    for tp in sorted({s.row.tp for s in everything}):
        others = [s for s in everything if s.row.tp != tp]
        steps = fit_beside(
            np.vstack([terms(s) for s in others]),
            np.concatenate([s.decode.seconds for s in others]),
            reach.layer_seconds,
            reach.reading,
        )
        prefills = [_prefill_terms(known, s) for s in others]
        factor = statistics.median(f for _, _, f, _ in prefills)
        fixed = [attention(s, factor) + m for s, (_, _, _, m) in zip(others, prefills, strict=True)]
        floor, start, slope = fit_floored(
            np.concatenate([layers for layers, *_ in prefills]),
            np.concatenate([arithmetic for _, arithmetic, *_ in prefills]),
            np.concatenate(fixed),
            np.concatenate([s.prefill.seconds for s in others]),
            least_slope=1.0,
        )
        for s in (s for s in everything if s.row.tp == tp):
            name = f"{s.row.model}/tp{tp}"
            off = steps.seconds(terms(s)) / s.decode.seconds - 1
            found.add("group", name, "decode", off)
            layers, arithmetic, _, messages = _prefill_terms(known, s)
            work = start * layers + slope * arithmetic + attention(s, factor) + messages
            seconds = np.maximum(floor * layers, work)
            found.add("group", name, "prefill", seconds / s.prefill.seconds - 1)


def kernels_left_out(known: Known, found: Errors) -> None:
    """Each group size of the kernels: a layer for few tokens, and a token more of many."""
    for device, timed in known.timed.items():
        for tp in sorted({k.tp for k in timed}):
            others = [k for k in timed if k.tp != tp]
            layer, reading = kernels_reach(others)
            token = statistics.median(k.token / k.peak_token for k in others)
            for k in (k for k in timed if k.tp == tp):
                name = f"{device}/{k.model}/tp{tp}"
                few = (layer + reading * k.peak_read) / (k.matrices + k.others)
                found.add(KERNELS, name, "decode", [few - 1])
                found.add(KERNELS, name, "prefill", [token * k.peak_token / k.token - 1])


def all_reduces_left_out(known: Known, found: Errors) -> None:
    """Each size of a node's groups: latency by the others' median, bytes by what a ring moves."""

    def moved(tp: int) -> float:
        return (tp - 1) / tp

    for device in known.timed:
        measured = all_reduces(known.folder, device, known.tables.hardware[device])
        for one in measured:
            others = [a for a in measured if a.tp != one.tp]
            least = statistics.median(a.least for a in others)
            base = statistics.median(a.base for a in others)
            byte = moved(one.tp) * statistics.median(a.per_byte / moved(a.tp) for a in others)
            off = [
                max(least, base + n * byte) / max(one.least, one.base + n * one.per_byte) - 1
                for n in MESSAGES
            ]
            found.add(KERNELS, f"{device}/tp{one.tp}", "all_reduce", off)


def engines_left_out(known: Known, found: Errors) -> None:
    """Aegaeon's engine on each device whose kernels were timed, and MuxServe's."""
    tables = known.tables
    devices = sorted({d for d, _ in tables.decode})
    shown = {d: known.beside(d, known.dense(d)) for d in devices}
    derates = {d: known.derate(d) for d in devices}

    def elsewhere(device: str, of: Callable[[str], float]) -> float:
        return statistics.median(of(d) for d in devices if d != device)

    for device, timed in known.timed.items():
        reading = known.reaches[device].reading
        fit = Beside(
            layer_seconds=known.reaches[device].layer_seconds,
            reading=reading,
            kv=elsewhere(device, lambda d: shown[d].kv),
            tile=elsewhere(device, lambda d: shown[d].tile),
            launch_seconds=elsewhere(device, lambda d: shown[d].launch_seconds),
            step_seconds=elsewhere(device, lambda d: shown[d].step_seconds),
            sequence_seconds=elsewhere(device, lambda d: shown[d].sequence_seconds),
        )
        token = statistics.median(k.token / k.peak_token for k in timed if k.tp == 1)
        start = statistics.median(k.uncovered for k in timed if k.tp == 1)
        pairs_factor = elsewhere(device, lambda d: derates[d].attention)
        hardware = tables.hardware[device]
        for pair in known.dense(device):
            name = f"aegaeon {'/'.join(pair)}"
            off = fit.seconds(known.terms(pair)) / tables.decode[pair].seconds - 1
            found.add("engine", name, "decode", off)
            p, sizes = tables.prefill[pair], known.sizes(pair[1])
            pass_seconds = fit.layer_seconds * sizes.layers
            pass_seconds += reading * sizes.pass_bytes / hardware.memory_bandwidth
            seconds = (
                fit.step_seconds
                + start * pass_seconds
                + token * 2 * sizes.active * p.tokens / hardware.flops
                + pairs_factor * sizes.pair_flops * p.pairs / hardware.flops
            )
            long = p.tokens >= BEYOND_FLOOR
            found.add("engine", name, "prefill", (seconds / p.seconds - 1)[long])
    own, hardware = shown[GROUPS_ON], tables.hardware[GROUPS_ON]
    for s in splits(known):
        steps = own.seconds(decode_terms(s.sizes, s.decode, hardware, s.group))
        name = f"muxserve {s.row.model}/tp{s.row.tp}"
        found.add("engine", name, "decode", steps / s.decode.seconds - 1)


def stated_left_out(known: Known, found: Errors) -> None:
    """Each of the steps, and of the activations, that engines of today are fitted to."""
    hardware, timed = known.tables.hardware[ON], known.timed[ON]
    reduces = all_reduces(known.folder, ON, hardware)
    by_size = {a.tp: a for a in reduces}
    layer, reading = kernels_reach(timed)
    for step in STEPS:
        others = [s for s in STEPS if s is not step]
        more, all_reduce = fit_steps(others, hardware, layer, reading, reduces)
        reach = known.reaches[ON].model_copy(update={"layer_seconds": layer + more})
        host = graphs_engine(STEPS, all_reduce, reduces).host
        assert host is not None
        sizes = known.sizes(step.model)
        costs = step_costs(sizes, hardware, reach, host, by_size.get(step.tp))
        off = costs.of(JobLoad(0, 0, 0, 1, 0)) / step.seconds - 1
        found.add("stated", f"{step.model}/tp{step.tp}", "decode", [off])
    for model, seconds in ACTIVATIONS:
        ((other, seen),) = (a for a in ACTIVATIONS if a[0] != model)
        rate = seen / facts(other).parameters
        off = rate * facts(model).parameters / seconds - 1
        found.add("stated", f"{model} comes in", "activation", [off])


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", type=Path, default=Path("../shared/profiles"))


def main() -> None:
    args = options(__doc__, extra=extra)
    if not (args.profiles / "latency_points.csv.gz").is_file():
        Console().print(f"the tables of latencies are not at hand: {args.profiles} (--profiles)")
        sys.exit(2)
    known, found = Known(args.profiles), Errors()
    devices = QUICK if args.quick else sorted({d for d, _ in known.tables.decode})
    models_left_out(known, devices, found)
    groups_left_out(known, found)
    kernels_left_out(known, found)
    all_reduces_left_out(known, found)
    engines_left_out(known, found)
    stated_left_out(known, found)
    summary = found.summary()
    headline = summary["left_out_median_pct"]
    result: dict[str, Any] = {**summary, "goal_met": headline <= GOAL, "rows": found.rows}
    finish(args, "sim_engines", result)


if __name__ == "__main__":
    main()
