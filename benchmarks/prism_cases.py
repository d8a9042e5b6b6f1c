"""Prism's evaluation as experiments in virtual time: sections 7.2 and 7.4, bursty groups on H100s.

Requests have the statistics that appendix A.1 states, as the paper's traces are not public. The
paper multiplies the requests of its traces by a factor that it does not state for every figure;
here `clumps` is that factor, on the requests of a clump.

Service levels are the P95 of each model alone on devices of its own, TTFT times 5 and TPOT times 2
(section 7.4), and no shorter than the least P95 that section 7.1 states: simulated engines without
a front end are faster.

All rows have the same devices, one lane each, equal requests and equal options, and begin with the
same placement, by weights alone: nobody knows what will be asked. The rows in `MOVING` alone move
models. Before all that counts every model is asked once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ballast.bench.cluster_run import run_cluster
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.cluster_files import ClusterFiles, GivenHomes
from ballast.sim.model_catalogue import facts
from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.contenders import Comparison, Contender
from benchmarks.experiment import TARGET, Experiment, Outcome, outcome_of

DEVICE = "H100-80G"
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
LEAST_TTFT, LEAST_TPOT = 0.04, 0.0052
"""Seconds: the shortest P95 of a model alone that section 7.1 states."""
IDLE = 45.0
"""Seconds without a request after which the paper evicts a model (appendix A.4)."""
WARM_UP, WARMING = 60.0, 0.5
"""Seconds before the requests that count, and between two that bring one model each."""
RUNNING = 256
"""Requests of a model that run at once at most: memory, not their number, is what is short."""
ARENA_PROMPT, ARENA_OUTPUT = 143, 239
"""Tokens of each, the Arena's means: policies learn lengths from requests that have ended."""
CLUMP = 3.0
"""Mean requests of a clump where `clumps` is 1."""

EIGHT = (
    *("Llama-3.2-3b", "Qwen3-8b", "Llama-3.2-1b", "Llama-3-8b"),
    *("Qwen2.5-3b", "Qwen2.5-7b", "Qwen3-4b", "Qwen3-14b"),
)
"""The most popular first, like the others."""
EIGHTEEN = (
    *("Qwen3-8b", "Llama-3.2-3b", "Llama-3-8b", "Qwen2.5-7b", "Llama-3.2-1b", "Qwen3-4b"),
    *("Qwen2.5-3b", "Qwen3-1.7b", "Llama-3.2-3b") * 2,
    *("Qwen2.5-7b", "Llama-3-8b", "Qwen3-8b", "Llama-3.2-1b", "Qwen3-4b", "Llama-3.2-3b"),
)
SIZES = (
    (43, ("Llama-3.2-3b", "Qwen2.5-1.5b", "Llama-3.2-1b", "Qwen2.5-3b", "Qwen3-1.7b")),
    (8, ("Qwen3-8b", "Llama-3-8b", "Qwen3-4b", "Qwen2.5-7b")),
    (3, ("Qwen3-14b", "Yi-1.5-9b-chat", "Qwen2.5-14b")),
    (4, ("Llama-3-70b", "Qwen3-32b", "Llama-3-70b", "Qwen2.5-32b")),
)
"""Table 3: how many models of 1B to 3B, 4B to 8B, 9B to 30B and 31B to 70B, and which are taken."""
LARGE = ("Qwen3-32b", "Qwen2.5-32b", "Llama-3-70b")
"""Models that tensor-parallel groups serve."""


def by_size() -> tuple[str, ...]:
    """The 58 models of Table 3, each size spread evenly over the order of popularity."""
    placed = [
        ((i + 0.5) / n, size, names[i % len(names)])
        for size, (n, names) in enumerate(SIZES)
        for i in range(n)
    ]
    return tuple(name for _, _, name in sorted(placed))


def whole(gpus: int) -> str:
    """So many devices, none of them in a group."""
    return f"{gpus}x{DEVICE}"


