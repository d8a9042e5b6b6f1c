"""MIRAGE's evaluation in virtual time: every number of its sections 7.2 to 7.6 beside ours.

GH200 of 96 GB, models C1 and C2 with the paper's fractions, arrivals of Azure's coding trace,
lengths like ShareGPT's and Alpaca's; costs by the roofline, nothing measured there. The text seldom
states rates: in each scenario they are multiples of the lowest power of two at which recomputation
preempts one request in a hundred. "No shortage" is recomputation on a device of twice the memory:
what no way of finding memory can beat. Then the same over links of 32 to 900 GB/s, and on an H100
with PCIe 5.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.mirage_cases import (
    GROUPS,
    METRICS,
    Case,
    Runs,
    in_group,
    measure,
    ratios,
    summaries,
)
from benchmarks.mirage_paper import CLAIMS, Claim
from benchmarks.mirage_setting import ARRIVALS, arrivals_in

TRACES = Path(__file__).resolve().parents[2] / "shared/traces"
WINDOW = 200.0, 40.0
"""Start and length of the trace's part, in seconds: 370 requests, bursts and lulls."""
QUICK_WINDOW = 180.0, 20.0
QUICK = "temporal_c2", "mps_c1", "alone"
MULTIPLES = 2.0, 8.0
"""Of the rate where recomputation begins to be short; there, next to nothing can be gained."""
SHORT_SHARE = 0.01
"""Of requests, when recomputation is short: so many are preempted."""
LEAST, MOST = -3, 8
"""Rates that are looked at: powers of 2, requests per second."""
LINKS = 32e9, 64e9, 128e9, 256e9, 450e9, 900e9
"""Nominal, bytes per second in one direction."""
OTHER = "H100-80G"
"""With its own memory and link."""
SWEPT = "temporal_c1", "mps_c1"
"""Groups that are run over all of them, at the middle one of their rates."""
READ_OTHERWISE = {
    "p99_tbt": ("p99_tpot", "per request"),
    "throughput": ("frame_throughput", "until the last arrival"),
}
"""What else the text may mean by a metric: P99 over requests of their mean gap; tokens in the time
in which requests come."""
Rates = Mapping[tuple[str, str], tuple[float, ...]]
"""Requests per second, by group and setting."""


def short_at(what: tuple[str, str], arrivals: Workload) -> float | None:
    """The rate where recomputation begins to be short of KV, of a group's setting; None: nowhere
    that was looked."""
    low, high = LEAST, MOST + 1
    while low < high:
        middle = (low + high) // 2
        told = measure(Case(*what, 2.0**middle, 0, "recompute"), arrivals)
        short = told["preemptions"] >= SHORT_SHARE * told["requests"]
        low, high = (low, middle) if short else (middle + 1, high)
    return 2.0**low if low <= MOST else None


def multiples(short: float | None, times: Iterable[float]) -> tuple[float, ...]:
    """The rates to run at, by where recomputation is short."""
    return (2.0**MOST,) if short is None else tuple(t * short for t in times)


def knee_of(group: str, setting: str) -> tuple[str, str]:
    """The group and setting whose rates it is run at."""
    return GROUPS[group].as_in or group, setting


def ours(runs: Runs, claim: Claim) -> dict[str, Any] | None:
    """What stands beside a claim, as ratios; None: it was not run."""
    own = in_group(runs, claim.group)

    def mean(of: str, metric: str, setting: str | None) -> float | None:
        chosen = {c: r for c, r in own.items() if setting in (None, c.setting)}
        found = ratios(chosen, of, claim.over, metric)
        if not found:
            return None
        least, most = min(found), max(found)
        return float(np.mean(found)) if not claim.best else least if claim.stated < 1 else most

    ratio = mean(claim.of, claim.metric, claim.setting)
    if ratio is None:
        return None
    told: dict[str, float | None] = {"ours": ratio}
    if claim.over == "recompute":
        told["no shortage"] = mean("ample", claim.metric, claim.setting)
        told["pool alone"] = mean("pooled", claim.metric, claim.setting)
        told["without pool"] = mean("unpooled", claim.metric, claim.setting)
    if claim.metric in READ_OTHERWISE:
        metric, name = READ_OTHERWISE[claim.metric]
        told[name] = mean(claim.of, metric, claim.setting)
    for setting in dict.fromkeys(c.setting for c in own):
        told[setting] = mean(claim.of, claim.metric, setting)
    return told


