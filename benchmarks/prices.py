"""Prices against fixed orders: presets that take the cheapest pages first, whatever their kind, and
the same presets with their sources in the papers' order.

One H100, in virtual time, three workloads: `arena`, LMSYS Chatbot Arena on three models of large
KV caches (bursts where the trace is not at hand); `idle`, eight models, of which most are idle at
any time; `prefixes`, long prompts that begin with one of several documents, more of them than
caches hold. `balloon`, `recompute`, `mirage` and `kvswap` run with and without `by_price: 1`, alike
in all else. Rates are multiples of a workload's knee: the lowest rate, to a factor of the square
root of two, at which one of the four in fixed order misses 99 %.

Keys: `points.WORKLOAD.PRESET.MULTIPLE`, attainment by price less that in fixed order, in points;
`points_min`, `points_max` and `points_mean`, over all of these; `rows`, attainment, mean and P99
of the time to the first token (seconds, over answered requests), preemptions and evictions.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run_options import workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import catalogue
from ballast.workload.generators import power_law
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.doc_tables import markdown

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/arena27_vtc_prism_0-300s.csv.gz"
DEVICE = "1xH100-80G"
CONTEXT = 8192
SLO = Slo(ttft=2.0, tpot=0.1)
MODELS = {
    "arena": ("Llama-2-13b", "Llama-2-7b", "Llama-3-8b"),
    "idle": (
        "Llama-2-7b",
        "Baichuan-7b",
        "Qwen-7b",
        "Qwen3-4b",
        "Llama-3.2-3b",
        "Qwen3-1.7b",
        "Llama-3.2-1b",
        "Qwen3-0.6b",
    ),
    "prefixes": ("Llama-3-8b", "Qwen3-8b", "Yi-1.5-9b-chat"),
}
"""By workload: 56, 64 and 50 GB of weights."""
PRESETS = ("balloon", "recompute", "mirage", "kvswap")
PRICED = "{} by price"
COMPARED = Comparison(
    {},
    {
        **{name: Contender(name) for name in PRESETS},
        **{PRICED.format(n): Contender(n, {"by_price": 1}, ablates=n) for n in PRESETS},
    },
)
MULTIPLES = (0.7, 1.0, 1.4, 2.0)
"""Of the knee."""
QUICK_MULTIPLES = (1.0, 2.0)
KNEES = tuple(2.0 ** (k / 2) for k in range(4, 12))
"""Requests per second at which the knee may lie."""
TARGET = 0.99
DOCUMENTS = 24
"""Of each model."""
BLOCK = 512
"""Tokens."""


@dataclass(frozen=True)
class Result:
    """Figures of one run."""

    attainment: float
    ttft_mean: float
    ttft_p99: float
    requests: int
    preemptions: int
    evictions: int


def specs(workload: str) -> list[ModelSpec]:
    """Return the models of a workload."""
    known = catalogue()
    served = {"max_model_len": CONTEXT, "slo": SLO}
    return [replace(known[n].spec(**served), fingerprint=n) for n in MODELS[workload]]


def arrivals(workload: str, rate: float, trace: Path, *, seconds: float) -> Workload:
    """Return about `seconds` of a workload at `rate` requests a second."""
    models = MODELS[workload]
    if workload == "prefixes":
        return documents(models, rate, seconds)
    if workload == "arena" and trace.is_file():
        found = load_trace(trace).map_models(models)
        found = found.scale_rate(rate / found.stats().rate)
        while found.seconds < seconds:
            found = _twice(found)
        return found.window(0.0, seconds)
    return workload_of("bursty", models, rate=rate, seconds=seconds, most_tokens=2048, seed=1)


def documents(models: Sequence[str], rate: float, seconds: float) -> Workload:
    """Return questions on documents of 2048 to 6144 tokens, popular ones more often; each prompt is
    a document and 64 to 512 tokens of its own, each answer has 32 to 256 tokens."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(4, 13, size=(len(models), DOCUMENTS))
    popularity = power_law(DOCUMENTS, 0.8)
    requests: list[WorkloadRequest] = []
    at = 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        model = int(rng.integers(len(models)))
        document = int(rng.choice(DOCUMENTS, p=popularity))
        n = int(lengths[model, document])
        base = (model * DOCUMENTS + document) * 100
        requests.append(
            WorkloadRequest(
                id=len(requests),
                at=at,
                model=models[model],
                prompt_tokens=n * BLOCK + int(rng.integers(64, 513)),
                output_tokens=int(rng.integers(32, 257)),
                prefix_blocks=tuple(range(base, base + n)),
                block_tokens=BLOCK,
            )
        )
    source = f"generated: {DOCUMENTS} documents per model, {rate:g}/s for {seconds:g} s, seed 1"
    return Workload.of("documents", requests, source)


