"""C2CServe on GH200s in MIG layouts, in virtual time: ours beside every number the text states.

Switches: the first token of a prompt of 128 tokens for a model that is not active, while others are
in memory. Co-runs: two models on two slices, decode and prefill throughput of both at once against
the sum of each alone. Dynamic: bursts of ten models. Ablations: the same on slices alone, with
placement at random, prompts whole, or the knob fixed. Lengths are generated (log-normal).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.run_options import workload_of
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.fleet.fixed_placement import FixedPlacement, RandomPlacement
from ballast.policy.presets import resolve
from ballast.sim.cluster import SERVED, Kind, parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from ballast.sim.model_catalogue import facts
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.c2c_devices import cold_start, reading, superchips
from benchmarks.c2c_paper import CONTRADICTIONS, NOT_MODELLED, PAPER_MULTIPROCESSORS, STATED
from benchmarks.c2c_passes import (
    COLUMNS,
    bounds,
    figure_4a,
    figure_4b,
    rows_of,
    share_of_prompts,
)
from benchmarks.common import finish, markdown, options

DENSE = ("Llama-3.2-3b", "Llama-3-8b", "Llama-3-70b")
MOE = ("Mixtral-8x7B", "Qwen3-30B-A3B")
SLO = Slo(ttft=1.0, tpot=0.2)
"""TTFT as the paper's dynamic workload; it states no TPOT."""
CONTEXT = 16384
RATE = 0.6
"""Requests per second of ten models."""
DEVICE = "GH200-96G"
LENGTHS = (6.0, 0.3)
"""Factors on the generator's prompts and outputs: where prompts are short, chunks are all alike."""
SHORT = (2.0, 0.3)
"""The same for ablations: alone on a seventh, the longest prompts keep TTFT."""


def layout(slices: int, *, paper: bool = False) -> list[Kind]:
    """One GH200, whole or in equal slices; `paper`: with the multiprocessors of its table 1."""
    (kind,) = parse_kinds(DEVICE if slices == 1 else f"{DEVICE}:slices{slices}")
    if not paper or slices == 1:
        return [kind]
    n = PAPER_MULTIPROCESSORS[slices]
    return [replace(kind, slices=tuple(replace(s, multiprocessors=n) for s in kind.slices))]


def models(names: Sequence[str], copies: Sequence[int]) -> list[ModelSpec]:
    """So many fine-tunes of each model, none of which share weights."""
    return [
        facts(name).spec(
            max_model_len=CONTEXT, slo=SLO, name=f"{name}.{i}", fingerprint=f"{name}.{i}"
        )
        for name, n in zip(names, copies, strict=True)
        for i in range(n)
    ]


def run(
    preset: str,
    kinds: Sequence[Kind],
    specs: Sequence[ModelSpec],
    work: Workload,
    files: ClusterFiles | None = None,
    **given: float,
) -> ClusterRun | None:
    """One run; None: a model fits on no device."""
    slos = {s.name: s.slo for s in specs}
    chosen = resolve(preset, given)
    try:
        return run_cluster(chosen, kinds, specs, work, slos, files=files or ClusterFiles())
    except ConfigError:
        return None


def asked(*requests: tuple[float, str, int, int]) -> Workload:
    """A workload of (time, model, prompt, output)."""
    made = (
        WorkloadRequest(id=i, at=at, model=model, prompt_tokens=prompt, output_tokens=output)
        for i, (at, model, prompt, output) in enumerate(requests)
    )
    return Workload("given", tuple(made))


def _ttft(ran: ClusterRun, model: str) -> float | None:
    """Mean seconds to a model's first tokens; None: it answered nothing."""
    found = ran.report.models[model].ttft
    return None if found is None else found.mean


def switches(slices: int, preset: str) -> dict[str, float | None]:
    """By model, seconds to the first token of a model when another has just been served."""
    found: dict[str, float | None] = {}
    for name in (*DENSE, *MOE):
        first, second = models([name], [2])
        work = asked((0.0, first.name, 128, 4), (30.0, second.name, 128, 4))
        files = ClusterFiles(homes=OneDevice())
        ran = run(preset, layout(slices), [first, second], work, files)
        found[name] = None if ran is None else _ttft(ran, second.name)
    return found


