"""SwiftCache on two CPU devices: long conversations beside a neighbour that has memory to spare.

Two random Llamas in bfloat16, a worker process each. The first has conversations whose KV is more
than its device holds, the second short requests and room. Links have a pace: the host link by the
paper's ratio of computing a token to fetching its KV (LWM on an H20, PCIe 32 GB/s), shared by both
devices; the link between devices by NVLink's over PCIe's (200 over 32 GB/s), and 1/4 to 4 times it.
On two cores both devices share the memory's bandwidth, whatever the links' pace. What a prefill
takes is measured in processor time, so that a busy machine makes no link slower.

Rows, in turns, with the same requests and settings but for the policies and tiers that they are:
`swiftcache`; `unlent`, the same without lending; `offload`, `balloon` with KV blocks kept on the
host (as LMCache, HiCache); `none`, `balloon` without. `--copied`: also a row `copied`, `swiftcache`
whose passes read copies of borrowed KV, which the link between devices brings through two slots of
a layer each, as in the paper; elsewhere they read it where it is mapped, and the link has its pace.
The slots are part of the first device's memory. (`--quick`: one round of 20 s of each, four
minutes; else two rounds of 45 s, and the sweep: thirteen minutes. First turns, 20 s, and starts of
workers come before these.)

Conversations are drawn, or with `--trace` sessions of a trace (Mooncake's, or of coding agents),
with lengths scaled to the context, and requests of the first 20 s left out; the second model's
requests are always drawn.

- `p99_ttft_over_host_offload`: of the conversations (the paper: 0.31 to 0.46).
- `lender_slowdown`: median TPOT of the second model over `unlent`, less 1 (goal 0.05).
- `transfer_hidden`: of what the link between devices carried for passes that took as long, the part
  for which they did not wait (goal 0.95).
- `copied_over_in_place`: P99 TTFT of `copied` over that of `swiftcache`.
- `breakdown`: of `swiftcache` and `offload`, the phases of prefills (`swift_phases`), as parts;
  `overlapped`: what passes wait for links; and P99 of a request's load and store.
- `swept`: the first, with the link between devices 1/4 and 4 times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.progress import shown
from ballast.bench.record import RequestRecord
from ballast.bench.servers import ServersRun, run_servers
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.link import LinkSettings
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import GiB, KiB, ceil_div
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, interleave, options
from benchmarks.exactness import make_llama
from benchmarks.swift_phases import Phases, entries_of, phases

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
FIRST, APART = 2, 1.25
"""Turns of each conversation that are served before any is measured, as in the paper, and seconds
between them: the fleet policy, which looks once a second, sees each."""
BEGINS = FIRST * SESSIONS * APART
"""Seconds after which requests count."""
LOAD = 0.4
"""Requests per second times the seconds in which a whole history is computed, for each model."""
STEP = 512
SLOS = {LONG: Slo(ttft=2.0, tpot=0.2), SHORT: Slo(ttft=1.0, tpot=0.2)}


@dataclass(frozen=True)
class Row:
    """What a row has of its own; everything else is alike."""

    preset: str
    placement: str = "work"
    offload: bool = False
    copied: bool = False


ROWS = {
    "swiftcache": Row("swiftcache", "swiftcache"),
    "unlent": Row("swiftcache"),
    "offload": Row("balloon", offload=True),
    "none": Row("balloon"),
}
COPIED = {"copied": Row("swiftcache", "swiftcache", copied=True)}
MOVING = ("swiftcache", "copied", "offload")
"""Rows in which KV crosses a link."""
SWEPT = (0.25, 4.0)


@dataclass(frozen=True)
class Setting:
    """Models, budgets and paces."""

    models: tuple[ModelSettings, ...]
    budgets: tuple[int, int]
    page: int
    host: float
    """Bytes per second of the host link."""
    host_bytes: int
    block_bytes: int
    slots: int = 0
    """Bytes in which `copied` reads borrowed KV: two layers of the longest context."""
    rate: float = 1.0
    """Requests per second of each model."""

    def fleet(self, row: Row, story: Path, peer: float = 1.0) -> FleetSettings:
        """`peer`: factor on the pace of the link between devices."""
        slots = self.slots if row.copied else 0
        budgets = self.budgets[0] - ceil_div(slots, self.page) * self.page, self.budgets[1]
        first, second = (
            DeviceSettings(
                name=f"cpu:{i}",
                budget_bytes=budget,
                page_bytes=self.page,
                step_tokens=STEP,
                threads=1,
            )
            for i, budget in enumerate(budgets)
        )
        link = LinkSettings(
            bytes_per_second=self.host,
            shared=True,
            peer_bytes_per_second=self.host * NVLINK_OVER_PCIE * peer,
            peer_slot_bytes=slots,
        )
        return FleetSettings(
            models=self.models,
            device=first,
            others=(second,),
            link=link,
            other_links=(replace(link, device=second.name, peer_slot_bytes=0),),
            preset=row.preset,
            placement=row.placement,
            kv=KvTierSettings(host_bytes=self.host_bytes if row.offload else 0),
            story_path=str(story),
        )


def prepare(scratch: Path) -> Setting:
    """Make the models, and measure what the prefill of a history takes."""
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
    budgets = own * page, lender * page
    rate = LOAD / seconds
    slots = 2 * CONTEXT * token // LLAMA["num_hidden_layers"]
    return Setting(models, budgets, page, host, kept, m.spec.block_bytes, slots, rate)


def _prefill_seconds(server: InProcess, seed: int) -> float:
    prompt = tuple(random.Random(seed).choices(range(10, 90), k=HISTORY))
    name = f"prefill-{seed}"
    began = time.process_time()  # a lane of one thread: all others wait
    server.generate([Submission(id=name, model=LONG, prompt=prompt, max_tokens=1)])
    return time.process_time() - began


def conversations(seconds: float, rate: float, seed: int) -> list[WorkloadRequest]:
    """Turns of `SESSIONS` conversations at random, after `FIRST` turns of each in order."""
    rng = random.Random(seed)
    lengths = [rng.randrange(HISTORY // 2, 3 * HISTORY // 2) for _ in range(SESSIONS)]
    found: list[WorkloadRequest] = []
    at = 0.0
    while at < seconds:
        first = len(found) < FIRST * SESSIONS
        session = len(found) % SESSIONS if first else rng.randrange(SESSIONS)
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
        at += APART if first else rng.expovariate(rate)
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


def workload(args: argparse.Namespace, rate: float, seconds: float, seed: int) -> Workload:
    """The requests of `seconds`, after first turns."""
    seconds += BEGINS
    rng = random.Random(seed)
    short: list[WorkloadRequest] = []
    at = 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
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
        long = conversations(seconds, rate, seed)
    else:
        long = traced(args.trace, seconds, rate)
    source = "drawn" if args.trace is None else str(args.trace.name)
    return Workload.merge(
        "conversations", [Workload.of("long", long, source), Workload.of("short", short, "drawn")]
    )


@dataclass(frozen=True)
class Ran:
    """One run of a row."""

    servers: ServersRun
    phases: Phases
    """Of the conversations' model."""