GROUPED = {
    12: f"4x{DEVICE},2x{DEVICE}:tp4",
    16: f"8x{DEVICE},2x{DEVICE}:tp4",
    20: f"8x{DEVICE},3x{DEVICE}:tp4",
    24: f"8x{DEVICE},2x{DEVICE}:tp4,1x{DEVICE}:tp8",
    28: f"12x{DEVICE},2x{DEVICE}:tp4,1x{DEVICE}:tp8",
    32: f"12x{DEVICE},3x{DEVICE}:tp4,1x{DEVICE}:tp8",
}
"""By number of GPUs, how they are grouped for 58 models; 12 are the fewest that hold the weights
beside KV. The paper has TP 4 for 32B and 4 or 8 for 70B, and does not state the groups."""

COMPARED = Comparison(
    {},
    {
        "static": Contender("static+deadline"),
        "recompute": Contender("recompute+deadline"),
        "muxserve": Contender("muxserve+deadline"),
        "swap": Contender("swap+deadline"),
        "balloon": Contender("balloon"),
        "prism": Contender("prism"),
        "prism, 45 s": Contender("prism", ablates="prism"),
        "prism, by weights": Contender("prism", ablates="prism"),
    },
)
SEARCHED = Comparison(
    {}, {r: COMPARED.rows[r] for r in ("static", "muxserve", "swap", "balloon", "prism")}
)
MOVING = ("prism", "prism, 45 s")
"""Rows whose models migrate."""


@dataclass(frozen=True)
class Setting:
    """Models, and what is asked of them."""

    likes: tuple[str, ...]
    """By model, its architecture; the most popular first. Those of one are fine-tunes with weights
    of their own."""
    seconds: float
    """Of requests that count."""
    clumps: float = 1.0
    """Factor on the requests of a clump."""
    longer: float = 1.0
    """Factor on the lengths of prompts and outputs."""
    context: int = 4096
    """Tokens of a model; prompt and output take half of it each at most."""
    scale: float = 1.0
    """On all service levels."""

    @property
    def specs(self) -> list[ModelSpec]:
        """The models, by number."""
        found = []
        for i, like in enumerate(self.likes):
            spec = facts(like).spec(
                max_model_len=self.context, max_running=RUNNING, fingerprint=f"{like}-{i}"
            )
            found.append(replace(spec, name=f"m{i:02}-{like}"))
        return found

    def workload(self, seed: int) -> Workload:
        """The same models are in use at the same times whatever `clumps` is."""
        names = [spec.name for spec in self.specs]
        groups = BurstyGroups(clump_requests=CLUMP * self.clumps)
        work = bursty_groups(names, self.seconds, groups=groups, seed=seed)
        half = self.context // 2
        most = [
            replace(
                r,
                at=r.at + WARM_UP,
                prompt_tokens=min(max(1, round(r.prompt_tokens * self.longer)), half),
                output_tokens=min(max(1, round(r.output_tokens * self.longer)), half),
            )
            for r in work.requests
        ]
        warming = [
            WorkloadRequest(
                id=len(most) + i,
                at=i * WARMING,
                model=n,
                prompt_tokens=ARENA_PROMPT,
                output_tokens=ARENA_OUTPUT,
            )
            for i, n in enumerate(names)
        ]
        return Workload.of(work.name, [*warming, *most], work.source, work.labels)


def counted(report: Report) -> list[RequestRecord]:
    """All requests but those of the warm-up."""
    return [r for r in report.records if r.at >= WARM_UP]


@cache
def levels(setting: Setting, seed: int) -> dict[str, Slo]:
    """P95 of each model alone, scaled; that of all models where it has no requests. Large models
    are alone on a tensor-parallel group of four."""
    specs = setting.specs
    small = [s.name for s, like in zip(specs, setting.likes, strict=True) if like not in LARGE]
    large = [s.name for s in specs if s.name not in small]
    groups = f",{len(large)}x{DEVICE}:tp4" if large else ""
    homes: dict[str, list[int | str]] = {n: [i] for i, n in enumerate([*small, *large])}
    ran = run_cluster(
        resolve("static"),
        parse_kinds(f"{whole(len(small))}{groups}"),
        specs,
        setting.workload(seed),
        {s.name: Slo() for s in specs},
        files=ClusterFiles(homes=GivenHomes("alone", homes)),
    )
    records = [r for r in counted(ran.report) if r.answered]

    def p95(name: str, what: str, least: float) -> float:
        own = [v for r in records if r.model == name and (v := getattr(r, what)) is not None]
        every = [v for r in records if (v := getattr(r, what)) is not None]
        return max(float(np.percentile(own or every, 95)), least)

    return {
        s.name: Slo(
            ttft=setting.scale * TTFT_SCALE * p95(s.name, "ttft", LEAST_TTFT),
            tpot=setting.scale * TPOT_SCALE * p95(s.name, "tpot", LEAST_TPOT),
        )
        for s in specs
    }


