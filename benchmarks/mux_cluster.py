"""MuxServe's clusters in virtual time: LLaMA models on 32 A100s (Figures 5 and 7).

19 models, twelve of 7B, four of 13B, two of 30B and one of 65B (Table 1), or 16, whose sizes the
paper does not state (10, 3, 2, 1), asked by a power law of exponents `--alphas`, the ranks drawn by
seed, with requests of ShareGPT. Ways to use the devices:

- `spatial`: each model has devices of its own (`static`), as few as hold it and one request each of
  16; what is left doubles, one after the other, the devices of the model that Equation 3 expects to
  fall short most.
- `spatial, by size`: what is left doubles the devices of the model with the most weights on each,
  whatever it is asked. On 32 devices models of the four sizes then have 1, 1, 4 and 8.
- `temporal`: models share meshes as MuxServe places them, and these run one job at a time, first
  come first served, with one pool of KV (`recompute+fcfs`), as the paper has AlpaServe's way.
- `muxserve`: the same placement, prefills beside decodes on three lanes, quotas of KV.

MuxServe's placement, and which models spatial gives more devices, go by `--headroom` times the
rates asked. All have the same options, as far as their presets have them, the same requests, and
levels of eight times what a request alone would see on as few devices as hold the model.
`throughput`, of models by their rates, and attainment are those of `mux_sim`. By exponent,
`throughput_over_spatial` (and the like): of `muxserve`, at the highest rate tried (the paper: up to
1.8; 1.38 for 16 models). `requests_at_99_over_best`: the highest rate at which 99 % attain, over
that of the best baseline (the paper: up to 2.9); None where none of them is seen to fall below it,
or a baseline is not seen to reach it. `rate_at_99`, `rate_at_95`: of each row.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.core.cost import Traffic
from ballast.core.model import ModelSpec
from ballast.policy.fleet.mux_estimate import Tenant, estimate
from ballast.policy.fleet.mux_placement import place
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.policy.presets import resolve
from ballast.sim.cluster import Kind, parse_kinds
from ballast.sim.cluster_files import ClusterFiles, GivenHomes
from ballast.sim.model_catalogue import facts
from ballast.workload.generators import assemble, poisson, power_law
from ballast.workload.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT
from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.mux_estimator import memory_of, tenant_of
from benchmarks.mux_sim import CONTEXT, ENGINE, LANES, TERMS, level, throughput
from benchmarks.rate_curves import Curve
from benchmarks.sweep import Sweep, add_processes, plain

DEVICE = "A100-80G"
PER_HOST = 8
LEAST_RUNNING = 16
"""Requests of mean length that a model's devices hold at least where they are its own."""
COMPARED = Comparison(
    TERMS,
    {
        "spatial": Contender("static"),
        "spatial, by size": Contender("static"),
        "temporal": Contender("recompute+fcfs"),
        "muxserve": Contender("muxserve"),
    },
)
ALPHAS = (0.9, 2.1)
RATES = (0.5, 1.0, 2.0, 4.0)
"""Requests per second of a model, on average."""
TARGET, LESS = 0.99, 0.95
ROOM = 1.1
"""Memory of a model's devices over its weights, at least."""
ROOM_FOR_LANES = 1.2
"""The same where activations of jobs on several lanes lie beside them."""
LENGTHS = SHAREGPT_PROMPT.mean, SHAREGPT_OUTPUT.mean
Meshes = Sequence[tuple[int, Sequence[str]]]
"""How many devices, and which models these serve."""


