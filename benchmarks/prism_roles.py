"""Disaggregated prefill beside mixed devices, in virtual time: four H100s, two models of 8B.

All devices serve both models, so rows differ in roles alone: four that do both; one or two that
compute prompts, the others what follows. Requests come in bursts (`prism_setting`), at several
sizes of clumps, with prompts and outputs longer than the Arena's. Levels are those of Prism's
section 7.4. KV moves over NVLink.

By row: parts of the requests with TTFT and TPOT in time, their P95, and how many went on elsewhere
with their KV.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.bench.report import RequestStats
from ballast.core.link import LinkRates
from ballast.sim.cluster import parse_kinds
from ballast.sim.cluster_files import ClusterFiles, GivenHomes
from ballast.sim.profile import device_profile
from ballast.sim.topology import ClusterLinks, PeerLinks
from benchmarks.common import finish, options
from benchmarks.prism_setting import DEVICE, Setting, counted, levels, preset_of

DEVICES = 4
ROWS = {
    "mixed": f"4x{DEVICE}",
    "1 prefills, 3 decode": f"1x{DEVICE}:prefill,3x{DEVICE}:decode",
    "2 prefill, 2 decode": f"2x{DEVICE}:prefill,2x{DEVICE}:decode",
}
SETTING = Setting(("Llama-3-8b", "Qwen3-8b"), seconds=20.0, longer=4.0, context=8192, warming=24)
"""All devices are asked for both models before what counts."""
CLUMPS = (16.0, 64.0)


@dataclass(frozen=True)
class Result:
    """One run; shares of the requests that count, and seconds."""

    ttft: float
    tpot: float
    ttft_p95: float
    tpot_p95: float
    requests: int
    moved: int


def joints() -> ClusterLinks:
    """One host, whose devices NVLink joins."""
    hardware = device_profile(DEVICE).hardware
    assert hardware is not None
    assert hardware.peer_bandwidth is not None
    port = LinkRates.even(hardware.peer_bandwidth)
    return ClusterLinks(per_host=DEVICES, peers=PeerLinks.NVLINK, port=port)


def measure(setting: Setting, row: str, seed: int) -> Result:
    """Run one row under `balloon`, in order of deadline."""
    slos = levels(setting, seed)
    served = [replace(s, slo=slos[s.name]) for s in setting.specs]
    homes: dict[str, list[int | str]] = {s.name: list(range(DEVICES)) for s in served}
    ran = run_cluster(
        preset_of("balloon"),
        parse_kinds(ROWS[row]),
        served,
        setting.workload(seed),
        slos,
        files=ClusterFiles(joints=joints(), homes=GivenHomes("all", homes)),
    )
    records = counted(ran.report)
    total = RequestStats.of(records, slos)
    p95 = {
        what: float(np.percentile([v for r in records if (v := getattr(r, what)) is not None], 95))
        for what in ("ttft", "tpot")
    }
    return Result(
        total.attained_ttft / total.requests,
        total.attained_tpot / total.requests,
        p95["ttft"],
        p95["tpot"],
        total.requests,
        ran.moved,
    )


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, help="of requests; default 20, quick 10")
        parser.add_argument("--seeds", type=int, help="default 2, quick 1")

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (10.0 if args.quick else 20.0)
    seeds = range(args.seeds or (1 if args.quick else 2))
    table = Table("", "clumps", "TTFT in time", "TPOT in time", "P95 TTFT", "P95 TPOT", "moved")
    result: dict[str, Any] = {"seconds": seconds, "seeds": len(seeds)}
    for clumps in CLUMPS:
        setting = replace(SETTING, seconds=seconds, clumps=clumps)
        for row in ROWS:
            of = [measure(setting, row, seed) for seed in seeds]
            table.add_row(
                row,
                f"{clumps:g} x",
                f"{fmean(r.ttft for r in of):.1%}",
                f"{fmean(r.tpot for r in of):.1%}",
                f"{1e3 * fmean(r.ttft_p95 for r in of):.0f} ms",
                f"{1e3 * fmean(r.tpot_p95 for r in of):.1f} ms",
                f"{fmean(r.moved for r in of):.0f} of {fmean(r.requests for r in of):.0f}",
            )
            result.setdefault(row, {})[f"{clumps:g}"] = [asdict(r) for r in of]
    finish(args, "prism_roles", result, table)


if __name__ == "__main__":
    main()
