"""What kernels reach on a device, and the host of engines that replay CUDA graphs.

Kernels were timed layer by layer on A100 and H100, without an engine (Vidur). Of engines of today
three decode steps and two activations are known, each a mean stated by others: they give what the
tables of kernels lack, and nothing else is fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from ballast.core.units import KiB, MiB
from ballast.sim.model_catalogue import facts
from ballast.sim.profile_tables import EngineProfile, HeldRuns
from ballast.sim.roofline import AllReduce, Derate, EngineHostCosts, Hardware, KernelReach, Sizes
from scripts.derating import Measured, decode_terms, fit_beside, fit_kernels
from scripts.measured import Tables, rows

LAYERS = {
    "Qwen-72B": 4 * 8192**2 + 3 * 8192 * 24576,
    "CodeLlama-34b": 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 22016,
    "internlm-20b": 4 * 5120**2 + 3 * 5120 * 13824,
    "phi-2": 4 * 2560**2 + 2 * 2560 * 10240,
}
"""Elements of a layer's matrices, of models that the catalogue lacks; published configurations."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A layer of one model, split among `tp` devices, as its kernels were timed alone."""

    model: str
    tp: int
    peak_read: float
    """Seconds to read its weights at the memory's peak."""
    matrices: float
    """Seconds of its matrix products for at most 32 tokens."""
    others: float
    """Seconds of its other kernels, without attention, for few tokens."""
    uncovered: float
    """The part of its seconds for few tokens that many tokens' arithmetic does not cover."""
    peak_token: float
    """Seconds of a token's matrix products at the peak."""
    token: float
    """Seconds that a token more takes, all kernels but attention together."""


def kernels(tables: Tables, folder: Path, device: str) -> list[Kernels]:
    """Read every model and group size that was timed on `device`; none on most."""
    known = {name.lower(): m for name, m in tables.models.items()}
    hardware, found = tables.hardware[device], []
    for r in rows(folder / "gemm_fit.csv"):
        if r["gpu"] != device:
            continue
        name = r["model"].removeprefix("Meta-").removesuffix("-hf").removesuffix("-Instruct")
        model, tp = known.get(name.lower()), int(r["tp"])
        of_layer = LAYERS[name] if model is None else model.layer_parameters // model.layers
        elements = of_layer / tp
        least, other = float(r["layer_gemm_floor_s"]), float(r["layer_other_a_s"])
        token = float(r["layer_gemm_b_s_per_token"]) + float(r["layer_other_b_s_per_token"])
        found.append(
            Kernels(
                model=name,
                tp=tp,
                peak_read=2 * elements / hardware.memory_bandwidth,
                matrices=2e-9 * elements / float(r["weight_read_gbs_le32_tokens"]),
                others=other,
                uncovered=(float(r["layer_gemm_a_s"]) + other) / (least + other),
                peak_token=2 * elements / hardware.flops,
                token=token,
            )
        )
    return found


def kernels_reach(measured: Sequence[Kernels]) -> tuple[float, float]:
    """`layer_seconds` (attention's part is not in it) and `reading` of a `KernelReach`."""
    return fit_kernels([(k.peak_read, k.matrices) for k in measured], [k.others for k in measured])


@dataclass(frozen=True, slots=True)
class Stated:
    """A decode step of an engine that replays CUDA graphs, on H100s; little KV is read."""

    model: str
    tp: int
    seconds: float


