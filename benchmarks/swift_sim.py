"""SwiftCache on H20s in virtual time: each model as the borrower, ours beside what the text states.

Three H20-96G of one host (the paper has four, and does not state who has the fourth) with one model
each, 16 bits, NVLink 200 GB/s each way, PCIe 32 GB/s for all, 96 GB of host memory for KV. The
borrower has long conversations: histories of 20K to 40K tokens, more of them than its own memory
holds; each turn adds a short prompt and is answered by 16 tokens. Turns are Poisson, over sessions
at random; the first turns are served before, and not measured. Its neighbours have short requests.
Lengths are drawn, from what the text states of ShareGPT.

Rows, on equal terms (order of compute by deadline, prefix cache): `swiftcache`; `published`, with
the borrower as master by Algorithm 1; `offload`, blocks on the host (as LMCache, HiCache); `none`.

- `p99_ttft_over_offload`: by borrower (the paper: 0.31 to 0.46).
- `lenders`: by row and neighbour, its median TTFT and TPOT. A lender's memory bandwidth is not
  shared with its borrower here.
- `breakdown`, of each row: queue, load, execute and store of the borrower's prefills
  (`swift_phases`) as parts of their sum, what overlap leaves of load and store, and P99 of each.
- `sweep`: the first, with NVLink 1/4 to 4 times as fast.
- `beside`: every number of the text about latency, and the same here (contexts: `swift_context`).

`--borrowers LWM-1M-7b,Qwen3-14b`: only these; `--rows`: only these, of which nothing is compared;
`--load`, `--block`: more turns, and shorter blocks of shared histories, in all rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.progress import shown
from ballast.bench.record import RequestRecord
from ballast.core.entries import Sink
from ballast.core.fleet import DeviceCapacity, LendPages, ModelDemand
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.core.units import GiB, MiB
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.elastic_lending import ElasticLending
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import SERVED as CLUSTER_SERVED
from ballast.sim.cluster import parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from ballast.sim.model_catalogue import facts
from ballast.sim.profile import device_profile
from ballast.sim.topology import ClusterLinks, PeerLinks
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, options
from benchmarks.swift_paper import CONTRADICTIONS, STATED
from benchmarks.swift_phases import PhaseCounter, Phases

MODELS = {"LWM-1M-7b": 64, "Qwen3-14b": 192, "Qwen3-32b": 128}
"""With the tokens of a block, such that each fills a page."""
SERVED = replace(CLUSTER_SERVED, page_bytes=32 * MiB)
"""Long histories have 16 times fewer pages than with those of 2 MiB, and take as long to serve."""
SLO = Slo(ttft=5.0, tpot=0.2)
PCIE, NVLINK = 32e9, 200e9
HOST = 96 * GiB
SESSIONS = {"LWM-1M-7b": 6, "Qwen3-14b": 14, "Qwen3-32b": 10}
"""Of the borrower: their KV fills its own memory and most of what its neighbours can spare."""
RATES = {"LWM-1M-7b": 0.5, "Qwen3-14b": 0.5, "Qwen3-32b": 0.25}
"""Turns per second; `offload` must not be beyond its link's capacity."""
SHORT_RATE = 0.5
"""Requests per second of each neighbour."""
BLOCK = 256
"""Tokens of a block of histories."""
WARM = {"LWM-1M-7b": 20.0, "Qwen3-14b": 30.0, "Qwen3-32b": 60.0}
"""Seconds between first turns: what the longest takes."""
OUTPUT = 16
"""Tokens of an answer: the paper measures prefills. Decode steps read borrowed KV as well, each of
them all of it, which the paper does not say."""
SWEEP = (0.25, 4.0)
INTERFERENCE = {
    "LWM-1M-7b": (
        ("worker_ttft_14b", "Qwen3-14b", "ttft"),
        ("worker_tpot_14b", "Qwen3-14b", "tpot"),
        ("worker_ttft_32b", "Qwen3-32b", "ttft"),
        ("worker_tpot_32b", "Qwen3-32b", "tpot"),
    ),
    "Qwen3-32b": (("worker_ttft_of_32b", "", "ttft"), ("worker_tpot_of_32b", "", "tpot")),
}
"""By borrower: what the text states, the lender (empty: all), and of which latency."""


