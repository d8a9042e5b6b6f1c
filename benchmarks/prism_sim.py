"""Prism's settings in virtual time (section 7.2): eight models on two H100s, 18 on one to eight.

Bursty groups of requests with the statistics that appendix A.1 states, as the paper's traces are
not public; models of 1B to 14B, as few devices hold. Service levels are the P95 of each model alone
on a device of its own, TTFT times 5, TPOT times 2, both times `--scale`. What a preset has of its
own is on; options that several have are equal. All rows have the same devices, one lane, and
requests, and begin with the same placement, by weights alone: nobody knows what will be asked.
`prism` alone moves models.

`devices_prism`, `devices_static` and the others: the fewest devices on which TTFT and TPOT are in
time for 99 % of the requests each, mean over seeds (None: eight are not enough for one of them),
with the least and the most. Of eight models on two devices: the lower of both attainments, by
clumps of requests, 1 to 8 times as large, and the largest factor up to which 99 % are in time.
Before all that counts every model is asked once, so that none is brought in for the first time.
`prism, 45 s` evicts models that nobody has asked for 45 s, beside by need, as the paper does (A.4);
`prism, by weights` leaves models where they are; `balloon` has neither queue.

The paper states four and five devices where no other system attains 99 % with eight (18 models).
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from ballast.bench.clusters import run_cluster
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report, Served
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.catalogue import facts
from ballast.sim.cluster import kinds_of
from ballast.sim.given import Given, GivenHomes
from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.rate_curves import Curve

DEVICE = "H100-80G"
MOST_DEVICES = 8
CONTEXT = 4096
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
TARGET = 0.99
IDLE = 45.0
"""Seconds without a request, Prism's threshold."""
EIGHT = (
    "Llama-3.2-3b",
    "Qwen3-8b",
    "Llama-3.2-1b",
    "Llama-3-8b",
    "Qwen2.5-3b",
    "Qwen2.5-7b",
    "Qwen3-4b",
    "Qwen3-14b",
)
"""The most popular first."""
EIGHTEEN = (
    *("Qwen3-8b", "Llama-3.2-3b", "Llama-3-8b", "Qwen2.5-7b", "Llama-3.2-1b", "Qwen3-4b"),
    *("Qwen2.5-3b", "Qwen3-1.7b", "Llama-3.2-3b") * 2,
    *("Qwen2.5-7b", "Llama-3-8b", "Qwen3-8b", "Llama-3.2-1b", "Qwen3-4b", "Llama-3.2-3b"),
)
COMPARED = Comparison(
    {},
    {
        "static": Contender("static+deadline"),
        "recompute": Contender("recompute+deadline"),
        "swap": Contender("swap+deadline"),
        "balloon": Contender("balloon"),
        "prism": Contender("prism"),
        "prism, 45 s": Contender("prism", ablates="prism"),
        "prism, by weights": Contender("prism", ablates="prism"),
    },
)
MOVING = ("prism", "prism, 45 s")
"""Rows whose models migrate; all begin as `weights` places them."""
FACTORS = (1.0, 2.0, 4.0, 8.0)
"""On the requests of a clump."""
CLUMP = 3.0
WARM_UP, WARMING = 60.0, 2.0
"""Seconds before the requests that count, and between two that bring one model each."""


def specs(likes: Sequence[str]) -> list[ModelSpec]:
    """Models by number; those of one architecture are fine-tunes with weights of their own."""
    found = []
    for i, like in enumerate(likes):
        spec = facts(like).spec(max_model_len=CONTEXT, fingerprint=f"{like}-{i}")
        found.append(replace(spec, name=f"m{i:02}-{like}"))
    return found