def run(setting: Setting, row: str, work: Workload, scratch: Path, peer: float = 1.0) -> Ran:
    story = scratch / "story.jsonl"
    fleet = setting.fleet((ROWS | COPIED)[row], story, peer)
    ran = asyncio.run(run_servers([fleet], work, SLOS, name=row))
    found = phases(entries_of(story), LONG, setting.block_bytes / setting.host)
    story.unlink()
    return Ran(ran, found)


def p99(runs: Sequence[Ran]) -> float | None:
    """99th percentile of the conversations' TTFT over all runs, without each one's first turns;
    None where some were not answered."""
    records = later(runs, LONG)
    times = [r.ttft for r in records if r.answered and r.ttft is not None]
    return float(np.percentile(times, 99)) if times and len(times) == len(records) else None


def later(runs: Sequence[Ran], model: str) -> list[RequestRecord]:
    """Requests of a model that count."""
    records = (r for ran in runs for r in ran.servers.report.records)
    return [r for r in records if r.model == model and r.at >= BEGINS]


def tpot(runs: Sequence[Ran]) -> float | None:
    return median(r.tpot for r in later(runs, SHORT))


def median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=Path, help="sessions of this trace, scaled")
        parser.add_argument("--rate", type=float, help="requests per second, each")
        parser.add_argument("--seconds", type=float, help="of each run")
        parser.add_argument("--copied", action="store_true", help="also the row `copied`")

    args = options(__doc__, extra=extra)
    seconds, rounds = args.seconds or (20.0 if args.quick else 45.0), 1 if args.quick else 2
    with tempfile.TemporaryDirectory() as directory, shown() as progress:
        scratch = Path(directory)
        setting = prepare(scratch)
        rate = args.rate or setting.rate
        rows = ROWS | COPIED if args.copied else ROWS
        seen: dict[str, list[Ran]] = {row: [] for row in rows}

        def once(row: str) -> float:
            work = workload(args, rate, seconds, len(seen[row]))
            seen[row].append(run(setting, row, work, scratch))
            progress("runs", sum(map(len, seen.values())), rounds * len(rows))
            return 0.0

        run(
            setting, "swiftcache", workload(args, rate, 0.0, 0), scratch
        )  # kernels are compiled, chosen
        interleave({row: partial(once, row) for row in rows}, rounds)
        swept = {
            f"{f:g}": [run(setting, "swiftcache", workload(args, rate, seconds, 0), scratch, f)]
            for f in (() if args.quick else SWEPT)
        }
    offload = p99(seen["offload"])
    totals = {row: sum((r.phases for r in runs), Phases()) for row, runs in seen.items()}
    result = {
        "rows": {row: summary(runs) for row, runs in seen.items()},
        "p99_ttft_over_host_offload": over(p99(seen["swiftcache"]), offload),
        "lender_slowdown": over(tpot(seen["swiftcache"]), tpot(seen["unlent"]), less=1.0),
        "transfer_hidden": totals["swiftcache"].hidden,
        "copied_over_in_place": over(p99(seen.get("copied", ())), p99(seen["swiftcache"])),
        "breakdown": {r: t.measured() for r, t in totals.items() if r in MOVING},
        "swept": {
            factor: over(p99(runs), p99(seen["offload"][:1])) for factor, runs in swept.items()
        },
        "requests_per_second": rate,
        "host_bytes_per_second": setting.host,
        "peer_bytes_per_second": setting.host * NVLINK_OVER_PCIE,
    }
    finish(args, "swift_live", result, drawn(result))