STEPS = (
    Stated("Llama-3-8b", 1, 6.4e-3),
    Stated("Llama-3-8b", 8, 2.3e-3),
    Stated("Qwen3-32b", 8, 7.0e-3),
)
ALL_REDUCES: dict[int, tuple[float, ...]] = {
    2: (4.45, 4.54, 4.76, 5.22, 6.36, 8.41, 12.39, 20.19),
    4: (4.91, 5.26, 5.82, 7.13, 11.19, 12.71, 18.48, 30.40),
    8: (5.52, 6.32, 7.80, 11.49, 12.27, 15.01, 19.27, 30.71),
}
"""Microseconds of vLLM's own all-reduce within a CUDA graph on H100s, by group size, of 16 KiB and
of twice as many each time."""
ALL_REDUCES_FROM = 16 * KiB
ALL_REDUCES_SOURCE = (
    "vLLM 0.20.0's all-reduces in graphs on H100, bf16: github.com/ai-dynamo/aiconfigurator, "
    "67f90e7, campaign_checkpoints/h100_sxm/custom_allreduce_perf.txt (Apache-2.0)"
)
ANSWER_SECONDS = 8.9e-3
ANSWER_SOURCE = (
    "answer_seconds: what vLLM's clients on H100 waited for a first token beyond the engine's "
    "steps, the median of eleven published runs (benchmarks/sim_published.py)"
)
HELD = (
    HeldRuns(
        engine="graphs", tp=1, runs=4,
        ttft=0.02, ttft_worst=0.031, tpot=-0.057, tpot_worst=-0.069,
        source="vLLM, Llama-2-7b: benchmarks/sim_published.py",
    ),
    HeldRuns(
        engine="graphs", tp=2, runs=3,
        ttft=0.009, ttft_worst=0.012, tpot=0.004, tpot_worst=0.018,
        source="vLLM, CodeLlama-34b: benchmarks/sim_published.py",
    ),
    HeldRuns(
        engine="graphs", tp=4, runs=4,
        ttft=-0.058, ttft_worst=-0.452, tpot=-0.037, tpot_worst=-0.052,
        source="vLLM, Llama-2-70b: benchmarks/sim_published.py",
    ),
)  # fmt: skip
"""What `benchmarks.sim_published` finds on `ON`."""
NOT_HELD = (
    "groups of eight (a stated step is missed by up to 22 % where it is left out of the fit); A100 "
    "(found 12 to 15 % off); SGLang's order, prompts before decodes, which costs a quarter of its "
    "time per token (engine sglang has it)"
)
STEPS_SOURCE = (
    "decode steps of current engines with CUDA graphs on H100, bf16, means of many runs by others: "
    "8B on one 6.4 ms (nothing more per sequence) and on eight 2.3 ms, 32B on eight 7.0 ms"
)
ACTIVATIONS = (("Llama-3-8b", 0.7), ("DeepSeek-R1-Distill-Qwen-14b", 1.3))
ACTIVATIONS_SOURCE = (
    "what the activations that Prism states (section 7: 8B in 0.7 s, 14B in 1.3 s, on H100s) take "
    "beyond their copies, per 2 MiB; the driver's published calls on an A100 are 37.5 us to map a "
    "handle and 26 to unmap one"
)
MAP_SECONDS, UNMAP_SECONDS = 37.5e-6, 26e-6
PAGES_SOURCE = (
    "the driver's published calls on an A100, of 2 MiB: cuMemMap 1.5 and cuMemSetAccess 36 us, "
    "cuMemUnmap 26; beside_seconds: the rest of page_seconds"
)
ON = "H100-80G"


def fit_steps(
    steps: Sequence[Stated],
    hardware: Hardware,
    layer_seconds: float,
    reading: float,
    reduces: Sequence[AllReduce],
) -> tuple[float, float]:
    """What a layer takes beyond its timed kernels (attention over a short KV, above all), in
    seconds, and an all-reduce of few bytes over NCCL's: least squares of relative errors."""
    least = {a.tp: a.least for a in reduces} | {1: 0.0}
    terms, beyond = [], []
    for step in steps:
        sizes = Sizes.of_facts(facts(step.model))
        device = reading * sizes.pass_bytes / hardware.memory_bandwidth / step.tp
        device += layer_seconds * sizes.layers
        rounds = 2 * sizes.layers * least[step.tp]
        terms.append([1e-5 * sizes.layers / step.seconds, rounds / step.seconds])
        beyond.append(max(0.0, 1 - device / step.seconds))
    layer, all_reduce = nnls(np.array(terms), np.array(beyond))[0]
    return 1e-5 * float(layer), float(all_reduce)


