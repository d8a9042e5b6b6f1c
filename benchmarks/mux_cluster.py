"""MuxServe's clusters in virtual time: 19 LLaMA models on 32 A100s (Figure 5, Table 1).

Twelve models of 7B, four of 13B, two of 30B and one of 65B, asked by a power law of exponent
`--alpha` (0.9), the ranks drawn by seed, with requests of ShareGPT. Three ways to use the devices:

- `spatial`: each model has devices of its own (`static`), as few as hold it and one request each of
  16; what is left doubles, one after the other, the devices of the model that Equation 3 expects to
  fall short most.
- `temporal`: models share meshes as MuxServe places them, and these run one job at a time, first
  come first served, with one pool of KV (`recompute+fcfs`), as the paper has AlpaServe's way.
- `muxserve`: the same placement, prefills beside decodes on three lanes, quotas of KV.

All have the same options, as far as their presets have them, the same requests, and levels of eight
times what a request alone would see on as few devices as hold the model. `throughput`, of models by
their rates, and attainment are those of `mux_sim`. `throughput_over_spatial`: of `muxserve`, at
the highest rate tried (the paper: up to 1.8). `requests_at_99_over_best`: the highest rate at
which 99 % attain, over that of the better baseline (the paper: up to 2.9); None where none of them
is seen to fall below it, or a baseline is not seen to reach it.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.clusters import run_cluster
from ballast.core.cost import Traffic
from ballast.core.model import ModelSpec
from ballast.policy.mux_estimate import Tenant, estimate
from ballast.policy.mux_placement import Device, place
from ballast.policy.presets import resolve
from ballast.sim.catalogue import facts
from ballast.sim.cluster import Kind, kinds_of
from ballast.sim.given import Given, GivenHomes
from ballast.workload.generators import assemble, poisson, power_law
from ballast.workload.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT
from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.mux_estimator import memory_of, tenant_of
from benchmarks.mux_sim import CONTEXT, ENGINE, LANES, TERMS, level, throughput
from benchmarks.rate_curves import Curve

DEVICE = "A100-80G"
DEVICES, PER_HOST = 32, 8
SIZES = {"LLaMA-7b": 12, "LLaMA-13b": 4, "LLaMA-30b": 2, "LLaMA-65b": 1}
LEAST_RUNNING = 16
"""Requests of mean length that a model's devices hold at least where they are its own."""
COMPARED = Comparison(
    TERMS,
    {
        "spatial": Contender("static"),
        "temporal": Contender("recompute+fcfs"),
        "muxserve": Contender("muxserve"),
    },
)
RATES = (0.5, 1.0, 2.0, 4.0)
"""Requests per second of a model, on average."""
TARGET = 0.99
ROOM = 1.1
"""Memory of a model's devices over its weights, at least."""
ROOM_FOR_LANES = 1.2
"""The same where activations of jobs on several lanes lie beside them."""
LENGTHS = SHAREGPT_PROMPT.mean, SHAREGPT_OUTPUT.mean


@cache
def kind_of(ranks: int, lanes: int = 1) -> Kind:
    (kind,) = kinds_of(f"{DEVICE}:tp{ranks}", lanes, ENGINE)
    return kind


@cache
def memory() -> float:
    """Bytes of a device."""
    return memory_of(kind_of(1))


def fewest(least: float, devices: int = 1) -> int:
    """Devices, no fewer than `devices`, that have more than so many bytes: 1, 2, 4 or 8."""
    return next(n for n in (1, 2, 4, 8) if n >= devices and n * memory() > least)


def models() -> dict[str, str]:
    """Which LLaMA each model is, by name."""
    return {f"{like[6:]}-{i}": like for like, n in SIZES.items() for i in range(n)}


def specs() -> list[ModelSpec]:
    """With service levels as on as few devices as hold the model."""
    found = []
    for name, like in models().items():
        spec = facts(like).spec(max_model_len=CONTEXT, fingerprint=like, max_running=256)
        ranks = fewest(ROOM * sum(spec.segment_bytes))
        slo = level(kind_of(ranks).costs(spec), round(SHAREGPT_PROMPT.mean))
        found.append(replace(spec, name=name, slo=slo))
    return found