@dataclass(frozen=True)
class Cluster:
    """Models of LLaMA's sizes, and A100s for them."""

    sizes: Mapping[str, int]
    devices: int

    @property
    def models(self) -> dict[str, str]:
        """Which LLaMA each model is, by name."""
        return {f"{like[6:]}-{i}": like for like, n in self.sizes.items() for i in range(n)}

    @cached_property
    def specs(self) -> list[ModelSpec]:
        """With service levels as on as few devices as hold the model."""
        found = []
        for name, like in self.models.items():
            spec = facts(like).spec(max_model_len=CONTEXT, fingerprint=like, max_running=256)
            ranks = fewest(ROOM * sum(spec.segment_bytes))
            slo = level(kind_of(ranks).costs(spec), round(SHAREGPT_PROMPT.mean))
            found.append(replace(spec, name=name, slo=slo))
        return found

    def workload(self, rate: float, shares: Sequence[float], seconds: float, seed: int) -> Workload:
        """Poisson arrivals, `rate` a second for each model on average; which model has which of the
        shares is drawn."""
        names = list(self.models)
        order = np.random.default_rng([seed, 7]).permutation(len(names))
        arrivals = [
            poisson(rate * len(names) * shares[k], seconds, np.random.default_rng([seed, i]))
            for i, k in enumerate(order.tolist())
        ]
        source = f"generated: {rate:g}/s a model for {seconds:g} s, seed {seed}"
        lengths = SHAREGPT_PROMPT, SHAREGPT_OUTPUT
        return assemble("cluster", names, arrivals, *lengths, seed, source)

    def tenants(self, work: Workload, seconds: float, headroom: float = 1.0) -> list[Tenant]:
        """The models as the placement sees them, asked `headroom` times as often as they are."""
        asked = Counter(r.model for r in work.requests)
        found = []
        for spec in self.specs:
            traffic = Traffic(headroom * asked[spec.name] / seconds, *LENGTHS)
            least = fewest(ROOM_FOR_LANES * sum(spec.segment_bytes))
            found.append(tenant_of(kind_of(1), spec, traffic, least))
        return found

    @property
    def each(self) -> Sequence[PlacementDevice]:
        return [PlacementDevice(f"d{i}", memory()) for i in range(self.devices)]


CLUSTERS = {
    "19": Cluster({"LLaMA-7b": 12, "LLaMA-13b": 4, "LLaMA-30b": 2, "LLaMA-65b": 1}, 32),
    "16": Cluster({"LLaMA-7b": 10, "LLaMA-13b": 3, "LLaMA-30b": 2, "LLaMA-65b": 1}, 32),
}


@cache
def kind_of(ranks: int, lanes: int = 1) -> Kind:
    (kind,) = parse_kinds(f"{DEVICE}:tp{ranks}", lanes, ENGINE)
    return kind


@cache
def memory() -> float:
    """Bytes of a device."""
    return memory_of(kind_of(1))


def fewest(least: float, devices: int = 1) -> int:
    """Devices, no fewer than `devices`, that have more than so many bytes: 1, 2, 4 or 8."""
    return next(n for n in (1, 2, 4, 8) if n >= devices and n * memory() > least)


def apart(tenants: Sequence[Tenant], devices: int) -> Meshes:
    """Devices for each model alone, by what it is asked."""

    def short(t: Tenant, n: int) -> tuple[float, float]:
        """Requests per second that it will not serve; that it is asked."""
        alone = estimate([t], {t.name: 1.0}, n, n * memory())
        assert alone is not None
        return t.traffic.rate - alone[t.name].rate, t.traffic.rate

    return _alone(tenants, devices, short)


def by_size(tenants: Sequence[Tenant], devices: int) -> Meshes:
    """Devices for each model alone, by its size."""
    return _alone(tenants, devices, lambda t, n: (t.weights / n, t.weights))