def workload(likes: Sequence[str], factor: float, seconds: float, seed: int) -> Workload:
    """The same models are in use at the same times whatever the factor."""
    knobs = BurstyGroups(clump_requests=CLUMP * factor)
    names = [spec.name for spec in specs(likes)]
    work = bursty_groups(names, seconds, groups=knobs, seed=seed)
    requests = (replace(r, prompt_tokens=min(r.prompt_tokens, CONTEXT // 2)) for r in work.requests)
    most = [
        replace(r, at=r.at + WARM_UP, output_tokens=min(r.output_tokens, CONTEXT // 2))
        for r in requests
    ]
    first = len(most)
    warming = [
        WorkloadRequest(id=first + i, at=i * WARMING, model=n, prompt_tokens=16, output_tokens=2)
        for i, n in enumerate(names)
    ]
    return Workload.of(work.name, [*warming, *most], work.source, work.labels)


def counted(report: Report) -> list[RequestRecord]:
    """All requests but those of the warm-up."""
    return [r for r in report.records if r.at >= WARM_UP]


@cache
def levels(likes: tuple[str, ...], seconds: float, seed: int, scale: float) -> dict[str, Slo]:
    """P95 of each model on a device of its own, scaled; of all where it has no requests. `scale`:
    on top of `TTFT_SCALE` and `TPOT_SCALE`."""
    served = specs(likes)
    work = workload(likes, 1.0, seconds, seed)
    homes: dict[str, list[int | str]] = {s.name: [i] for i, s in enumerate(served)}
    ran = run_cluster(
        resolve("static"),
        kinds_of(f"{len(served)}x{DEVICE}"),
        served,
        work,
        {s.name: Slo() for s in served},
        given=Given(homes=GivenHomes("alone", homes)),
    )
    records = [r for r in counted(ran.report) if r.answered]

    def p95(name: str, what: str) -> float:
        own = [v for r in records if r.model == name and (v := getattr(r, what)) is not None]
        every = [v for r in records if (v := getattr(r, what)) is not None]
        return float(np.percentile(own or every, 95))

    return {
        s.name: Slo(
            ttft=scale * TTFT_SCALE * p95(s.name, "ttft"),
            tpot=scale * TPOT_SCALE * p95(s.name, "tpot"),
        )
        for s in served
    }


@dataclass(frozen=True)
class Result:
    """One run."""

    ttft: float
    """Share of the requests with their first token in time."""
    tpot: float
    worst: float
    """Attainment of the model served worst."""
    requests: int
    activations: int
    preemptions: int
    moves: int

    @property
    def both(self) -> float:
        return min(self.ttft, self.tpot)


def measure(
    likes: tuple[str, ...],
    row: str,
    devices: int,
    factor: float,
    seconds: float,
    seed: int,
    scale: float = 1.0,
) -> Result:
    slos = levels(likes, seconds, seed, scale)
    ttl = IDLE if row == "prism, 45 s" else None
    served = [replace(s, slo=slos[s.name], ttl=ttl) for s in specs(likes)]
    placement = "kvpr" if row in MOVING else "weights"
    preset = resolve(COMPARED.rows[row].preset, COMPARED.options(row), placement=placement)
    work = workload(likes, factor, seconds, seed)
    ran = run_cluster(preset, kinds_of(f"{devices}x{DEVICE}"), served, work, slos)
    records = counted(ran.report)
    total = Served.of(records, slos)
    by_model = (Served.of([r for r in records if r.model == s.name], slos) for s in served)
    return Result(
        total.attained_ttft / total.requests,
        total.attained_tpot / total.requests,
        min(of.attainment for of in by_model),
        total.requests,
        ran.total("activations"),
        ran.total("preemptions"),
        ran.placed,
    )


def fewest(
    row: str, seconds: float, seed: int, scale: float
) -> tuple[int | None, dict[int, Result]]:
    """Devices with which TTFT and TPOT are in time for 99 % each, and all that was tried."""
    tried: dict[int, Result] = {}

    def enough(n: int) -> bool:
        tried[n] = measure(EIGHTEEN, row, n, 1.0, seconds, seed, scale)
        return tried[n].both >= TARGET

    low, high = 0, MOST_DEVICES
    if not enough(high):
        return None, tried
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, tried


def told_of(found: Sequence[int | None]) -> dict[str, Any]:
    """Of one row, over seeds."""
    known = [n for n in found if n is not None]
    if len(known) < len(found):
        return {"mean": None, "least": min(known, default=None), "most": None}
    return {"mean": fmean(known), "least": min(known), "most": max(known)}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, help="of requests; default 600, quick 300")
        parser.add_argument("--seeds", type=int, help="default 5, quick 2")
        parser.add_argument("--scale", type=float, default=1.0, help="of all service levels")
        parser.add_argument("--processes", type=int, default=2)

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (300.0 if args.quick else 600.0)
    seeds = range(args.seeds or (2 if args.quick else 5))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        coming = {
            row: [pool.submit(fewest, row, seconds, s, args.scale) for s in seeds]
            for row in COMPARED.rows
        }
        curves = {
            row: {
                f: pool.submit(measure, EIGHT, row, 2, f, seconds, 0, args.scale) for f in FACTORS
            }
            for row in COMPARED.rows
        }
        found = {row: [c.result() for c in of] for row, of in coming.items()}
        eight = {row: {f: c.result() for f, c in by.items()} for row, by in curves.items()}
    devices = {row: told_of([n for n, _ in of]) for row, of in found.items()}
    table = Table(
        "", "devices for 99 %", "from - to", "TTFT with 8", "TPOT with 8", title="18 models"
    )
    for row, of in found.items():
        told = devices[row]
        at_most = [tried[MOST_DEVICES] for _, tried in of]
        mean = "over 8" if told["mean"] is None else f"{told['mean']:.1f}"
        spread = f"{told['least']} - {told['most'] or 'over 8'}"
        shown = (f"{fmean(getattr(r, what) for r in at_most):.1%}" for what in ("ttft", "tpot"))
        table.add_row(row, mean, spread, *shown)
    columns = (*(f"{f:g} x" for f in FACTORS), "99 % up to")
    curve = Table("", *columns, title="eight models on two devices: in time; moves")
    at = {
        row: Curve({f: r.both for f, r in by.items()}).rate_at(TARGET) for row, by in eight.items()
    }
    for row, by in eight.items():
        curve.add_row(row, *(f"{r.both:.1%}; {r.moves}" for r in by.values()), f"{at[row]:.2f} x")
    result = {
        **{
            f"devices_{row.replace(', ', '_').replace(' ', '_')}": of["mean"]
            for row, of in devices.items()
        },
        "devices": devices,
        "factor_at_99": at,
        "seconds": seconds,
        "scale": args.scale,
        "seeds": len(seeds),
        "eighteen": {row: [_tried(t) for _, t in of] for row, of in found.items()},
        "eight": {row: _tried(by) for row, by in eight.items()},
    }
    finish(args, "prism_sim", result, Group(table, curve))


def _tried(results: Mapping[Any, Result]) -> dict[str, Any]:
    return {f"{key:g}": asdict(r) for key, r in sorted(results.items())}


if __name__ == "__main__":
    main()
