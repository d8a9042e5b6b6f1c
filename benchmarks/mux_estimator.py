"""How far MuxServe's estimate of throughput (Equation 3) is from the simulator.

Units of LLaMA models on A100s, each asked at half, once and twice the rates of its setting, under
`muxserve`. The estimate knows the profile's costs, on parts of the multiprocessors as measured, and
mean lengths; the simulation serves requests of ShareGPT's lengths. Compared is, by model, requests
per second: those that the estimate expects, and those answered in the second half of the time in
which requests come. `estimator_error_median_pct`, `estimator_error_worst_pct`: over all models,
units and rates. `by_factor`: the median at each rate; what is asked little is easily estimated.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.core.cost import StepCosts, Traffic
from ballast.core.model import ModelSpec
from ballast.policy.fleet.mux_estimate import Tenant
from ballast.policy.fleet.mux_placement import Placed, place
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.policy.presets import resolve, shared_options
from ballast.sim.cluster import USABLE, Kind, parse_kinds
from benchmarks.common import finish, options
from benchmarks.mux_sim import ENGINE, LANES, TERMS, Setting, ended_within, specs_of, workload
from benchmarks.sweep import Sweep, add_processes, plain


@dataclass(frozen=True)
class Unit:
    """Models that share devices."""

    ranks: int
    setting: Setting


def _unit(ranks: int, rates: dict[str, float]) -> Unit:
    return Unit(ranks, Setting(rates, dict.fromkeys(rates, 1.0), {}))


UNITS = {
    "7b on 1": _unit(1, {"LLaMA-7b": 4.0}),
    "13b on 1": _unit(1, {"LLaMA-13b": 2.0}),
    "13b, 7b on 1": _unit(1, {"LLaMA-13b": 0.7, "LLaMA-7b": 2.5}),
    "30b, 13b, 7b on 4": _unit(4, {"LLaMA-30b": 1.0, "LLaMA-13b": 4.0, "LLaMA-7b": 8.0}),
    "65b, 30b on 4": _unit(4, {"LLaMA-65b": 0.5, "LLaMA-30b": 2.0}),
}
FACTORS = (0.5, 1.0, 2.0)


def costs_of(kind: Kind, spec: ModelSpec) -> Callable[[int, float], StepCosts]:
    """What jobs of a model cost on a share of so many devices' compute: as measured, between two
    shares each coefficient linear in 1 / share, below the least in proportion to that. Where
    nothing was measured for a group, a share takes all as many times longer."""

    @cache
    def measured(devices: int) -> list[tuple[float, StepCosts]]:
        whole = replace(kind, ranks=devices).costs(spec)
        return [*kind.profile.on_parts(spec, devices), (1.0, whole)]

    def costs(devices: int, share: float) -> StepCosts:
        rows = measured(devices)
        less = [row for row in rows if row[0] <= share]
        if not less:
            at, found = rows[0]
            return found.scaled(at / share)
        below, above = less[-1], next(row for row in rows if row[0] >= share)
        if below[0] == above[0]:
            return below[1]
        part = (1 / share - 1 / above[0]) / (1 / below[0] - 1 / above[0])
        pairs = zip(astuple(above[1]), astuple(below[1]), strict=True)
        return StepCosts(*(a + part * (b - a) for a, b in pairs))

    return costs


def estimated(unit: Unit, kind: Kind, factor: float, seconds: float) -> Placed:
    """Algorithms 1 and 2 on the one mesh there is."""
    specs = specs_of(unit.setting, kind, 1.0)
    work = workload(unit.setting, factor, 1.0, seconds, seed=1)
    tenants = []
    for spec in specs:
        own = [r for r in work.requests if r.model == spec.name]
        prompt = sum(r.prompt_tokens for r in own) / len(own)
        output = sum(r.output_tokens for r in own) / len(own)
        traffic = Traffic(len(own) / seconds, prompt, output)
        tenants.append(tenant_of(kind, spec, traffic, kind.ranks))
    return place(tenants, [PlacementDevice(f"d{i}", memory_of(kind)) for i in range(kind.ranks)])


def memory_of(kind: Kind) -> float:
    """Bytes of one of its devices that are for weights and KV."""
    assert kind.profile.hardware is not None
    return USABLE * kind.profile.hardware.memory_bytes


def tenant_of(kind: Kind, spec: ModelSpec, traffic: Traffic, least: int = 1) -> Tenant:
    """A model as MuxServe's estimate sees it, spread over `least` devices of a kind or more."""
    weights, kv = sum(spec.segment_bytes), spec.kv_bytes_per_token
    costs = costs_of(kind, spec)
    return Tenant(spec.name, weights, kv, traffic, spec.slo.tpot, costs, least, spec.max_running)


@dataclass(frozen=True)
class Result:
    """One model of a unit at one rate, in requests per second."""

    unit: str
    factor: float
    model: str
    asked: float
    estimated: float
    simulated: float

    @property
    def error(self) -> float:
        return self.estimated / self.simulated - 1 if self.simulated else float("inf")


def measure(name: str, factor: float, seconds: float) -> list[Result]:
    unit = UNITS[name]
    (kind,) = parse_kinds(f"A100-80G:tp{unit.ranks}", LANES, ENGINE)
    specs = specs_of(unit.setting, kind, 1.0)
    work = workload(unit.setting, factor, 1.0, seconds, seed=1)
    preset = resolve("muxserve", shared_options("muxserve", TERMS))
    ran = run_cluster(preset, [kind], specs, work, {s.name: s.slo for s in specs})
    ended = ended_within(ran.report, seconds / 2, seconds)
    found = estimated(unit, kind, factor, seconds).estimates
    asked = Counter(r.model for r in work.requests)
    return [
        Result(
            name,
            factor,
            s.name,
            asked[s.name] / seconds,
            found[s.name].rate,
            ended[s.name] / (seconds / 2),
        )
        for s in specs
    ]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    def median(of: Sequence[Result]) -> float:
        return 100 * statistics.median(abs(r.error) for r in of)

    return {
        "estimator_error_median_pct": median(results),
        "estimator_error_worst_pct": 100 * max(abs(r.error) for r in results),
        "by_factor": {f"{f:g}": median([r for r in results if r.factor == f]) for f in FACTORS},
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        add_processes(parser)

    args = options(__doc__, argv, extra)
    seconds = 60.0 if args.quick else 180.0
    with Sweep(args.processes) as sweep:
        by_unit = sweep.over((UNITS, FACTORS), partial(measure, seconds=seconds))
    results = [r for by in by_unit.values() for found in by.values() for r in found]
    columns = ("unit", "rate", "model", "asked/s", "estimated", "simulated", "error")
    table = Table(*columns, title="mux_estimator")
    for r in results:
        rates = (f"{x:.2f}" for x in (r.asked, r.estimated, r.simulated))
        table.add_row(r.unit, f"{r.factor:g} x", r.model, *rates, f"{r.error:+.0%}")
    outcome = summary(results)
    table.caption = f"median {outcome['estimator_error_median_pct']:.0f} %"
    result = {**outcome, "seconds": seconds, "rows": plain(results)}
    finish(args, "mux_estimator", result, table)


if __name__ == "__main__":
    main()
