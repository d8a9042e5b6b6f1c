"""MuxServe without one of its parts, in virtual time (section 4.4, Figures 8 and 9).

Placement: four models on 8 A100s, seven on 16, half of which get 75 % of the requests. `muxserve`
places them by Algorithms 1 and 2; `greedy` takes them by rate, the most asked first, and gives each
to the mesh with the most free memory, on that group of meshes for which Equation 3 then expects
most. Both are served under `muxserve`. The paper states 1.3 for one of the two.

Resource manager: four models on one unit of 4 A100s, by power law. `neither`: one job at a time,
first come first served, fixed shares of KV (`static+fcfs`); `compute`: prefills beside decodes
(`static+adbs`, three lanes); `both`: and one pool of KV with quotas (`muxserve`). The paper states
1.7 for the first step, and a further 1.2 (attainment: 3.6) for the second.

Which sizes and rates the paper had is not stated. `throughput` and attainment are as in
`mux_cluster`; `placement_over_greedy`, `compute_over_neither`, `memory_over_compute`: by setting or
exponent, the largest over the rates, and `at_rate`, the rate. `attainment_over_compute`: the
largest ratio of attainments over the rates. `--unit` has other sizes on the unit, which leaves more
or less memory for KV.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Group
from rich.table import Table

from ballast.policy.fleet.mux_estimate import Tenant, estimate
from ballast.policy.fleet.mux_placement import mesh_groups
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.workload.generators import power_law
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.mux_cluster import PER_HOST, Cluster, Meshes, Result, over_rates, serve, together
from benchmarks.mux_sim import LANES, TERMS
from benchmarks.sweep import Sweep, add_processes, plain

UNIT = "7b,7b,13b,30b"
"""LLaMA's sizes on one unit of 4 A100s."""
PLACEMENTS = {
    "4 on 8": Cluster({"LLaMA-7b": 2, "LLaMA-13b": 1, "LLaMA-30b": 1}, 8),
    "7 on 16": Cluster({"LLaMA-7b": 3, "LLaMA-13b": 2, "LLaMA-30b": 1, "LLaMA-65b": 1}, 16),
}
POPULAR = 0.75
"""Of the requests, that half of the models get."""
PLACED = Comparison(TERMS, {"greedy": Contender("muxserve"), "muxserve": Contender("muxserve")})
PARTS = Comparison(
    TERMS,
    {
        "neither": Contender("static+fcfs"),
        "compute": Contender("static+adbs"),
        "both": Contender("muxserve"),
    },
)
RATES = (2.0, 4.0, 8.0, 16.0)
"""Requests per second of a model, on average."""
ALPHAS = (0.7, 0.9, 1.3, 2.1)


def half_popular(n: int) -> list[float]:
    """Shares of the requests."""
    popular = n // 2
    return [POPULAR / popular] * popular + [(1 - POPULAR) / (n - popular)] * (n - popular)


def greedy(tenants: Sequence[Tenant], devices: Sequence[PlacementDevice]) -> Meshes:
    """By rate, to the mesh with the most free memory; the best of all groups of meshes."""
    hosts = [devices[i : i + PER_HOST] for i in range(0, len(devices), PER_HOST)]
    best: tuple[float, Meshes] | None = None
    for group in mesh_groups(hosts):
        held: list[list[Tenant]] = [[] for _ in group]
        for t in sorted(tenants, key=lambda t: (-t.traffic.rate, t.name)):
            free = {
                i: mesh.memory - sum(other.weights for other in held[i])
                for i, mesh in enumerate(group)
                if len(mesh.devices) >= t.least_devices
            }
            if not free:
                break
            held[max(free, key=lambda i: (free[i], -i))].append(t)
        else:
            rate = 0.0
            for mesh, models in zip(group, held, strict=True):
                shares = {t.name: 1.0 for t in models}
                found = estimate(models, shares, len(mesh.devices), mesh.memory)
                if found is None:
                    break
                rate += sum(e.rate for e in found.values())
            else:
                if best is None or rate > best[0] * (1 + 1e-6):
                    pairs = zip(group, held, strict=True)
                    best = rate, [(len(m.devices), [t.name for t in ts]) for m, ts in pairs if ts]
    assert best is not None
    return best[1]


