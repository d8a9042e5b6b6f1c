"""How much any arbiter could gain: the ten workloads with ample memory, and with an order of
compute that knows the future.

Per workload and rate, attainment in per cent of `balloon` and `prism` as they are (`now`, the
better), with eight times the memory (`ample`), with the best order of compute that knows arrivals
and lengths (`order`), and with both; and `bound`: the most that any schedule can attain, as some
requests must miss their first token's deadline. The bound relaxes the problem: memory is free,
prefills take their arithmetic alone, what another request's prompt began with is cached, and only
windows are counted in which requests must be prefilled that take longer than the window.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.core.cost import StepCosts
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import Kind, parse_kinds
from ballast.workload.workload import Workload
from benchmarks.arbiter_workloads import SLO, WORKLOADS, ArbiterWorkload
from benchmarks.clairvoyant import Future, orders
from benchmarks.common import finish, options

PRESETS = ("balloon", "prism")
AMPLE = 8
"""Times the memory of a device."""
RATES = (4.0, 8.0)
"""Requests per second of a device."""


def attained(of: ArbiterWorkload, work: Workload, preset: Preset, *, ample: bool = False) -> float:
    """Return the share of requests that attain their service levels under a preset."""
    kinds = parse_kinds(of.devices)
    if ample:
        kinds = [_with_memory(kind) for kind in kinds]
    slos = dict.fromkeys(of.names, SLO)
    ran = run_cluster(preset, kinds, of.specs(), work, slos)
    return float(ran.report.total.attained) / len(work.requests)


def _with_memory(kind: Kind) -> Kind:
    hardware = kind.profile.hardware
    assert hardware is not None, "kinds of the workloads say what memory they have"
    larger = hardware.model_copy(update={"memory_bytes": AMPLE * hardware.memory_bytes})
    return replace(kind, profile=kind.profile.on(larger))


def knowing(of: ArbiterWorkload, work: Workload) -> list[Preset]:
    """Return presets whose orders of compute know the future."""
    (kind,) = parse_kinds(of.devices)
    costs = dict(kind.of(of.specs()).lane_costs)
    future = Future(work, dict.fromkeys(of.names, SLO), costs)
    return [replace(resolve(name), compute=order) for name in PRESETS for order in orders(future)]


def bound(work: Workload, costs: dict[str, StepCosts], lanes: int, ttft: float) -> float:
    """Return the most that any schedule can attain, as a share of the requests.

    Requests that arrive within [a, b] must be prefilled within [a, b + ttft]; of those whose
    prefills take longer than that on all lanes, so many must miss as the excess contains the
    longest of them. Windows are chosen so that none shares a request with another.
    """
    seen: set[int] = set()
    seconds = []
    for r in work.requests:
        blocks = r.prefix_blocks or ()
        cached = 0
        for block in blocks:
            if block not in seen:
                break
            cached += r.block_tokens
        seen.update(blocks)
        seconds.append(max(1, r.prompt_tokens - cached) * costs[r.model].per_token)
    requests, most = work.requests, [0] * (len(seconds) + 1)
    for start in range(len(seconds) - 1, -1, -1):
        best, total, longest = most[start + 1], 0.0, 0.0
        for end in range(start, len(seconds)):
            total, longest = total + seconds[end], max(longest, seconds[end])
            excess = total - lanes * (requests[end].at + ttft - requests[start].at)
            if excess > 0:
                best = max(best, math.ceil(excess / longest) + most[end + 1])
        most[start] = best
    return 1.0 - most[0] / len(seconds)


def measure(name: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Return the figures of one workload, in per cent."""
    of = WORKLOADS[name]
    work = of.make(rate, seconds, seed)
    (kind,) = parse_kinds(of.devices)
    presets, informed = [resolve(p) for p in PRESETS], knowing(of, work)
    shares = {
        "now": max(attained(of, work, p) for p in presets),
        "ample": max(attained(of, work, p, ample=True) for p in presets),
        "order": max(attained(of, work, p) for p in informed),
        "both": max(attained(of, work, p, ample=True) for p in informed),
        "bound": bound(work, dict(kind.of(of.specs()).costs), kind.number, SLO.ttft),
    }
    return {what: 100 * share for what, share in shares.items()}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, by commas")
        parser.add_argument("--rates", default=",".join(f"{r:g}" for r in RATES))
        parser.add_argument("--seed", type=int, default=0)

    args = options(__doc__, argv, extra)
    seconds = 15.0 if args.quick else 60.0
    result: dict[str, Any] = {}
    columns = ("now", "ample", "order", "both", "bound")
    table = Table("workload", "rate", *columns, title="attainment, %")
    for name in args.only.split(","):
        for rate in map(float, args.rates.split(",")):
            found = measure(name, rate, seconds, args.seed)
            result[f"{name}.{rate:g}"] = found
            table.add_row(name, f"{rate:g}", *(f"{found[c]:.1f}" for c in columns))
    finish(args, "headroom", {"attainment": result}, table)


if __name__ == "__main__":
    main()