def cold_starts(warm: Mapping[str, float | None]) -> dict[str, float | None]:
    """By model, seconds to the first token of one that is on disk alone, by those of a switch."""
    return {
        name: None if seconds is None else cold_start(facts(name).spec(max_model_len=1), seconds)
        for name, seconds in warm.items()
    }


def over(rival: Mapping[str, float | None], our: Mapping[str, float | None]) -> str:
    """The range over models of how much longer a rival takes; of those that fit."""
    ratios = [r / o for name, r in rival.items() if r is not None and (o := our[name]) is not None]
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "none"


@dataclass(frozen=True, slots=True)
class OneDevice(FixedPlacement):
    """Every model on the first device."""

    def place(self, needs: Any, rooms: Any) -> dict[str, list[str]]:
        FixedPlacement.place(self, needs, rooms)  # refuses what fits nowhere
        return {need.model: [rooms[0].device] for need in needs}


def gap(names: tuple[str, str], prompt: int, output: int, chunk: int, slices: int = 2) -> float:
    """Part of the summed throughput of two models alone that is lost when both run."""
    pair = [replace(s, name=f"{i}") for i, s in enumerate(models(names, (1, 1)))]
    kinds = layout(slices, paper=True)

    def tokens_per_second(chosen: Sequence[ModelSpec]) -> float:
        work = asked(*((0.01 * i, m.name, prompt, output) for i in range(8) for m in chosen))
        served = replace(SERVED, step_tokens=chunk)
        preset = resolve("c2cserve", {"whole": 1, **PAPER})
        slos = {m.name: m.slo for m in chosen}
        ran = run_cluster(preset, kinds, chosen, work, slos, served)
        return 8 * len(chosen) * (prompt + output) / ran.report.wall_seconds

    alone = sum(tokens_per_second([m]) for m in pair)
    return 1 - tokens_per_second(pair) / alone


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the dynamic workload came to."""

    p50: float | None
    p95: float | None
    p99: float | None
    in_ttft: float
    in_slo: float
    failed: int

    @classmethod
    def of(cls, ran: ClusterRun | None, n: int) -> Outcome | None:
        if ran is None:
            return None
        total = ran.report.total
        times = sorted(r.ttft for r in ran.report.records if r.ttft is not None)
        p50, p95, p99 = (
            times[min(len(times) - 1, int(q * len(times)))] if times else None
            for q in (0.5, 0.95, 0.99)
        )
        return cls(p50, p95, p99, total.attained_ttft / n, total.attained / n, total.failed)

    @classmethod
    def mean(cls, found: Sequence[Outcome]) -> Outcome:
        """Means over seeds."""
        values = [asdict(one) for one in found]
        means = {key: fmean(v[key] or 0.0 for v in values) for key in values[0]}
        failed = sum(one.failed for one in found)
        return cls(**{**means, "failed": failed})  # type: ignore[arg-type]


def dynamic(
    specs: Sequence[ModelSpec],
    rate: float,
    seconds: float,
    seed: int,
    lengths: tuple[float, float] = LENGTHS,
) -> Workload:
    """Bursts: groups of models that are busy together; prompts of 1,500 tokens on average, outputs
    of 70."""
    names = [s.name for s in specs]
    made = workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=2048, seed=seed)
    return made.scale_lengths(*lengths)


PAPER = {"promote": 0.0}
"""All weights stay in host memory."""
CONTRAST: dict[str, tuple[str, int, dict[str, float]]] = {
    "swap on 1": ("swap+deadline", 1, {}),
    "token turns on 1": ("swap+deadline", 1, {"preemptive": 1, "quantum": 0.3}),
    "lru on 1": ("lru+deadline", 1, {}),
    "balloon on 1": ("balloon", 1, {}),
    "in host memory on 1": ("c2cserve", 1, PAPER),
    "c2cserve on 1": ("c2cserve", 1, {}),
    "in host memory on 3": ("c2cserve", 3, PAPER),
    "c2cserve on 3": ("c2cserve", 3, {}),
}
"""By name: preset, equal slices of the device, options. All order by deadline."""
ABLATIONS: dict[str, tuple[dict[str, float], bool]] = {
    "all": (PAPER, False),
    "placement": (PAPER, True),
    "chunk": ({"whole": 1, **PAPER}, False),
    "knob": ({"knob": 0, **PAPER}, False),
    "knob_at_1": ({"knob": 0, "os_share": 1, **PAPER}, False),
    "promoting": ({}, False),
}
"""By name: options, and whether models are placed at random."""


def ablate(
    name: str, slices: int, specs: Sequence[ModelSpec], works: Sequence[Workload]
) -> Outcome:
    """The dynamic workload on slices, without one of the parts; means over the draws."""
    given, anywhere = ABLATIONS[name]
    found = []
    for seed, work in enumerate(works):
        files = ClusterFiles(homes=RandomPlacement(seed)) if anywhere else None
        ran = run("c2cserve", layout(slices, paper=True), specs, work, files, **given)
        outcome = Outcome.of(ran, len(work.requests))
        assert outcome is not None
        found.append(outcome)
    return Outcome.mean(found)


def contrast(specs: Sequence[ModelSpec], work: Workload) -> dict[str, Outcome | None]:
    """The dynamic workload under other presets, on the whole device and on slices."""
    found = {}
    for name, (preset, slices, given) in CONTRAST.items():
        ran = run(preset, layout(slices, paper=True), specs, work, None, **given)
        found[name] = Outcome.of(ran, len(work.requests))
    return found


def span(times: dict[str, float | None], names: Sequence[str]) -> str:
    """The range over models, in seconds."""
    there = [t for name in names if (t := times[name]) is not None]
    left = [name for name in names if times[name] is None]
    text = f"{min(there):.3f}-{max(there):.3f}" if there else "none"
    return text + (f" (does not fit: {', '.join(left)})" if left else "")


def measure(*, quick: bool) -> dict[str, Any]:
    """Everything that is set beside the paper."""
    seconds, draws = (60.0, 1) if quick else (200.0, 2)
    dense = models(DENSE[:2], (5, 5))
    moe = models(MOE, (2, 3))
    work = dynamic(dense, RATE, seconds, 0)
    short = [dynamic(dense, RATE, seconds, seed, SHORT) for seed in range(draws)]
    of_experts = dynamic(moe, RATE / 2, seconds, 0)
    moves = {
        f"{preset} on {slices}": switches(slices, preset)
        for preset, slices in (("c2cserve", 1), ("c2cserve", 7), ("swap", 1), ("lru", 1))
    }
    cold = {row: cold_starts(moves[row]) for row in ("c2cserve on 7", "lru on 1", "swap on 1")}
    small, large = ("Llama-3.2-1b", "Llama-3.2-1b"), ("Qwen2.5-7b", "Qwen2.5-14b")
    return {
        "workload": f"{len(work.requests)} requests in {seconds:g} s: {work.describe()}",
        "figure_4b_gb": figure_4b(),
        "figure_4a_ms": figure_4a({f"{n}": layout(n, paper=True)[0] for n in (1, 3, 7)}),
        "prompts_part_of_the_link": share_of_prompts(models(DENSE[1:2], (1,))[0], 1500, 70, 1500),
        "passes": {
            f"{name}, {share} of the link": bounds(layout(7, paper=True)[0], spec, part)
            for name, spec in zip(DENSE, models(DENSE[:2], (1, 1)), strict=False)
            for share, part in (("all", 1.0), ("a seventh", 1 / 7))
        },
        "switch_s": moves,
        "cold_start_s": cold,
        "superchips": {
            device: {name: reading(kind, models([name], [1])[0]) for name in (*DENSE[:2], *MOE)}
            for device, kind in superchips().items()
        },
        "gap_footprint_5gb": gap(small, 64, 128, 512),
        "gap_footprint_45gb": gap(large, 64, 128, 512),
        "gap_chunk_512": gap(("Llama-3-8b",) * 2, 4096, 2, 512),
        "gap_chunk_whole": gap(("Llama-3-8b",) * 2, 4096, 2, 4096),
        "dynamic_dense": contrast(dense, work),
        "dynamic_moe": contrast(moe, of_experts),
        "ablations": {name: ablate(name, 7, dense, short) for name in ABLATIONS},
    }


def ours(found: dict[str, Any]) -> dict[str, str]:
    """Our value of each number that the text states; keys that are missing were not measured."""
    moves, dense, moe = found["switch_s"], found["dynamic_dense"], found["dynamic_moe"]
    values = {
        f"figure_4b_{side}": f"{first:.2f} to {last:.2f}"
        for side, (first, last) in found["figure_4b_gb"].items()
    }
    for slices, (first, last) in found["figure_4a_ms"].items():
        values[f"figure_4a_{slices}"] = f"{first:.1f} to {last:.1f}"
    for kind, names in (("dense", DENSE), ("moe", MOE)):
        values[f"switch_{kind}"] = span(moves["c2cserve on 7"], names)
        values[f"switch_{kind}_loader"] = span(moves["lru on 1"], names)
    cold = found["cold_start_s"]
    for kind, names in (("dense", DENSE), ("moe", MOE)):
        ours_, loader = ({n: cold[row][n] for n in names} for row in ("c2cserve on 7", "lru on 1"))
        values[f"cold_{kind}_loader"] = over(loader, ours_)
    gaps = {
        "chunk_512": "gap_chunk_512",
        "chunk_whole": "gap_chunk_whole",
        "footprint_small": "gap_footprint_5gb",
        "footprint_large": "gap_footprint_45gb",
    }
    values |= {key: f"{100 * found[gap]:.0f}" for key, gap in gaps.items()}
    for key, outcomes in (("dynamic_dense", dense), ("dynamic_moe", moe)):
        values[key] = times(outcomes["in host memory on 1"])
    values["dynamic_dense_loader"] = times(dense["lru on 1"])
    values["dynamic_dense_tokens"] = times(dense["token turns on 1"])
    values["switch_dense_tokens"] = span(moves["swap on 1"], DENSE)
    values["dynamic_in_1s"] = f"{100 * dense['in host memory on 1'].in_ttft:.0f}"
    for name, outcome in found["ablations"].items():
        values[f"ablation_{name}"] = f"{outcome.p99:.2f}"
    return values


def chips(found: dict[str, Any]) -> list[list[str]]:
    """A row for each model and place of its weights, a column for each superchip."""
    rows = []
    for name in next(iter(found["superchips"].values())):
        for place in ("resident", "in_place"):
            cells = (of[name] for of in found["superchips"].values())
            each = (
                f"{1e3 * c[f'tpot_{place}']:.1f} / {1e3 * c[f'prefill_{place}']:.0f}" for c in cells
            )
            rows.append([f"{name}, {place.replace('_', ' ')}", *each])
    return rows


def times(outcome: Outcome | None) -> str:
    """Median and 95th percentile of TTFT."""
    if outcome is None or outcome.p50 is None or outcome.p95 is None:
        return "does not fit"
    return f"{outcome.p50:.2f} (p50), {outcome.p95:.2f} (p95)"


def main(argv: Sequence[str] | None = None) -> None:
    args: argparse.Namespace = options(__doc__, argv)
    found = measure(quick=args.quick)
    values = ours(found)
    rows = [
        [s.key, f"{s.value} {s.unit}", values.get(s.key, "not modelled"), s.quote] for s in STATED
    ]
    console = Console(width=180)
    say = console.print
    say(markdown(["", "the paper", "ours", "its sentence"], rows), highlight=False, markup=False)
    outcomes = {
        **found["dynamic_dense"],
        **{f"{k}, MoE": v for k, v in found["dynamic_moe"].items()},
    }
    cells = [
        [name, "does not fit", "", ""]
        if o is None
        else [name, times(o), f"{100 * o.in_ttft:.0f} %", f"{100 * o.in_slo:.0f} %"]
        for name, o in outcomes.items()
    ]
    say(markdown(["dynamic", "TTFT, s", "TTFT <= 1 s", "in SLO"], cells), markup=False)
    say(markdown(["decode step of one / prompt of 2,048, ms", *found["superchips"]], chips(found)))
    say(markdown(["a prompt on a seventh, s", *COLUMNS, "best"], rows_of(found["passes"])))
    for line in (*CONTRADICTIONS, *(f"Not modelled: {what}" for what in NOT_MODELLED)):
        say(f"- {line}", markup=False, highlight=False)
    shown = Table("", "", title="c2c_sim")
    for name, outcome in found["ablations"].items():
        shown.add_row(f"{name}, p99 TTFT", f"{outcome.p99:.2f}")
    plain = {
        **found,
        **{
            key: {name: None if o is None else asdict(o) for name, o in found[key].items()}
            for key in ("dynamic_dense", "dynamic_moe", "ablations")
        },
        "beside_the_paper": {row[0]: {"paper": row[1], "ours": row[2]} for row in rows},
    }
    finish(args, "c2c_sim", plain, shown)


if __name__ == "__main__":
    main()