@dataclass(frozen=True)
class Row:
    """A preset with its options, and whether KV is kept on the host."""

    preset: str
    offload: bool = False
    published: bool = False

    def resolved(self, master: int) -> Preset:
        return resolve(self.preset, {"published": 1, "master": master} if self.published else {})


ROWS = {
    "swiftcache": Row("swiftcache"),
    "published": Row("swiftcache", published=True),
    "offload": Row("balloon", offload=True),
    "none": Row("balloon"),
}
LENT = ROWS["swiftcache"]


def specs() -> list[ModelSpec]:
    return [
        facts(name).spec(max_model_len=1 << 20, slo=SLO, block_tokens=block)
        for name, block in MODELS.items()
    ]


@dataclass(frozen=True, slots=True)
class LendingApart(ElasticLending):
    """Each model on a device of its own, in order; devices lend."""

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {need.model: [room.device] for need, room in zip(needs, rooms, strict=True)}


@dataclass(frozen=True, slots=True)
class Apart(FixedPlacement):
    """Each model on a device of its own, in order."""

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {need.model: [room.device] for need, room in zip(needs, rooms, strict=True)}


def apart(preset: Preset) -> FleetPolicy:
    """The preset's fleet policy, with a device for each model."""
    policy = preset.fleet
    if not isinstance(policy, ElasticLending):
        return Apart()
    return LendingApart(policy.every, policy.window, policy.master, policy.published)


def joints(row: Row, nvlink: float) -> ClusterLinks:
    return ClusterLinks(
        per_host=3,
        host=LinkRates.even(PCIE),
        peers=PeerLinks.NVLINK,
        port=LinkRates.even(NVLINK * nvlink, 2 * NVLINK * nvlink),
        kv_host=HOST if row.offload else 0,
    )


