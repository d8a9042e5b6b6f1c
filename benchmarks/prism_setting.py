"""What `prism_sim` and `prism_roles` share: Prism's models, devices, requests, levels and rows.

Bursty groups of requests with the statistics that appendix A.1 states, as the paper's traces are
not public. The paper multiplies the requests of its traces by a factor that it does not state for
every figure; here `clumps` is that factor, on the requests of a clump.

Service levels are the P95 of each model alone on devices of its own, TTFT times 5 and TPOT times 2
(section 7.4), all times `scale`. Of section 7.1 it is known that these P95 lie from 0.04 to 0.13 s
and from 5.2 to 50.9 ms. Simulated engines without a front end are faster (1B: 6 ms), so the least
that the paper states is the least here too (`floor`), unless a setting says otherwise.

All rows have the same devices, one lane each, equal requests and equal options, and begin with the
same placement, by weights alone: nobody knows what will be asked. The rows in `MOVING` alone move
models. Before all that counts every model is asked once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report, RequestStats
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.fleet.migrate import LeastPressure
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.cluster_files import NO_FILES, ClusterFiles, GivenHomes
from ballast.sim.model_catalogue import facts
from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.contenders import Comparison, Contender

DEVICE = "H100-80G"
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
LEAST_TTFT, LEAST_TPOT = 0.04, 0.0052
"""Seconds: the shortest P95 of a model alone that section 7.1 states."""
TARGET = 0.99
IDLE = 45.0
"""Seconds without a request after which the paper evicts a model (appendix A.4)."""
WARM_UP, WARMING = 60.0, 0.5
"""Seconds before the requests that count, and between two that bring one model each."""
RUNNING = 256
"""Requests of a model that run at once at most: memory, not their number, is what is short."""
APART = 0.01
"""Seconds between two of them to one model."""
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
PRESETS = tuple(row for row, contender in COMPARED.rows.items() if contender.ablates is None)
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
    warming: int = 1
    """Requests that each model is asked before what counts."""
    every: float | None = None
    """Seconds between two looks of the controller that moves models; None: the default."""
    floor: bool = True
    """Whether levels are no shorter than the paper's."""

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
        each = self.warming
        warming = [
            WorkloadRequest(
                id=len(most) + i * each + k,
                at=i * WARMING + k * APART,
                model=n,
                prompt_tokens=ARENA_PROMPT,
                output_tokens=ARENA_OUTPUT,
            )
            for i, n in enumerate(names)
            for k in range(each)
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
        return max(float(np.percentile(own or every, 95)), least if setting.floor else 0.0)

    return {
        s.name: Slo(
            ttft=setting.scale * TTFT_SCALE * p95(s.name, "ttft", LEAST_TTFT),
            tpot=setting.scale * TPOT_SCALE * p95(s.name, "tpot", LEAST_TPOT),
        )
        for s in specs
    }


@dataclass(frozen=True)
class Result:
    """One run; shares of the requests that count."""

    ttft: float
    """With their first token in time."""
    tpot: float
    worst: float
    """Attainment of the model served worst."""
    mean_ttft: float | None
    """Seconds, of answered requests; None: none was."""
    requests: int
    activations: int
    preemptions: int
    moves: int
    complete: bool = True
    """Whether it ran to its end; else `ttft` is an upper bound below the target, and nothing else
    is known."""

    @property
    def both(self) -> float:
        """The lower of both attainments."""
        return min(self.ttft, self.tpot)


class _Hopeless(Exception):
    """So many first tokens were late that the target cannot be met."""


def preset_of(row: str) -> Preset:
    """What a row runs: with equal options, beginning as `weights` places models."""
    placement = "kvpr" if row in MOVING else "weights"
    return resolve(COMPARED.rows[row].preset, COMPARED.options(row), placement=placement)


def measure(
    setting: Setting,
    row: str,
    devices: str,
    seed: int,
    *,
    ttl: float | None = None,
    files: ClusterFiles = NO_FILES,
    cut: bool = False,
) -> Result:
    """Run one row. `devices`: as `parse_kinds` reads them; `ttl`: seconds after which idle models
    are evicted (None: as the row says); `cut`: stop as soon as the target cannot be met."""
    slos = levels(replace(setting, every=None), seed)
    if row in MOVING and setting.every is not None:
        files = replace(files, homes=LeastPressure(every=setting.every))
    ttl = IDLE if row == "prism, 45 s" else ttl
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

    try:
        ran = run_cluster(
            preset_of(row),
            parse_kinds(devices),
            served,
            work,
            slos,
            missed=missed if cut else None,
            files=files,
        )
    except _Hopeless:
        bound = 1 - (late - warming) / requests
        return Result(bound, 0.0, 0.0, None, requests, 0, 0, 0, complete=False)
    return result_of(ran, served, slos)


def result_of(ran: ClusterRun, served: Sequence[ModelSpec], slos: dict[str, Slo]) -> Result:
    """What came of a run that ended."""
    records = counted(ran.report)
    total = RequestStats.of(records, slos)
    by_model = (RequestStats.of([r for r in records if r.model == s.name], slos) for s in served)
    return Result(
        total.attained_ttft / total.requests,
        total.attained_tpot / total.requests,
        min(of.attainment for of in by_model),
        None if total.ttft is None else total.ttft.mean,
        total.requests,
        ran.total("activations"),
        ran.total("preemptions"),
        ran.placed,
    )
