"""How much any arbiter could gain: the ten workloads with ample memory, and with an order of
compute that knows the future.

Per workload and rate, attainment in per cent of `balloon` and `prism` as they are (`now`, the
better), with eight times the memory (`ample`), with the best order of compute that knows arrivals
and lengths (`order`), and with both; and `bound`: the most that any schedule can attain, as some
requests must miss the deadline of their first token or of their last one. The bound relaxes the
problem: memory is free, tokens take their arithmetic alone and no pass over weights, what another
request's prompt began with is cached, and only windows are counted in which there is more to do
than they are long.
`--quick`: 10 s of arrivals at one rate, `prism` alone, and two orders that know the future.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table

from ballast.bench.cluster_run import Estimates, run_cluster
from ballast.core.cost import StepCosts
from ballast.core.job import chunk_pairs
from ballast.core.settings import Slo
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import Kind, parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from ballast.workload.workload import Workload
from benchmarks.arbiter_workloads import SLO, WORKLOADS, ArbiterWorkload
from benchmarks.clairvoyant import Future, orders
from benchmarks.common import finish, options

PRESETS = ("balloon", "prism")
AMPLE = 8
"""Times the memory of a device."""
ROUNDING = 1e-9
"""Seconds by which sums of seconds may be off."""
RATES = (4.0, 8.0)
"""Requests per second of a device."""


def attained(
    of: ArbiterWorkload,
    work: Workload,
    preset: Preset,
    *,
    ample: bool = False,
    estimates: Estimates | None = None,
) -> float:
    """Return the share of requests that attain their service levels under a preset; `estimates`: in
    place of what it learns of the workload. Requests say nothing of how long their answers will be,
    as those of clients that give no bound."""
    kinds = parse_kinds(of.devices)
    if ample:
        kinds = [_with_memory(kind) for kind in kinds]
    slos = dict.fromkeys(of.names, SLO)
    ran = run_cluster(
        preset,
        kinds,
        of.specs(),
        work,
        slos,
        files=ClusterFiles(joints=of.links),
        estimates=estimates,
        open_ended=True,
    )
    return float(ran.report.total.attained) / len(work.requests)


def _with_memory(kind: Kind) -> Kind:
    hardware = kind.profile.hardware
    assert hardware is not None, "kinds of the workloads say what memory they have"
    larger = hardware.model_copy(update={"memory_bytes": AMPLE * hardware.memory_bytes})
    return replace(kind, profile=kind.profile.on(larger))


def knowing(
    of: ArbiterWorkload, work: Workload, presets: Sequence[str], *, quick: bool
) -> list[Preset]:
    """Return presets whose orders of compute know the future; `quick`: with two of these alone,
    one that knows lengths, and one that knows arrivals as well."""
    (kind,) = parse_kinds(of.devices)
    costs = dict(kind.of(of.specs()).lane_costs)
    future = Future(work, dict.fromkeys(of.names, SLO), costs)
    known = orders(future)
    chosen = (known[1], known[-2]) if quick else known
    return [replace(resolve(name), compute=order) for name in presets for order in chosen]


class Job(NamedTuple):
    """Work that has to be done within a time, or a request has missed its service level."""

    start: float
    due: float
    seconds: float
    """Of a lane, at least."""


def bound(work: Workload, costs: Mapping[str, StepCosts], lanes: int, slo: Slo) -> float:
    """Return the most that any schedule can attain, as a share of the requests: it has to prefill
    each in time for its first token, and to do all of its work in time for its last one."""
    seen: set[int] = set()
    prefills, answers = [], []
    for r in work.requests:
        cached = 0
        for block in r.prefix_blocks or ():
            if block not in seen:
                break
            cached += r.block_tokens
        seen.update(r.prefix_blocks or ())
        cost, cached = costs[r.model], min(cached, r.prompt_tokens - 1)
        tokens, more = r.prompt_tokens - cached, r.output_tokens - 1
        seconds = tokens * cost.per_token + chunk_pairs(tokens, cached) * cost.per_pair
        prefills.append(Job(r.at, r.at + slo.ttft, seconds))
        context = more * r.prompt_tokens + more * (more + 1) // 2
        seconds += more * cost.per_sequence + context * cost.per_context
        answers.append(Job(r.at, r.at + slo.ttft + more * slo.tpot, seconds))
    missed = max(unavoidable(prefills, lanes), unavoidable(answers, lanes))
    return 1.0 - missed / len(work.requests)


def unavoidable(jobs: Sequence[Job], lanes: int) -> int:
    """Return how many of some jobs, in order of their starts, any schedule must miss at least.

    Jobs that follow each other have to be done between the first start and the last deadline; if
    they take longer than that on all lanes, so many must miss as the excess contains the longest of
    them. Groups are chosen so that none shares a job with another.
    """
    most = [0] * (len(jobs) + 1)
    for start in range(len(jobs) - 1, -1, -1):
        best, total, longest, due = most[start + 1], 0.0, 0.0, -math.inf
        for end in range(start, len(jobs)):
            job = jobs[end]
            total, longest, due = total + job.seconds, max(longest, job.seconds), max(due, job.due)
            usable = min(lanes, end - start + 1) * (due - jobs[start].start)
            excess = total - usable - ROUNDING
            if excess > 0:
                best = max(best, math.ceil(excess / longest) + most[end + 1])
        most[start] = best
    return most[0]


def measure(seconds: float, seed: int, quick: bool, case: tuple[str, float]) -> dict[str, float]:
    """Return the figures of one workload at a rate, in per cent."""
    name, rate = case
    of = WORKLOADS[name]
    work = of.make(rate, seconds, seed)
    (kind,) = parse_kinds(of.devices)
    names = PRESETS[1:] if quick else PRESETS
    presets, informed = [resolve(p) for p in names], knowing(of, work, names, quick=quick)
    shares = {
        "now": max(attained(of, work, p) for p in presets),
        "ample": max(attained(of, work, p, ample=True) for p in presets),
        "order": max(attained(of, work, p) for p in informed),
        "both": max(attained(of, work, p, ample=True) for p in informed),
        "bound": bound(work, dict(kind.of(of.specs()).costs), kind.number, SLO),
    }
    return {what: 100 * share for what, share in shares.items()}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, by commas")
        parser.add_argument("--rates", default="", help="default: 4 and 8; with --quick 8")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--processes", type=int, default=2)

    args = options(__doc__, argv, extra)
    seconds = 10.0 if args.quick else 60.0
    rates = list(map(float, args.rates.split(","))) if args.rates else RATES[args.quick :]
    cases = [(name, rate) for name in args.only.split(",") for rate in rates]
    result: dict[str, Any] = {}
    columns = ("now", "ample", "order", "both", "bound")
    table = Table("workload", "rate", *columns, title="attainment, %")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        run = partial(measure, seconds, args.seed, args.quick)
        for (name, rate), found in zip(cases, pool.map(run, cases), strict=True):
            result[f"{name}.{rate:g}"] = found
            table.add_row(name, f"{rate:g}", *(f"{found[c]:.1f}" for c in columns))
            print(name, rate, found, flush=True)
    finish(args, "headroom", {"attainment": result}, table)


if __name__ == "__main__":
    main()