class _Hopeless(Exception):
    """So many first tokens were late that the target cannot be met."""


def preset_of(row: str) -> Preset:
    """What a row runs: with equal options, beginning as `weights` places models."""
    placement = "kvpr" if row in MOVING else "weights"
    return resolve(COMPARED.rows[row].preset, COMPARED.options(row), placement=placement)


def serve(
    setting: Setting, row: str, devices: str, seed: int, seconds: float, cut: bool
) -> Outcome:
    """Run one row. `devices`: as `parse_kinds` reads them; `cut`: stop as soon as the target cannot
    be met."""
    setting = replace(setting, seconds=seconds)
    slos = levels(setting, seed)
    ttl = IDLE if row == "prism, 45 s" else None
    served = [replace(s, slo=slos[s.name], ttl=ttl) for s in setting.specs]
    work = setting.workload(seed)
    requests = sum(r.at >= WARM_UP for r in work.requests)
    warming = len(work.requests) - requests  # may be late
    spare = math.floor((1 - TARGET) * requests) + warming
    late = 0

    def missed(model: str) -> None:
        nonlocal late
        late += 1
        if late > spare:
            raise _Hopeless

    kinds, told = parse_kinds(devices), missed if cut else None
    try:
        ran = run_cluster(preset_of(row), kinds, served, work, slos, missed=told)
    except _Hopeless:
        bound = 1 - (late - warming) / requests
        return Outcome(0.0, 0.0, 0.0, bound, 0.0, requests, 0, 0, complete=False)
    return outcome_of(ran, slos, WARM_UP, WARM_UP + seconds, begin=WARM_UP)


@dataclass(frozen=True)
class OnGpus:
    """The axis is the number of GPUs."""

    setting: Setting
    layouts: Mapping[int, str]

    def __call__(self, row: str, gpus: float, seed: int, seconds: float, cut: bool) -> Outcome:
        return serve(self.setting, row, self.layouts[int(gpus)], seed, seconds, cut)


@dataclass(frozen=True)
class Clumped:
    """The axis is the factor on the requests of a clump; two GPUs."""

    setting: Setting

    def __call__(self, row: str, factor: float, seed: int, seconds: float, cut: bool) -> Outcome:
        setting = replace(self.setting, clumps=factor)
        return serve(setting, row, whole(2), seed, seconds, cut)


UP_TO_EIGHT = {n: whole(n) for n in range(1, 9)}


def _search(
    title: str, setting: Setting, layouts: Mapping[int, str], paper: Mapping[str, str]
) -> Experiment:
    run = OnGpus(setting, layouts)
    axis, length = tuple(map(float, layouts)), setting.seconds
    return Experiment(
        title, SEARCHED, axis, run, length, (0, 1), ours="prism", fewest=True, paper=paper
    )


PRISM = {
    "prism_58": _search(
        "58 models of 1B to 70B",
        Setting(by_size(), seconds=60.0),
        GROUPED,
        {"prism": "16", "muxserve": "32", "static": "over 32", "swap": "over 32"},
    ),
    "prism_18": _search(
        "18 models of 1B to 8B, clumps x 10",
        Setting(EIGHTEEN, seconds=60.0, clumps=10.0),
        UP_TO_EIGHT,
        {"prism": "4, 5", **dict.fromkeys(("static", "muxserve", "swap"), "over 8")},
    ),
    "prism_18_long": _search(
        "18 models, clumps x 4, requests x 5",
        Setting(EIGHTEEN, seconds=60.0, clumps=4.0, longer=5.0, context=8192),
        UP_TO_EIGHT,
        {},
    ),
    "prism_8": Experiment(
        "8 models of 1B to 14B on two GPUs, by clumps",
        COMPARED,
        (1.0, 4.0, 8.0),
        Clumped(Setting(EIGHT, seconds=60.0)),
        60.0,
        (0, 1),
        ours="prism",
    ),
}
"""Axes: GPUs of the searches; for `prism_8` the factor on the requests of a clump."""
