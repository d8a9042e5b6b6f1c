"""Whether any preset is pathological: random workloads under every preset, held to stated bounds.

Each seed draws two to ten models of the catalogue, one or two devices, a workload of `SECONDS` near
or above what they serve, in virtual time, and whether the models' settings state what it will ask
of them, as is known of few servers. No preset may lose requests, stall passes for layers (seconds
per request), preempt requests again and again (preemptions per request), or serve one model next to
nothing while the others are served: of a model with `LEAST_REQUESTS` or more that has a place, the
share of requests that are answered in time to its levels stretched by `STRETCH` is at least
`WORST_MODEL` of the mean over all requests. `violations` counts the runs beyond a bound.

`--kept FILE` keeps each outcome as it comes, with its code's commit; a later call with this file
runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.record import RequestRecord
from ballast.bench.run_options import workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import catalogue
from ballast.workload.workload import Workload
from benchmarks.common import commit, finish, options

SEEDS = 40
SECONDS = 20.0
"""Of arrivals; the runs last until all is answered."""
MODELS = (
    "Llama-3-8b",
    "Qwen2.5-7b",
    "Llama-2-7b",
    "Llama-2-13b",
    "Qwen3-4b",
    "Qwen3-8b",
    "Qwen3-14b",
    "Llama-3.2-3b",
    "Qwen3-1.7b",
)
DEVICES = ("1xH100-80G", "1xH100-80G", "2xH100-80G", "1xA100-80G")
SLO = Slo(ttft=2.0, tpot=0.1)
STALL = 0.5
"""Seconds per request for which passes waited for layers."""
PREEMPTIONS = 2.0
"""Per request."""
WORST_MODEL = 0.2
"""Of the mean of all requests."""
STRETCH = 10.0
LEAST_REQUESTS = 10


@dataclass(frozen=True)
class World:
    """What one seed draws."""

    devices: str
    specs: list[ModelSpec]
    workload: Workload
    planned: bool
    """Whether settings state what the workload asks of each model."""


def world(seed: int) -> World:
    """Models, devices and arrivals of a seed."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(rng.randint(2, 10))]
    most = rng.choice((1024, 4096, 8192))
    known = catalogue()
    served = {"max_model_len": 8192, "slo": SLO}
    specs = [
        replace(known[rng.choice(MODELS)].spec(**served), name=name, fingerprint=name)
        for name in names
    ]
    work = workload_of(
        rng.choice(("bursty", "gamma", "poisson")),
        names,
        rate=rng.choice((2.0, 4.0, 8.0)),
        seconds=SECONDS,
        most_tokens=most,
        seed=seed,
    )
    if rng.random() < 0.5:
        work = work.spread_models(names, rng.choice((0.5, 1.0, 2.0)), seed)
    return World(rng.choice(DEVICES), specs, work, planned=rng.random() < 0.5)


@dataclass(frozen=True)
class Outcome:
    """One run."""

    requests: int
    attained: float
    answered: float
    stall: float
    """Seconds per request."""
    preemptions: float
    """Per request."""
    loaded_bytes: float
    """Per request, of rotating layers."""
    worst_model: float
    """Share of its requests answered within stretched levels, over that of all."""
    unanswered: int
    """Requests without an end."""

    @property
    def beyond(self) -> list[str]:
        """Names of the bounds that the run exceeds."""
        found = {
            "stall": self.stall > STALL,
            "preemptions": self.preemptions > PREEMPTIONS,
            "worst model": self.worst_model < WORST_MODEL,
            "lost": self.unanswered > 0,
        }
        return [name for name, is_beyond in found.items() if is_beyond]


def run(preset: str, seed: int) -> Outcome:
    """One preset in the world of a seed."""
    drawn = world(seed)
    slos = {s.name: SLO for s in drawn.specs}
    ran = run_cluster(
        resolve(preset),
        parse_kinds(drawn.devices),
        drawn.specs,
        drawn.workload,
        slos,
        planned=drawn.planned,
    )
    return outcome(ran)