def _alone(
    tenants: Sequence[Tenant], devices: int, need: Callable[[Tenant, int], tuple[float, float]]
) -> Meshes:
    """What is left once all have room goes, doubling, to who needs it most."""
    ranks = {}
    for t in tenants:
        needed = t.weights + LEAST_RUNNING * t.request_bytes
        ranks[t.name] = fewest(needed, t.least_devices)
    while True:
        left = devices - sum(ranks.values())
        wanting = [t for t in tenants if ranks[t.name] <= min(left, PER_HOST // 2)]
        if not wanting:
            return [(n, [name]) for name, n in ranks.items()]
        ranks[max(wanting, key=lambda t: need(t, ranks[t.name])).name] *= 2


def together(tenants: Sequence[Tenant], devices: Sequence[PlacementDevice]) -> Meshes:
    """MuxServe's placement."""
    found = place(tenants, devices, PER_HOST)
    return [(len(mesh.devices), list(mesh.models)) for mesh in found.meshes]


@dataclass(frozen=True)
class Result:
    """One row at one rate."""

    throughput: float
    attainment: float
    worst: float
    """Attainment of the model that is served worst."""
    meshes: Meshes
    requests: int
    preemptions: int


def serve(
    cluster: Cluster,
    meshes: Meshes,
    work: Workload,
    seconds: float,
    compared: Comparison,
    row: str,
    lanes: int,
) -> Result:
    """A workload on models that are placed so, under a row's preset."""
    homes: dict[str, list[int | str]] = {n: [i] for i, (_, ns) in enumerate(meshes) for n in ns}
    ran = run_cluster(
        resolve(compared.rows[row].preset, compared.options(row)),
        [kind_of(ranks, lanes) for ranks, _ in meshes],
        cluster.specs,
        work,
        {s.name: s.slo for s in cluster.specs},
        files=ClusterFiles(homes=GivenHomes(row, homes)),
    )
    report = ran.report
    return Result(
        throughput(report, seconds / 2, seconds),
        report.total.attainment,
        report.worst_attainment,
        meshes,
        report.total.requests,
        ran.total("preemptions"),
    )


def measure(
    name: str,
    alpha: float,
    row: str,
    rate: float,
    seconds: float,
    headroom: float = 1.0,
    seed: int = 1,
) -> Result:
    cluster = CLUSTERS[name]
    work = cluster.workload(rate, power_law(len(cluster.models), alpha), seconds, seed)
    tenants = cluster.tenants(work, seconds, headroom)
    if row.startswith("spatial"):
        meshes = (apart if row == "spatial" else by_size)(tenants, cluster.devices)
    else:
        meshes = together(tenants, cluster.each)
    lanes = LANES if row == "muxserve" else 1
    return serve(cluster, meshes, work, seconds, COMPARED, row, lanes)


def summary(results: Mapping[str, Mapping[float, Result]]) -> dict[str, Any]:
    """Of one exponent; `results` by row and rate."""
    most = max(results["muxserve"])
    ours = results["muxserve"][most].throughput
    curves = {
        row: Curve({r: found.attainment for r, found in by.items()}) for row, by in results.items()
    }
    at = {row: curve.rate_at(TARGET) for row, curve in curves.items()}
    best = max(rate for row, rate in at.items() if row != "muxserve")
    seen = at["muxserve"] < most and best > 0
    over = {
        f"throughput_over_{row.replace(', ', '_').replace(' ', '_')}": ours / by[most].throughput
        for row, by in results.items()
        if row != "muxserve"
    }
    return {
        **over,
        "rate_at_99": at,
        "rate_at_95": {row: curve.rate_at(LESS) for row, curve in curves.items()},
        "requests_at_99_over_best": at["muxserve"] / best if seen else None,
    }


def over_rates(title: str, results: Mapping[str, Mapping[float, Result]]) -> Table:
    """Throughput, attainment, and that of the model served worst, by row and rate."""
    rates = next(iter(results.values()))
    table = Table("", *(f"{r:g}/s" for r in rates), title=title)
    for row, by in results.items():
        cells = (f"{r.throughput:.2f}; {r.attainment:.0%}; {r.worst:.0%}" for r in by.values())
        table.add_row(row, *cells)
    return table


def table_of(title: str, results: Mapping[str, Mapping[float, Result]]) -> Table:
    table = over_rates(title, results)
    outcome = summary(results)
    shown = {k: v for k, v in outcome.items() if not k.startswith("rate_at")}
    table.caption = ", ".join(
        f"{k} {v:.2f}" if v is not None else f"{k} not stated" for k, v in shown.items()
    )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", choices=CLUSTERS, default="19")
        parser.add_argument("--alphas", default=",".join(map(str, ALPHAS)), help="power law's")
        parser.add_argument("--seconds", type=float, help="of arrivals; default 120, quick 40")
        parser.add_argument("--rates", default=",".join(map(str, RATES)), help="by model, mean")
        parser.add_argument("--headroom", type=float, default=1.0, help="default 1")
        add_processes(parser)

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (40.0 if args.quick else 120.0)
    alphas, rates = ([float(x) for x in of.split(",")] for of in (args.alphas, args.rates))
    run = partial(measure, args.models, seconds=seconds, headroom=args.headroom)
    with Sweep(args.processes) as sweep:
        results = sweep.over((alphas, COMPARED.rows, rates), run)
    shown = [
        table_of(f"{args.models} models, power law {alpha:g}: req/s by rate; in SLO; worst", rows)
        for alpha, rows in results.items()
    ]
    result = {
        "models": CLUSTERS[args.models].sizes,
        "seconds": seconds,
        "headroom": args.headroom,
        "alphas": {
            f"{alpha:g}": {**summary(rows), "rows": plain(rows)} for alpha, rows in results.items()
        },
    }
    finish(args, "mux_cluster", result, Group(*shown))


if __name__ == "__main__":
    main()