def _twice(workload: Workload) -> Workload:
    """A workload and, after its end, itself again."""
    end = workload.seconds + 1 / workload.stats().rate
    again = (replace(r, at=r.at + end) for r in workload.requests)
    label = (*workload.labels, "twice")
    later = Workload.of(workload.name, again, workload.source)
    return replace(Workload.merge(workload.name, [workload, later]), labels=label)


def measure(workload: str, row: str, rate: float, trace: Path, *, seconds: float) -> Result:
    """Run a workload at `rate` requests a second."""
    work = arrivals(workload, rate, trace, seconds=seconds)
    preset = resolve(COMPARED.rows[row].preset, COMPARED.options(row))
    slos = dict.fromkeys(MODELS[workload], SLO)
    ran = run_cluster(preset, parse_kinds(DEVICE), specs(workload), work, slos)
    total, n = ran.report.total, len(work.requests)
    mean, p99 = (total.ttft.mean, total.ttft.p99) if total.ttft else (0.0, 0.0)
    return Result(
        total.attained / n, mean, p99, n, ran.total("preemptions"), ran.total("evictions")
    )


def points(rows: Mapping[str, Mapping[float, Result]]) -> dict[str, dict[float, float]]:
    """Return by preset and multiple of the knee how many points of attainment prices add."""
    return {
        preset: {
            k: 100 * (priced.attainment - rows[preset][k].attainment)
            for k, priced in rows[PRICED.format(preset)].items()
        }
        for preset in PRESETS
    }


def table(rows: Mapping[str, Mapping[float, Result]]) -> str:
    """Attainment in per cent, and mean and P99 of the time to the first token in seconds, by preset
    and multiple of the knee: fixed order, then by price."""
    multiples = sorted(next(iter(rows.values())))
    header = ["preset", *(f"{k:g} x" for k in multiples)]
    return markdown(
        header, ([f"`{row}`", *(_cell(by[k]) for k in multiples)] for row, by in rows.items())
    )


def _cell(r: Result) -> str:
    return f"{100 * r.attainment:.0f} ({r.ttft_mean:.2f}, {r.ttft_p99:.1f})"


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=Path, default=TRACE, help="the Arena's trace")
        parser.add_argument("--processes", type=int, default=2)
        parser.add_argument("--only", default=",".join(MODELS), help="workloads, by commas")

    args = options(__doc__, argv, extra)
    run = partial(measure, trace=args.trace, seconds=30.0 if args.quick else 60.0)
    multiples = QUICK_MULTIPLES if args.quick else MULTIPLES
    knees: dict[str, float] = {}
    results: dict[str, dict[str, dict[float, Result]]] = {}
    console = Console(width=140)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        for workload in args.only.split(","):
            for knee in KNEES:
                sought = [pool.submit(run, workload, row, knee) for row in PRESETS]
                if any(f.result().attainment < TARGET for f in sought):
                    break
            knees[workload] = knee
            coming = {
                row: {k: pool.submit(run, workload, row, k * knee) for k in multiples}
                for row in COMPARED.rows
            }
            rows = {row: {k: f.result() for k, f in by.items()} for row, by in coming.items()}
            results[workload] = rows
            console.print(f"{workload}, knee {knee:.3g}/s", highlight=False)
            console.print(table(rows), highlight=False, markup=False)
    gained = {workload: points(rows) for workload, rows in results.items()}
    each = [p for by in gained.values() for row in by.values() for p in row.values()]
    result: dict[str, Any] = {
        "knee_requests_per_s": knees,
        "points_min": min(each),
        "points_max": max(each),
        "points_mean": fmean(each),
        "points": {
            workload: {row: {f"{k:g}": p for k, p in by.items()} for row, by in rows.items()}
            for workload, rows in gained.items()
        },
        "rows": {
            workload: {
                row: {f"{k:g}": asdict(r) for k, r in by.items()} for row, by in rows.items()
            }
            for workload, rows in results.items()
        },
    }
    shown = Table("", "", title="prices")
    for key in ("points_min", "points_max", "points_mean"):
        shown.add_row(key, f"{result[key]:.1f}")
    finish(args, "prices", result, shown)


if __name__ == "__main__":
    main()