def change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def cases(groups: Iterable[str], rates: Rates, seeds: int) -> list[Case]:
    """Every run of these groups on GH200."""
    return [
        Case(name, setting, rate, seed, variant)
        for name in groups
        for setting in GROUPS[name].settings
        for rate in rates[name, setting]
        for seed in range(seeds)
        for variant in GROUPS[name].variants
    ]


def swept(rates: Rates) -> list[Case]:
    """The same models and requests over other links, and on an H100 with PCIe 5. Recomputation
    uses none once weights are there."""
    base = [
        Case(name, setting, of[len(of) // 2], 0, "recompute")
        for name in SWEPT
        for setting in GROUPS[name].settings
        for of in (rates[name, setting],)
    ]
    lending = [replace(c, variant="mirage") for c in base]
    there = [replace(c, link=link) for c in lending for link in LINKS]
    return [*base, *there, *(replace(c, kind=OTHER) for c in (*base, *lending))]


def links(runs: Runs) -> dict[str, Any]:
    """By group and device: mean ratios over recomputation."""
    told: dict[str, Any] = {}
    for name in SWEPT:
        for kind, link in dict.fromkeys((c.kind, c.link) for c in runs if c.variant == "mirage"):
            own = {
                replace(c, link=None): r
                for c, r in runs.items()
                if (c.group, c.kind) == (name, kind)
                and (c.variant == "recompute" or c.link == link)
            }
            where = kind if link is None else f"{kind} at {link / 1e9:g} GB/s"
            told.setdefault(name, {})[where] = {
                f"{m}_over_recompute": float(np.mean(ratios(own, "mirage", "recompute", m)))
                for m in METRICS
            }
    return told


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, default=TRACES, help="where Azure's trace lies")
        parser.add_argument("--only", nargs="+", choices=list(GROUPS), help="some groups")
        parser.add_argument("--seeds", type=int, default=1)
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--no-links", action="store_true", help="leave out the other links")

    args = options(__doc__, argv, extra)
    if not (args.traces / ARRIVALS).exists():
        sys.exit(f"{args.traces} has no {ARRIVALS}: say where Azure's coding trace is (--traces)")
    arrivals = arrivals_in(args.traces, *(QUICK_WINDOW if args.quick else WINDOW))
    groups = args.only or (QUICK if args.quick else tuple(GROUPS))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:

        def every(todo: Sequence[Case]) -> dict[Case, dict[str, float]]:
            found = pool.map(functools.partial(measure, arrivals=arrivals), todo)
            return dict(zip(todo, found, strict=True))

        seek = [(name, s) for name in groups for s in GROUPS[name].settings]
        sought = list(dict.fromkeys(knee_of(*what) for what in seek if not GROUPS[what[0]].rates))
        short = pool.map(functools.partial(short_at, arrivals=arrivals), sought)
        knees = dict(zip(sought, short, strict=True))
        times = MULTIPLES[-1:] if args.quick else MULTIPLES
        rates = {
            what: GROUPS[what[0]].rates or multiples(knees[knee_of(*what)], times) for what in seek
        }
        runs = every(cases(groups, rates, args.seeds))
        sweep = not (args.no_links or args.quick) and set(SWEPT) <= set(groups)
        other = every(swept(rates)) if sweep else {}
    result: dict[str, Any] = {
        "arrivals": arrivals.describe(),
        "short_at": {" ".join(what): rate for what, rate in knees.items()},
        "scenarios": summaries(runs),
        "links": links(other) if other else {},
        "paper": [],
    }
    table = Table("", "the paper says", "ours", "of it", title="MIRAGE in virtual time")
    for claim in CLAIMS:
        found = ours(runs, claim)
        if found is None:
            continue
        result["paper"].append(
            {"section": claim.section, "says": claim.says, "stated": claim.stated, **found}
        )
        first, *rest = (f"{name} {change(r)}" for name, r in found.items() if r is not None)
        table.add_row(claim.section, claim.says, first.removeprefix("ours "), "; ".join(rest))
    for group, by_link in result["links"].items():
        for link, r in by_link.items():
            row = ", ".join(f"{k.removesuffix('_over_recompute')} {v:.3f}" for k, v in r.items())
            table.add_row("", f"{group}, {link}: over recomputation", row, "")
    finish(args, "mirage_sim", result, table)


if __name__ == "__main__":
    main()