def all_reduce_bytes(reduces: Sequence[AllReduce], least: float) -> float:
    """How much longer a byte takes in ALL_REDUCES than over NCCL, whose least time they take
    `least` times: least squares of relative errors, never shorter."""
    by_size = {a.tp: a for a in reduces}
    terms, beyond = [], []
    for tp, measured in ALL_REDUCES.items():
        for n, seconds in enumerate(1e-6 * us for us in measured):
            terms.append(by_size[tp].per_byte * ALL_REDUCES_FROM * 2**n / seconds)
            beyond.append(1 - least * by_size[tp].least / seconds)
    return max(0.0, float(np.dot(terms, beyond) / np.dot(terms, terms)))


def graphs_engine(
    steps: Sequence[Stated], all_reduce: float, reduces: Sequence[AllReduce]
) -> EngineProfile:
    """The engine that replays graphs, as `steps` show it, and its all-reduces; `reduces`: NCCL's on
    the same device."""
    shortest = min(step.seconds for step in steps)
    return EngineProfile(
        served_by="engines of today (vLLM, SGLang): decode steps are CUDA graphs, scheduled ahead",
        host=EngineHostCosts(
            step_seconds=shortest,
            all_reduce=all_reduce,
            all_reduce_bytes=all_reduce_bytes(reduces, all_reduce),
            graphs=True,
            steps_ahead=1,
        ),
        answer_seconds=ANSWER_SECONDS,
        not_held=NOT_HELD,
        source=f"{STEPS_SOURCE}; step_seconds is the shortest of them, and so an upper bound; "
        f"all_reduce_bytes: {ALL_REDUCES_SOURCE}; {ANSWER_SOURCE}",
        assumed=["step_seconds", "sequence_seconds", "layer_seconds", "group_layer_seconds"],
    )


def sglang_engine(graphs: EngineProfile) -> EngineProfile:
    """The same costs in an engine that computes prompts before it decodes on."""
    return graphs.model_copy(
        update={
            "served_by": "SGLang's order: prompts are computed before decodes; costs are those of "
            "graphs",
            "prefill_first": True,
            "not_held": "any run of it: its costs are those of graphs; its order, where the preset "
            "orders jobs by deadline",
        }
    )


def page_seconds(to_device: float) -> float:
    """What a page of 2 MiB takes beyond its copy at `to_device` bytes per second: the mean over
    the stated activations."""
    return statistics.fmean(
        2 * MiB * (seconds / (2 * facts(model).parameters) - 1 / to_device)
        for model, seconds in ACTIVATIONS
    )


def fitted_reading(measured: Sequence[Measured], hardware: Hardware, layer_seconds: float) -> float:
    """Fit `KernelReach.reading` to decode steps, for a device whose kernels nobody timed."""
    terms = np.vstack([decode_terms(m.sizes, m.decode, hardware) for m in measured])
    seconds = np.concatenate([m.decode.seconds for m in measured])
    return fit_beside(terms, seconds, layer_seconds).reading


def reach_of_kernels(timed: Sequence[Kernels], derate: Derate, attention: float) -> KernelReach:
    """Derive what a device reaches whose kernels were timed. Arithmetic is that of whole prefills,
    which `derate` has; `attention`: seconds of a layer's over a short KV."""
    layer, reading = kernels_reach(timed)
    return KernelReach(
        layer_seconds=layer + attention,
        reading=reading,
        start=statistics.median(k.uncovered for k in timed if k.tp == 1),
        arithmetic=derate.arithmetic,
        attention=derate.attention,
        tile=derate.tile,
        source="vidur's kernels (layer_seconds but for attention, reading, start); aegaeon's "
        "prefills and decode steps (the rest)",
    )


def reach_like(
    reaches: Sequence[KernelReach], derate: Derate, reading: float, *, measured: bool
) -> KernelReach:
    """Derive that of a device whose kernels nobody timed: the median of `reaches`; `reading` and
    `derate` are its own if it is `measured`, else other devices' median."""
    assumed = ["layer_seconds", "start"]
    source = "aegaeon's prefills and decode steps, and others' kernels"
    if not measured:
        assumed += ["reading", "arithmetic", "attention", "tile"]
        source = "other devices' median"
    return KernelReach(
        layer_seconds=statistics.median(r.layer_seconds for r in reaches),
        reading=reading,
        start=statistics.median(r.start for r in reaches),
        arithmetic=derate.arithmetic,
        attention=derate.attention,
        tile=derate.tile,
        source=source,
        assumed=assumed,
    )