def outcome(ran: ClusterRun) -> Outcome:
    """What a run came to."""
    records = ran.report.records
    n = len(records)
    asked: Counter[str] = Counter(r.model for r in records)
    placeless = {r.model for r in records if r.error is not None}
    served: Counter[str] = Counter(r.model for r in records if _in_stretched_levels(r))
    mean = served.total() / n
    shares = [
        served[m] / asked[m] / mean
        for m in asked
        if asked[m] >= LEAST_REQUESTS and m not in placeless and mean
    ]
    loads = ran.rotations.values()
    return Outcome(
        requests=n,
        attained=ran.report.total.attained / n,
        answered=sum(r.error is None for r in records) / n,
        stall=sum(of["stall_seconds"] for of in loads) / n,
        preemptions=ran.total("preemptions") / n,
        loaded_bytes=sum(of["n_bytes"] for of in loads) / n,
        worst_model=min(shares, default=1.0),
        unanswered=sum(r.end is None for r in records),
    )


def _in_stretched_levels(record: RequestRecord) -> bool:
    ttft, tpot = record.ttft, record.tpot
    if not record.answered or ttft is None:
        return False
    return ttft <= STRETCH * SLO.ttft and (tpot or 0.0) <= STRETCH * SLO.tpot


@dataclass(frozen=True)
class Kept:
    """Outcomes of earlier calls, one JSON object a line; without a path none."""

    path: Path | None

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """By preset and seed."""
        if self.path is None or not self.path.exists():
            return {}
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {(row["preset"], row["seed"]): Outcome(**row["outcome"]) for row in rows}

    def add(self, preset: str, seed: int, found: Outcome) -> None:
        """Append one outcome."""
        if self.path is None:
            return
        row = {"preset": preset, "seed": seed, "commit": commit(), "outcome": asdict(found)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=SEEDS)
        parser.add_argument("--first", type=int, default=0, help="seed of the first world")
        parser.add_argument("--presets", default=",".join(PRESETS))
        parser.add_argument("--processes", type=int, default=2)
        parser.add_argument("--kept", type=Path, metavar="FILE", help="keep outcomes here, go on")

    args = options(__doc__, argv, extra)
    presets = args.presets.split(",")
    seeds = range(args.first, args.first + (6 if args.quick else args.seeds))
    console = Console(width=160)
    context = multiprocessing.get_context("spawn")
    kept = Kept(args.kept)
    done = kept.outcomes()
    runs = [(p, seed) for seed in seeds for p in presets]
    found: dict[str, dict[int, Outcome]] = {p: {} for p in presets}
    with ProcessPoolExecutor(args.processes, context) as pool:
        jobs = {key: pool.submit(run, *key) for key in runs if key not in done}
        for preset, seed in runs:
            key = preset, seed
            found[preset][seed] = one = done[key] if key in done else jobs[key].result()
            if key not in done:
                kept.add(preset, seed, one)
            if one.beyond:
                console.print(f"{preset}, seed {seed}: {', '.join(one.beyond)}: {one}")
    beyond = {p: {s: o.beyond for s, o in of.items() if o.beyond} for p, of in found.items()}
    result: dict[str, Any] = {
        "violations": sum(len(of) for of in beyond.values()),
        "beyond": beyond,
        "bounds": {"stall": STALL, "preemptions": PREEMPTIONS, "worst_model": WORST_MODEL},
        "outcomes": {p: {s: asdict(o) for s, o in of.items()} for p, of in found.items()},
    }
    finish(args, "bound", result)


def table(found: Mapping[str, Mapping[int, Outcome]]) -> Table:
    """By preset, the worst over all worlds, and the mean attainment."""
    made = Table("preset", "attained, mean", "stall, s", "preemptions", "worst model", "beyond")
    for preset, of in found.items():
        all_of = list(of.values())
        made.add_row(
            preset,
            f"{100 * sum(o.attained for o in all_of) / len(all_of):.1f} %",
            f"{max(o.stall for o in all_of):.2f}",
            f"{max(o.preemptions for o in all_of):.2f}",
            f"{min(o.worst_model for o in all_of):.2f}",
            str(sum(bool(o.beyond) for o in all_of)),
        )
    return made


if __name__ == "__main__":
    main()