def over(value: float | None, base: float | None, less: float = 0.0) -> float | None:
    """A ratio, less a number; None where nothing was answered."""
    return None if value is None or not base else value / base - less


def summary(runs: Sequence[Ran]) -> dict[str, Any]:
    own = later(runs, LONG)
    moves = [m for ran in runs for m in ran.servers.moves if "refused" not in m]
    errors = [r.error for ran in runs for r in ran.servers.report.records if r.error is not None]
    return {
        "p50_ttft": median(r.ttft for r in own),
        "p99_ttft": p99(runs),
        "cached": sum(r.cached_tokens for r in own) / max(1, sum(r.prompt_tokens for r in own)),
        "short_tpot": tpot(runs),
        "failed": len(errors),
        "error": errors[0] if errors else None,
        "lent_pages": sum(m["pages"] for m in moves if m["action"] == "LendPages"),
    }


def drawn(result: dict[str, Any]) -> Table:
    table = Table("row", "P50 TTFT", "P99", "cached", "short TPOT", "failed", "lent pages")
    for row, found in result["rows"].items():
        cells = (shown_as(found[c]) for c in ("p50_ttft", "p99_ttft", "cached", "short_tpot"))
        table.add_row(row, *cells, str(found["error"] or 0), str(found["lent_pages"]))
    goals = {"p99_ttft_over_host_offload": 0.46, "lender_slowdown": 0.05, "transfer_hidden": 0.95}
    lines = ["; ".join(f"{k} {shown_as(result[k])} (goal {g})" for k, g in goals.items())]
    for row, of in result["breakdown"].items():
        lines.append(f"{row}: " + ", ".join(f"{k} {shown_as(v)}" for k, v in of.items()))
    table.caption = "\n".join(lines)
    return table


def shown_as(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
