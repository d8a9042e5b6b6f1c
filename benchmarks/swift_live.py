"""SwiftCache on two CPU devices: long conversations beside a neighbour that has memory to spare.

Two random Llamas in bfloat16, a worker process each. The first has conversations whose KV is more
than its device holds, the second short requests and room. Links have a pace: the host link by the
paper's ratio of computing a token to fetching its KV (LWM on an H20, PCIe 32 GB/s), shared by both
devices; the link between devices by NVLink's over PCIe's (200 over 32 GB/s), and 1/4 to 4 times it.
On two cores both devices share the memory's bandwidth, whatever the links' pace.

Rows, in turns, with the same requests and settings but for the policies and tiers that they are:
`swiftcache`; `unlent`, the same without lending; `offload`, `balloon` with KV blocks kept on the
host (as LMCache, HiCache); `none`, `balloon` without; `chunks`, that in smaller chunks.

Conversations are drawn, or with `--trace` sessions of a trace (Mooncake's, or of coding agents),
with lengths scaled to the context; the second model's requests are always drawn.

- `p99_ttft_over_offload`: of the conversations (the paper: 0.31 to 0.46).
- `lender_slowdown`: median TPOT of the second model over `unlent`, less 1 (goal 0.05).
- `swept`: the first, by the pace of the link between devices.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.record import RequestRecord
from ballast.bench.servers import ServersRun, run_servers
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.link import LinkSettings
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import GiB, KiB
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, interleave, options
from benchmarks.exactness import make_llama

LONG, SHORT = "long", "short"
CONTEXT = 4096
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT,
}
COMPUTE_OVER_FETCH = 6.9
"""Prefill seconds of a token of LWM on an H20 (13.5 GFLOP at 120 TFLOPS) over those of fetching its
0.5 MiB of KV at 32 GB/s."""
NVLINK_OVER_PCIE = 200 / 32
SESSIONS, FIT = 8, 3
"""Conversations, and how many of them the first device's KV memory holds."""
HISTORY = 1500
"""Tokens of a conversation, on average."""
STEP, CHUNK = 512, 128
SLOS = {LONG: Slo(ttft=2.0, tpot=0.2), SHORT: Slo(ttft=1.0, tpot=0.2)}


@dataclass(frozen=True)
class Row:
    """What a row has of its own; everything else is alike."""

    preset: str
    placement: str = "work"
    offload: bool = False
    step_tokens: int = STEP


ROWS = {
    "swiftcache": Row("swiftcache", "swiftcache"),
    "unlent": Row("swiftcache"),
    "offload": Row("balloon", offload=True),
    "none": Row("balloon"),
    "chunks": Row("balloon", step_tokens=CHUNK),
}


@dataclass(frozen=True)
class Setting:
    """Models, budgets and paces."""

    models: tuple[ModelSettings, ...]
    budgets: tuple[int, int]
    page: int
    host: float
    """Bytes per second of the host link."""
    host_bytes: int

    def fleet(self, row: Row, peer: float = 1.0) -> FleetSettings:
        """`peer`: factor on the pace of the link between devices."""
        first, second = (
            DeviceSettings(
                name=f"cpu:{i}",
                budget_bytes=budget,
                page_bytes=self.page,
                step_tokens=row.step_tokens,
                threads=1,
            )
            for i, budget in enumerate(self.budgets)
        )
        link = LinkSettings(
            bytes_per_second=self.host,
            shared=True,
            peer_bytes_per_second=self.host * NVLINK_OVER_PCIE * peer,
        )
        return FleetSettings(
            models=self.models,
            device=first,
            others=(second,),
            link=link,
            other_links=(replace(link, device=second.name),),
            preset=row.preset,
            placement=row.placement,
            kv=KvTierSettings(host_bytes=self.host_bytes if row.offload else 0),
        )


