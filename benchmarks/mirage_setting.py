"""What `mirage_sim` serves: MIRAGE's devices, models and requests (7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.core.cost import StepCosts
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.core.units import MiB
from ballast.kv.layout import fitted
from ballast.sim.model_catalogue import facts
from ballast.sim.profile import DeviceProfile
from ballast.sim.roofline import Sizes, roofline
from ballast.weights.page_size import gpu_page
from ballast.workload.generators import spread_models
from ballast.workload.lengths import (
    ALPACA_OUTPUT,
    ALPACA_PROMPT,
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    LengthSampler,
    LogNormal,
)
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload

ARRIVALS = "azure2023_code_until1845.csv.gz"
ENGINE = "eager"
"""What the tables were made with, of the paper's time. Whether its vLLM replayed CUDA graphs, the
paper does not say."""
MEMORY = {"GH200-96G": 96 << 30, "H100-80G": 80 << 30}
"""Bytes of a device. Of 96e9, 65 % would leave OPT-30b KV for less than its own context."""
STEP_TOKENS = 2048
"""Most tokens of a step. vLLM 0.7.3 takes the larger of 2,048 and a model's context where prompts
are not cut into chunks, which is 4,096 for Llama-2-13b and 8,192 for Llama-3-8b."""
SERVED = DeviceSettings(
    budget_bytes=0,
    page_bytes=2 * MiB,
    step_tokens=STEP_TOKENS,
    prefix_cache=False,
)
"""As vLLM 0.7.3 serves, without a prefix cache."""
CONTEXT = 2048
"""Tokens of prompt and answer that each model can hold: OPT's. Llama-2-13b can 4,096 and Llama-3-8b
8,192; no request here is longer than 2,024."""

Lengths = tuple[LengthSampler, LengthSampler]
"""Of prompts, of answers."""
ALPACA: Lengths = ALPACA_PROMPT, ALPACA_OUTPUT
SHAREGPT: Lengths = SHAREGPT_PROMPT, SHAREGPT_OUTPUT
ANSWERS = LogNormal.of_cv(180.0, 0.3, 256)
"""To synthetic prompts; the paper does not say. All together fit OPT's 2,048 tokens."""
LONG: Lengths = LogNormal.of_median(1784.0, 1766.0, 1792), ANSWERS
SHORT: Lengths = LogNormal.of_median(636.0, 617.0, 1024), ANSWERS

Fractions = Mapping[str, float]
"""Of the device's memory, by model: its weights and its KV."""
C1: Fractions = {"OPT-13b": 0.35, "Llama-2-13b": 0.35, "Llama-3-8b": 0.2}
C2: Fractions = {"OPT-30b": 0.65, "OPT-6.7b": 0.15}
ALONE: Fractions = {"OPT-13b": 0.35}


@dataclass(frozen=True, slots=True)
class Device:
    """What the models run on."""

    profile: DeviceProfile
    memory: int
    link: LinkRates | None = None
    """In place of the profile's."""

    def sliced(self, part: float) -> Device:
        """An instance of it alone: so much of its memory, compute, bandwidth and link. Hardware
        divides no link; instances share it as they come."""
        hardware, link = self.profile.hardware, self.rates
        assert hardware is not None
        less = {"memory_bandwidth", "flops"}
        own = hardware.model_copy(update={k: part * getattr(hardware, k) for k in less})
        rates = LinkRates(
            *(part * r for r in (link.to_device, link.to_host)),
            *(part * r for r in (link.to_device_mixed, link.to_host_mixed)),
        )
        profile = self.profile.model_copy(update={"hardware": own})
        return Device(profile, int(part * self.memory), rates)

    @property
    def rates(self) -> LinkRates:
        return self.link or self.profile.link.rates

    def costs(self, model: str) -> StepCosts:
        """By the roofline, for all models alike."""
        hardware, derate = self.profile.hardware, self.profile.serving.derate
        assert hardware is not None
        assert derate is not None
        return roofline(Sizes.of_facts(facts(model)), hardware, derate)


@dataclass(frozen=True, slots=True)
class Setting:
    """Who is asked what, and where."""

    fractions: Fractions
    lengths: Mapping[str, Lengths]
    weights: Mapping[str, float]
    """Of requests, each model's part, in any unit."""
    apart: bool = False
    """Every model has its own slice of the device (MIG); else they share it."""
    page: int | None = None
    """MiB of a page; None: as for the models by default (`page: auto`), with blocks that fit."""

    @classmethod
    def of(cls, fractions: Fractions, lengths: Lengths, apart: bool = False) -> Setting:
        """All models are asked alike."""
        return cls(
            fractions, dict.fromkeys(fractions, lengths), dict.fromkeys(fractions, 1.0), apart
        )

    def requests(self, arrivals: Workload, rate: float, seed: int) -> Workload:
        """`arrivals` in `rate` requests per second, spread over the models, with their lengths."""
        names = list(self.fractions)
        spread = spread_models(arrivals, names, [self.weights[n] for n in names], seed)
        now = len(spread.requests) / spread.seconds
        drawn = []
        for place, name in enumerate(names):
            own = [r for r in spread.requests if r.model == name]
            prompt, output = self.lengths[name]
            rng = np.random.default_rng([seed, place])
            n = len(own)
            columns = prompt.sample(rng, n).tolist(), output.sample(rng, n).tolist()
            drawn += [
                replace(r, at=r.at * now / rate, prompt_tokens=p, output_tokens=o)
                for r, p, o in zip(own, *columns, strict=True)
            ]
        return Workload.of(f"{arrivals.name} at {rate:g}/s", drawn, arrivals.source)


def arrivals_in(traces: Path, start: float, seconds: float) -> Workload:
    """Azure's coding requests of these seconds of the trace: when they came."""
    return load_trace(traces / ARRIVALS, "azure").window(start, start + seconds)


def specs_of(
    fractions: Fractions, memory: int, sequences: int = 256, page_bytes: int | None = None
) -> list[ModelSpec]:
    """Models whose shares of the KV's memory are what their weights leave of their fractions.

    `page_bytes`: which whole blocks fill; None: blocks of 16 tokens, in pages of 2 MiB."""
    specs = []
    for name, part in fractions.items():
        spec = facts(name).spec(max_model_len=CONTEXT, max_running=sequences)
        if page_bytes is not None:
            spec = fitted(spec, None, page_bytes)
        page = page_bytes or SERVED.page_bytes
        specs.append(replace(spec, share=part * memory - spec.weight_pages(page) * page))
    return specs


def page_by_default(fractions: Fractions, memory: int) -> int:
    """Return the bytes of a page that a GPU of these models has by default."""
    segments = [spec.segment_bytes for spec in specs_of(fractions, memory)]
    return gpu_page(segments, int(sum(fractions.values()) * memory))