def conversations(
    borrower: str, seconds: float, seed: int, load: float = 1.0, block: int = BLOCK
) -> tuple[Workload, float]:
    """The requests of all models, and from when on they count."""
    rng = random.Random(f"{borrower}-{seed}")
    sessions = SESSIONS[borrower]
    histories = [rng.randrange(20_000, 40_000) for _ in range(sessions)]
    found: list[WorkloadRequest] = []

    def ask(at: float, model: str, session: int, prompt: int, output: int) -> None:
        blocks = tuple(session * 4096 + i for i in range(prompt // block))
        found.append(
            WorkloadRequest(
                id=len(found),
                at=at,
                model=model,
                prompt_tokens=prompt,
                output_tokens=output,
                session=f"{model}-{session}",
                prefix_blocks=blocks,
                block_tokens=block,
            )
        )

    at = 0.0
    for _ in range(2):
        for session in range(sessions):
            ask(at, borrower, session, histories[session], 1)
            at += WARM[borrower]
    begins = at
    while (at := at + rng.expovariate(load * RATES[borrower])) < begins + seconds:
        session = rng.randrange(sessions)
        histories[session] += max(8, int(rng.lognormvariate(3.9, 0.8))) + OUTPUT
        ask(at, borrower, session, histories[session], OUTPUT)
    for i, model in enumerate(m for m in MODELS if m != borrower):
        at, n = 0.0, 0
        while (at := at + rng.expovariate(SHORT_RATE)) < begins + seconds:
            n += 1
            ask(at, model, 1000 * (i + 1) + n, 256 + rng.randrange(512), 100)
    return Workload.of("conversations", found, f"drawn, seed {seed}"), begins


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a row; `phases`: of the borrower's requests that count."""

    cluster: ClusterRun
    phases: Phases
    begins: float
    """From when on requests count."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Equal for all rows."""

    seconds: float
    """Of turns that count."""
    load: float = 1.0
    """Turns of the borrower over those of `RATES`."""
    block: int = BLOCK


def run(borrower: str, row: Row, terms: Terms, nvlink: float = 1.0) -> Ran:
    work, begins = conversations(borrower, terms.seconds, 0, terms.load, terms.block)
    kinds = parse_kinds(f"{len(MODELS)}xH20-96G")
    preset = row.resolved(1 + list(MODELS).index(borrower))
    files = ClusterFiles(joints=joints(row, nvlink), homes=apart(preset))
    models = specs()
    block = next(s for s in models if s.name == borrower).block_bytes
    counters: list[PhaseCounter] = []

    def sink_of(device: str) -> Sink:
        counters.append(PhaseCounter(borrower, block / PCIE, begins))
        return counters[-1].take

    slos = dict.fromkeys(MODELS, SLO)
    ran = run_cluster(preset, kinds, models, work, slos, SERVED, files=files, sink_of=sink_of)
    return Ran(ran, sum((c.found for c in counters), Phases()), begins)


def measured(borrower: str, ran: Ran) -> dict[str, Any]:
    """What a run came to, of requests that count."""
    records = [r for r in ran.cluster.report.records if r.at >= ran.begins]
    own = [r for r in records if r.model == borrower]
    moves = ran.cluster.moves
    lent = [m for m in moves if m["action"] == LendPages.__name__ and "refused" not in m]
    return {
        "p50_ttft": _percentile(own, 50),
        "p99_ttft": _percentile(own, 99),
        "breakdown": ran.phases.measured(),
        "cached": sum(r.cached_tokens for r in own) / sum(r.prompt_tokens for r in own),
        "lenders": {
            model: {
                "ttft": _median(r.ttft for r in records if r.model == model),
                "tpot": _median(r.tpot for r in records if r.model == model),
            }
            for model in MODELS
            if model != borrower
        },
        "failed": sum(r.error is not None for r in records),
        "requests": len(own),
        "lends": len(lent),
        "lent_pages": sum(m["pages"] for m in lent),
    }


def _percentile(records: Sequence[RequestRecord], q: float) -> float | None:
    times = [r.ttft for r in records if r.ttft is not None]
    return float(np.percentile(times, q)) if times else None


def _median(values: Any) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--borrowers", default=",".join(MODELS))
        parser.add_argument("--rows", default=",".join(ROWS))
        parser.add_argument("--seconds", type=float, help="of each run, after first turns")
        parser.add_argument(
            "--load", type=float, default=1.0, help="factor on the borrower's turns"
        )
        parser.add_argument("--block", type=int, default=BLOCK, help="tokens of a shared block")

    args = options(__doc__, extra=extra)
    seconds = args.seconds or (120.0 if args.quick else 600.0)
    terms = Terms(seconds, args.load, args.block)
    result: dict[str, Any] = {"rows": {}, "p99_ttft_over_offload": {}, "sweep": {}}
    with shown() as progress:
        for borrower in args.borrowers.split(","):
            rows = result["rows"][borrower] = {}
            for i, name in enumerate(args.rows.split(",")):
                progress(f"{borrower}, {name}", i)
                rows[name] = measured(borrower, run(borrower, ROWS[name], terms))
            if not {"swiftcache", "offload"} <= rows.keys():
                continue
            offload = rows["offload"]["p99_ttft"]
            result["p99_ttft_over_offload"][borrower] = rows["swiftcache"]["p99_ttft"] / offload
            if not args.quick:
                result["sweep"][borrower] = {
                    f"{f:g}": measured(borrower, run(borrower, LENT, terms, f))["p99_ttft"]
                    / offload
                    for f in SWEEP
                }
    result["beside"] = beside(result)
    result["stated"] = {s.key: f"{s.value} {s.unit}" for s in STATED}
    result["contradictions"] = CONTRADICTIONS
    finish(args, "swift_sim", result, drawn(result))


def beside(result: dict[str, Any]) -> list[tuple[str, str, float | None]]:
    """(what, what the text states, what was measured), of borrowers whose rows have been run."""
    stated = {s.key: s for s in STATED}
    found: list[tuple[str, str, float | None]] = []
    for borrower, ratio in result["p99_ttft_over_offload"].items():
        texts = ("sharegpt", "leval")
        least = min(float(stated[f"p99_over_hicache_{t}"].value) for t in texts)
        most = max(float(stated[f"p99_over_lmcache_{t}"].value) for t in texts)
        found.append((f"{borrower}: P99 TTFT over offload", f"{least:g} to {most:g}", ratio))
        for key, lender, of in INTERFERENCE.get(borrower, ()):
            lent, apart = (
                _median(v["lenders"][m][of] for m in v["lenders"] if lender in ("", m))
                for v in (result["rows"][borrower][row] for row in ("swiftcache", "offload"))
            )
            more = None if not lent or not apart else 100 * (lent / apart - 1)
            name = f"{borrower}: {lender or 'all'} as lender, {of.upper()}, more by %"
            found.append((name, f"at most {stated[key].value}", more))
        found += _phases_beside(borrower, result["rows"][borrower]["swiftcache"]["breakdown"])
    return found + _figure_1()


PHASES = {
    "load_part": ("load", 100.0, "of the prefills' time, load, %"),
    "store_part": ("store", 100.0, "store, %"),
    "transfer_part": ("overlapped", 100.0, "load and store, with overlap, %"),
    "load_p99_32b": ("load_p99_ms", 1.0, "P99 of load, ms"),
    "store_p99_32b": ("store_p99_ms", 1.0, "P99 of store, ms"),
}
"""Statements of 5.4, about Qwen3-32B: what of a breakdown they are, in which unit, in words."""


def _phases_beside(
    borrower: str, breakdown: Mapping[str, float | None]
) -> list[tuple[str, str, float | None]]:
    stated = {s.key: s for s in STATED}
    return [
        (f"{borrower}: {words}", f"below {stated[key].value}", None if of is None else scale * of)
        for key, (name, scale, words) in PHASES.items()
        for of in (breakdown[name],)
    ]


def _figure_1() -> list[tuple[str, str, float | None]]:
    """256 new tokens of LWM on an H20, after histories that come over PCIe."""
    model, stated = facts("LWM-1M-7b").spec(max_model_len=1 << 20), {s.key: s for s in STATED}
    costs = device_profile("H20-96G").costs(model)

    def load(history: int) -> float:
        return 1e3 * history * model.kv_bytes_per_token / PCIE

    def compute(history: int) -> float:
        return 1e3 * costs.prefill_seconds(256, history)

    def overhead(history: int) -> float:
        return 100 * load(history) / (load(history) + compute(history))

    values = {
        "pcie_5k": load(5000),
        "compute_5k": compute(5000),
        "overhead_5k": overhead(5000),
        "overhead_50k": overhead(50_000),
    }
    return [(f"figure 1, {k}, {stated[k].unit}", stated[k].value, v) for k, v in values.items()]


def drawn(result: dict[str, Any]) -> Table:
    table = Table("borrower", "row", "P50", "P99 TTFT", "cached", "lenders' TTFT", "TPOT", "lent")
    for borrower, rows in result["rows"].items():
        for name, row in rows.items():
            lenders = row["lenders"].values()
            cells = (
                *(row[c] for c in ("p50_ttft", "p99_ttft", "cached")),
                *(_median(m[of] for m in lenders) for of in ("ttft", "tpot")),
            )
            shown_as = (f"{cell:.3f}" if cell is not None else "-" for cell in cells)
            table.add_row(borrower, name, *shown_as, str(row["lent_pages"]))
    lines = (f"{w}: the text {t}, here {v:.3g}" for w, t, v in result["beside"] if v is not None)
    table.caption = "\n".join(lines) or None
    return table


if __name__ == "__main__":
    main()