def workload(rate: float, alpha: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals, `rate` a second for each model on average; which model has which place in
    the order of popularity is drawn."""
    names = list(models())
    order = np.random.default_rng([seed, 7]).permutation(len(names))
    shares = power_law(len(names), alpha)
    arrivals = [
        poisson(rate * len(names) * shares[place], seconds, np.random.default_rng([seed, i]))
        for i, place in enumerate(order.tolist())
    ]
    source = f"generated: {rate:g}/s a model for {seconds:g} s, power law {alpha:g}, seed {seed}"
    return assemble("table 1", names, arrivals, SHAREGPT_PROMPT, SHAREGPT_OUTPUT, seed, source)


def tenants_of(work: Workload, seconds: float) -> list[Tenant]:
    asked = Counter(r.model for r in work.requests)
    found = []
    for spec in specs():
        traffic = Traffic(asked[spec.name] / seconds, *LENGTHS)
        least = fewest(ROOM_FOR_LANES * sum(spec.segment_bytes))
        found.append(tenant_of(kind_of(1), spec, traffic, least))
    return found


def apart(tenants: Sequence[Tenant]) -> list[tuple[int, list[str]]]:
    """Devices for each model alone: (how many, its name)."""
    ranks = {}
    for t in tenants:
        needed = t.weights + LEAST_RUNNING * t.request_bytes
        ranks[t.name] = fewest(needed, t.least_devices)

    def short(t: Tenant) -> float:
        """Requests per second that it will not serve."""
        n = ranks[t.name]
        alone = estimate([t], {t.name: 1.0}, n, n * memory())
        assert alone is not None
        return t.traffic.rate - alone[t.name].rate

    while True:
        left = DEVICES - sum(ranks.values())
        wanting = [t for t in tenants if ranks[t.name] <= min(left, PER_HOST // 2)]
        if not wanting:
            return [(n, [name]) for name, n in ranks.items()]
        ranks[max(wanting, key=lambda t: (short(t), t.traffic.rate)).name] *= 2


def together(tenants: Sequence[Tenant]) -> list[tuple[int, list[str]]]:
    """MuxServe's placement."""
    devices = [Device(f"d{i}", memory()) for i in range(DEVICES)]
    found = place(tenants, devices, PER_HOST)
    return [(len(mesh.devices), list(mesh.models)) for mesh in found.meshes]


@dataclass(frozen=True)
class Result:
    """One row at one rate."""

    throughput: float
    attainment: float
    worst: float
    """Attainment of the model that is served worst."""
    meshes: Sequence[tuple[int, Sequence[str]]]
    requests: int
    preemptions: int


def measure(row: str, rate: float, alpha: float, seconds: float, seed: int = 1) -> Result:
    work = workload(rate, alpha, seconds, seed)
    tenants = tenants_of(work, seconds)
    meshes = apart(tenants) if row == "spatial" else together(tenants)
    lanes = LANES if row == "muxserve" else 1
    homes: dict[str, list[int | str]] = {n: [i] for i, (_, ns) in enumerate(meshes) for n in ns}
    kinds = [kind_of(ranks, lanes) for ranks, _ in meshes]
    contender = COMPARED.rows[row]
    ran = run_cluster(
        resolve(contender.preset, COMPARED.options(row)),
        kinds,
        specs(),
        work,
        {s.name: s.slo for s in specs()},
        given=Given(homes=GivenHomes(row, homes)),
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


def summary(results: Mapping[str, Mapping[float, Result]]) -> dict[str, Any]:
    """`results` by row and rate."""
    most = max(results["muxserve"])
    at = {
        row: Curve({r: found.attainment for r, found in by.items()}).rate_at(TARGET)
        for row, by in results.items()
    }
    best = max(rate for row, rate in at.items() if row != "muxserve")
    seen = at["muxserve"] < most and best > 0
    return {
        "throughput_over_spatial": results["muxserve"][most].throughput
        / results["spatial"][most].throughput,
        "throughput_over_temporal": results["muxserve"][most].throughput
        / results["temporal"][most].throughput,
        "rate_at_99": at,
        "requests_at_99_over_best": at["muxserve"] / best if seen else None,
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--alpha", type=float, default=0.9)
        parser.add_argument("--seconds", type=float, help="of arrivals; default 120, quick 40")
        parser.add_argument("--rates", default=",".join(map(str, RATES)), help="by model, mean")
        parser.add_argument("--processes", type=int, default=2)

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (40.0 if args.quick else 120.0)
    rates = [float(r) for r in args.rates.split(",")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        coming = {
            row: {r: pool.submit(measure, row, r, args.alpha, seconds) for r in rates}
            for row in COMPARED.rows
        }
        results = {row: {r: c.result() for r, c in by.items()} for row, by in coming.items()}
    table = Table(
        "", *(f"{r:g}/s" for r in rates), title="mux_cluster: req/s by rate; in SLO; worst"
    )
    for row, by in results.items():
        cells = (f"{r.throughput:.2f}; {r.attainment:.0%}; {r.worst:.0%}" for r in by.values())
        table.add_row(row, *cells)
    told = summary(results)
    table.caption = ", ".join(f"{k} {v}" for k, v in told.items())
    rows = {row: {f"{r:g}": asdict(x) for r, x in by.items()} for row, by in results.items()}
    result = {**told, "alpha": args.alpha, "seconds": seconds, "rows": rows}
    finish(args, "mux_cluster", result, table)


if __name__ == "__main__":
    main()