def prepare(scratch: Path) -> Setting:
    """Make the models, and measure what a token's prefill takes."""
    models = tuple(
        ModelSettings(
            name=name,
            path=str(make_llama(scratch / name, seed, **LLAMA)),
            dtype="bfloat16",
            max_model_len=CONTEXT,
            devices=(f"cpu:{seed}",),
        )
        for seed, name in enumerate((LONG, SHORT))
    )
    page = 256 * KiB
    device = DeviceSettings(budget_bytes=2 * GiB, page_bytes=page, step_tokens=STEP, threads=1)
    alone = FleetSettings(models=(replace(models[0], devices=()),), device=device)
    with InProcess(alone) as server:
        state = server.device.state
        m = state.models[LONG]
        seconds = min(_prefill_seconds(server, seed) for seed in range(3))
        pages = state.arena.pages + m.weights.pages
        token = m.spec.kv_bytes_per_token
    conversation = -(-HISTORY * token // page)
    own, lender = pages + FIT * conversation, pages + SESSIONS * conversation
    host = COMPUTE_OVER_FETCH * token * HISTORY / seconds
    kept = 2 * SESSIONS * conversation * page
    return Setting(models, (own * page, lender * page), page, host, kept)


def _prefill_seconds(server: InProcess, seed: int) -> float:
    prompt = tuple(random.Random(seed).choices(range(10, 90), k=HISTORY))
    name = f"prefill-{seed}"
    began = server.device.clock.now()
    server.generate([Submission(id=name, model=LONG, prompt=prompt, max_tokens=1)])
    return server.device.clock.now() - began


def conversations(seconds: float, rate: float, seed: int) -> list[WorkloadRequest]:
    """Turns of `SESSIONS` conversations at random, after a first one of each."""
    rng = random.Random(seed)
    lengths = [rng.randrange(HISTORY // 2, 3 * HISTORY // 2) for _ in range(SESSIONS)]
    found: list[WorkloadRequest] = []
    at = 0.0
    while at < seconds:
        session = len(found) if len(found) < SESSIONS else rng.randrange(SESSIONS)
        lengths[session] = min(CONTEXT - 64, lengths[session] + rng.randrange(16, 96))
        blocks = tuple(session * CONTEXT + i for i in range(lengths[session] // 16))
        found.append(
            WorkloadRequest(
                id=len(found),
                at=at,
                model=LONG,
                prompt_tokens=lengths[session],
                output_tokens=16,
                session=f"{session}",
                prefix_blocks=blocks,
                block_tokens=16,
            )
        )
        at += rng.expovariate(rate)
    return found


def traced(path: Path, seconds: float, rate: float) -> list[WorkloadRequest]:
    """The trace's first requests that belong to a conversation, with lengths scaled to `HISTORY` on
    average and times to the rate."""
    trace = load_trace(path)
    mean = statistics.mean(r.prompt_tokens for r in trace.requests[:2000])
    n = max(2, int(seconds * rate))
    work = trace.first(n).scale_lengths(HISTORY / mean, 0.05, CONTEXT - 64, 16)
    last = max(r.at for r in work.requests) or 1.0
    return [replace(r, model=LONG, at=r.at * seconds / last) for r in work.requests]


def workload(args: argparse.Namespace, seconds: float, seed: int) -> Workload:
    rng = random.Random(seed)
    short: list[WorkloadRequest] = []
    at = 0.0
    while (at := at + rng.expovariate(args.rate)) < seconds:
        short.append(
            WorkloadRequest(
                id=len(short),
                at=at,
                model=SHORT,
                prompt_tokens=rng.randrange(32, 128),
                output_tokens=24,
            )
        )
    if args.trace is None:
        long = conversations(seconds, args.rate, seed)
    else:
        long = traced(args.trace, seconds, args.rate)
    source = "drawn" if args.trace is None else str(args.trace.name)
    return Workload.merge(
        "conversations", [Workload.of("long", long, source), Workload.of("short", short, "drawn")]
    )


def run(setting: Setting, row: str, work: Workload, peer: float = 1.0) -> ServersRun:
    return asyncio.run(run_servers([setting.fleet(ROWS[row], peer)], work, SLOS, name=row))


def p99(runs: Sequence[ServersRun], model: str = LONG) -> float:
    """99th percentile of TTFT over all runs, without each conversation's first turn."""
    times = [r.ttft for r in later(runs, model) if r.ttft is not None]
    return float(np.percentile(times, 99))


def later(runs: Sequence[ServersRun], model: str) -> list[RequestRecord]:
    found = []
    for ran in runs:
        records = sorted((r for r in ran.report.records if r.model == model), key=lambda r: r.at)
        found += records[SESSIONS if model == LONG else 0 :]
    return found


def tpot(runs: Sequence[ServersRun]) -> float:
    return statistics.median(r.tpot for r in later(runs, SHORT) if r.tpot is not None)


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=Path, help="sessions of this trace, scaled")
        parser.add_argument("--rate", type=float, default=1.5, help="requests per second, each")
        parser.add_argument("--seconds", type=float, help="of each run")

    args = options(__doc__, extra=extra)
    seconds = args.seconds or (20.0 if args.quick else 90.0)
    rounds = 1 if args.quick else 3
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch))
        seen: dict[str, list[ServersRun]] = {row: [] for row in ROWS}

        def once(row: str) -> float:
            seen[row].append(run(setting, row, workload(args, seconds, len(seen[row]))))
            return p99(seen[row])

        run(setting, "swiftcache", workload(args, 5.0, 0))  # kernels are compiled and chosen
        interleave({row: partial(once, row) for row in ROWS}, rounds)
        swept = {
            f"{factor:g}": p99([run(setting, "swiftcache", workload(args, seconds, 0), factor)])
            for factor in (() if args.quick else (0.25, 0.5, 2.0, 4.0))
        }
    offload = p99(seen["offload"])
    result = {
        "rows": {row: summary(runs) for row, runs in seen.items()},
        "p99_ttft_over_offload": p99(seen["swiftcache"]) / offload,
        "lender_slowdown": tpot(seen["swiftcache"]) / tpot(seen["unlent"]) - 1,
        "swept": {factor: value / offload for factor, value in swept.items()},
        "host_bytes_per_second": setting.host,
        "peer_bytes_per_second": setting.host * NVLINK_OVER_PCIE,
    }
    finish(args, "swift_live", result, drawn(result))


def summary(runs: Sequence[ServersRun]) -> dict[str, Any]:
    own = later(runs, LONG)
    times = [r.ttft for r in own if r.ttft is not None]
    moves = [m for ran in runs for m in ran.moves if "refused" not in m]
    return {
        "p50_ttft": statistics.median(times),
        "p99_ttft": p99(runs),
        "cached": sum(r.cached_tokens for r in own) / sum(r.prompt_tokens for r in own),
        "short_tpot": tpot(runs),
        "failed": sum(r.error is not None for ran in runs for r in ran.report.records),
        "lent_pages": sum(m["pages"] for m in moves if m["action"] == "LendPages"),
    }


def drawn(result: dict[str, Any]) -> Table:
    table = Table("row", "P50 TTFT", "P99", "cached", "short TPOT", "failed", "lent pages")
    for row, found in result["rows"].items():
        cells = (f"{found[c]:.3f}" for c in ("p50_ttft", "p99_ttft", "cached", "short_tpot"))
        table.add_row(row, *cells, str(found["failed"]), str(found["lent_pages"]))
    ratio, slowdown = result["p99_ttft_over_offload"], result["lender_slowdown"]
    table.caption = f"P99 over offload {ratio:.2f} (goal 0.46), lender {slowdown:+.1%} (5%)"
    return table


if __name__ == "__main__":
    main()