def placed(name: str, row: str, rate: float, seconds: float) -> Result:
    """One way to place the models of a setting."""
    cluster = PLACEMENTS[name]
    work = cluster.workload(rate, half_popular(len(cluster.models)), seconds, seed=1)
    tenants = cluster.tenants(work, seconds)
    meshes = (greedy if row == "greedy" else together)(tenants, cluster.each)
    return serve(cluster, meshes, work, seconds, PLACED, row, LANES)


def unit_of(sizes: str) -> Cluster:
    """Models of these sizes on one unit, as `7b,13b`."""
    return Cluster(Counter(f"LLaMA-{size}" for size in sizes.split(",")), 4)


def managed(alpha: str, row: str, rate: float, *, sizes: str, seconds: float) -> Result:
    """Serve a unit with some parts of the resource manager; `alpha`: exponent of popularity."""
    unit = unit_of(sizes)
    work = unit.workload(rate, power_law(len(unit.models), float(alpha)), seconds, seed=1)
    meshes = [(unit.devices, list(unit.models))]
    return serve(unit, meshes, work, seconds, PARTS, row, 1 if row == "neither" else LANES)


Rows = Mapping[str, Mapping[float, Result]]
"""Results by row and rate."""


def most_attained(of: str, over: str, rows: Rows) -> dict[str, float]:
    """The largest ratio of attainments over the rates, and the ratio of throughputs there."""
    ratios = {r: x.attainment / max(1e-9, rows[over][r].attainment) for r, x in rows[of].items()}
    at = max(ratios, key=lambda r: ratios[r])
    return {
        "ratio": rows[of][at].throughput / rows[over][at].throughput,
        "at_rate": at,
        "attainment_ratio": ratios[at],
    }


def most(of: str, over: str, rows: Rows) -> dict[str, float]:
    """The largest ratio of throughputs over the rates, and the ratio of attainments there."""
    ratios = {r: x.throughput / rows[over][r].throughput for r, x in rows[of].items()}
    at = max(ratios, key=lambda r: ratios[r])
    attained = rows[of][at].attainment / max(1e-9, rows[over][at].attainment)
    return {"ratio": ratios[at], "at_rate": at, "attainment_ratio": attained}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, help="of arrivals; default 60, quick 30")
        parser.add_argument("--rates", default=",".join(map(str, RATES)), help="by model, mean")
        add_processes(parser)
        parser.add_argument("--unit", default=UNIT, help="LLaMA's sizes on the unit of 4 devices")
        parser.add_argument("--parts", default="placement,resources", help="of these two")

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (30.0 if args.quick else 60.0)
    rates = [float(r) for r in args.rates.split(",")]
    placements = PLACEMENTS if "placement" in args.parts else {}
    alphas = [f"{alpha:g}" for alpha in ALPHAS if "resources" in args.parts]
    with Sweep(args.processes) as sweep:
        results: dict[str, Rows] = {
            **sweep.over((placements, PLACED.rows, rates), partial(placed, seconds=seconds)),
            **sweep.over(
                (alphas, PARTS.rows, rates), partial(managed, sizes=args.unit, seconds=seconds)
            ),
        }
    outcome = {
        "placement_over_greedy": {n: most("muxserve", "greedy", results[n]) for n in placements},
        "compute_over_neither": {a: most("compute", "neither", results[a]) for a in alphas},
        "memory_over_compute": {a: most("both", "compute", results[a]) for a in alphas},
        "attainment_over_compute": {
            a: most_attained("both", "compute", results[a]) for a in alphas
        },
    }
    what = "req/s by rate; in SLO; worst"
    shown = [over_rates(f"placement, {name}: {what}", results[name]) for name in placements]
    shown += [over_rates(f"resource manager, power law {a}: {what}", results[a]) for a in alphas]
    ratios = Table("", "case", "ratio", "at rate", "attainment", title="mux_ablations")
    for key, by in outcome.items():
        for case, of in by.items():
            cells = (f"{of['ratio']:.2f}", f"{of['at_rate']:g}", f"{of['attainment_ratio']:.2f}")
            ratios.add_row(key, case, *cells)
    result = {**outcome, "unit": args.unit, "seconds": seconds, "rows": plain(results)}
    finish(args, "mux_ablations", result, Group(*shown, ratios))


if __name__ == "__main__":
    main()
