"""What `mirage_live` serves: two models in too little memory, bursts, links paced to a ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.bench.inprocess import InProcess
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.sim.profile import device_profile
from ballast.workload.generators import assemble
from ballast.workload.lengths import LogNormal
from ballast.workload.workload import Workload
from benchmarks.exactness import make_llama
from benchmarks.mirage_setting import C1, ENGINE, MEMORY, SHAREGPT, Device, specs_of

PAGE = 288 * KiB
"""A block of four tokens: larger ones would be too few in so small a budget."""
NAMES = ("a", "b")
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
KV_PART = 0.1
"""Of the memory that weights and KV have; the paper's C1 has a quarter, C2 a tenth."""
PROMPT = LogNormal.of_cv(32.0, 0.4, 64)
OUTPUT = LogNormal.of_cv(64.0, 0.4, 128)
CV = 4.0
"""Of the gaps between arrivals of a model."""
BATCH = 16
"""Sequences of a model beyond which a decode step gains little here."""
LINKS = {"GH200": "GH200-96G", "PCIe 5": "H100-80G"}
"""Whose ratio of a layer's copy to its work a link is paced to."""


@dataclass(frozen=True)
class Setting:
    """Everything that does not depend on preset and link."""

    fleet: FleetSettings
    """With the budget; its link is not paced."""
    spec: ModelSpec
    """Of either model, but for its name."""
    kv_tokens: int
    """Of each model's share of the KV."""
    step: float
    """Seconds of a decode step of as many sequences as fill that share."""
    rate: float
    """Requests per second that the device could serve, were there memory for `BATCH` sequences."""

    @property
    def layer_bytes(self) -> int:
        return self.spec.segment_bytes[1]

    def pace(self, ratio: float) -> LinkSettings:
        """A link that copies a layer in `ratio` times its part of a decode step; both ways at once
        it carries 366/427 of that in all, as GH200's does (MIRAGE, 3.2)."""
        one_way = paced(self.layer_bytes, self.step / self.spec.n_layers, ratio)
        return LinkSettings(bytes_per_second=one_way, mixed_bytes_per_second=366 / 427 * one_way)

    def to_json(self) -> dict[str, float]:
        """Times in milliseconds."""
        result = {
            "step_ms": 1e3 * self.step,
            "layer_ms": 1e3 * self.step / self.spec.n_layers,
            "layer_bytes": self.layer_bytes,
            "weight_bytes": len(NAMES) * self.spec.weight_bytes,
            "kv_tokens": self.kv_tokens,
            "requests_per_second": self.rate,
        }
        for name, kind in LINKS.items():
            result[f"ratio {name}"] = ratio_of(kind)
            result[f"bytes_per_second {name}"] = self.pace(ratio_of(kind)).bytes_per_second or 0.0
        return result

    def under(self, preset: str, options: Mapping[str, float], ratio: float) -> FleetSettings:
        return replace(self.fleet, preset=preset, options=dict(options), link=self.pace(ratio))


def ratio_of(kind: str) -> float:
    """Copy of a layer of OPT-13b over its part of a decode step on such a device, at the batch that
    fills its KV in the paper's C1, with ShareGPT's requests."""
    device = Device(device_profile(kind, ENGINE), MEMORY[kind])
    spec = next(s for s in specs_of(C1, device.memory) if s.name == "OPT-13b")
    rng = np.random.default_rng(0)
    prompt, output = (float(lengths.sample(rng, 10_000).mean()) for lengths in SHAREGPT)
    n = filling(int(spec.share / spec.kv_bytes_per_token), prompt, output)
    context = round(n * (prompt + output / 2))
    step = device.costs(spec.name).of(JobLoad(0, 0, 0, n, context))
    return spec.segment_bytes[1] / device.rates.to_device / (step / spec.n_layers)


def filling(kv_tokens: int, prompt: float, output: float) -> int:
    """Sequences, half-way through their answers, that fill so much KV."""
    return max(1, round(kv_tokens / (prompt + output / 2)))


def prepare(scratch: Path) -> Setting:
    """Make the models, set the memory, and measure a decode step and what can be served."""
    models = tuple(
        ModelSettings(
            name=name,
            path=str(make_llama(scratch / name, seed, **SIZES)),
            dtype="bfloat16",
            model_impl="fused",
        )
        for seed, name in enumerate(NAMES)
    )
    # One thread computes, so that the link's copies have the other core, as on a GPU they have
    # engines of their own.
    device = DeviceSettings(
        budget_bytes=1024 * MiB,
        page_bytes=PAGE,
        threads=1,
        step_tokens=128,
        step_logits=64,
        prefix_cache=False,
    )
    roomy = FleetSettings(models=models, device=device, preset="recompute")
    with InProcess(roomy) as server:
        server.device.populate()
        state = server.device.state
        spec = state.models[NAMES[0]].spec
        weights = sum(m.weights.pages for m in state.models.values())
        kv_pages = round(weights * KV_PART / (1 - KV_PART))
        budget = (state.arena.pages + weights + kv_pages) * device.page_bytes
        kv_tokens = kv_pages * device.page_bytes // len(NAMES) // spec.kv_bytes_per_token
        n = filling(kv_tokens, PROMPT.mean, OUTPUT.mean)
        batches(server, 1, 8)
        step, _ = batches(server, n, 48)
        again, _ = batches(server, n, 48)
        least, prefill = batches(server, BATCH, 32)
    fleet = replace(roomy, device=replace(device, budget_bytes=budget))
    request = prefill / BATCH + OUTPUT.mean * least / BATCH
    step = (step + again) / 2
    return Setting(fleet, spec, kv_tokens, step, 1 / request)


def paced(layer_bytes: int, layer_seconds: float, ratio: float) -> float:
    """Bytes per second at which a layer is copied in `ratio` times its work."""
    return layer_bytes / (ratio * layer_seconds)


def batches(server: InProcess, n: int, new_tokens: int) -> tuple[float, float]:
    """Seconds of a decode step of `n` sequences of average length, and until all have begun."""
    prompt = round(PROMPT.mean + max(0.0, OUTPUT.mean - new_tokens) / 2)
    asked = [
        Submission(
            id=f"{server.now}-{i}",
            model=NAMES[0],
            prompt=tuple((i * 7 + j * 13) % 499 for j in range(prompt)),
            max_tokens=new_tokens,
            ignore_eos=True,
        )
        for i in range(n)
    ]
    began = server.now
    answers = server.generate(asked).values()
    begun = max(a.times[0] for a in answers)
    gaps = [
        b - a
        for answer in answers
        for a, b in zip(answer.times, answer.times[1:], strict=False)
        if a >= begun
    ]
    return float(np.median(gaps)), (begun - began) * PROMPT.mean / prompt


def bursts(rate: float, seconds: float, seed: int) -> Workload:
    """Each model's half of the requests, their gaps drawn from a Gamma distribution, then scaled so
    that they take `seconds`: seeds differ in when requests come, not in how many."""
    n = max(2, round(rate * seconds / len(NAMES)))
    arrivals = []
    for place in range(len(NAMES)):
        at = np.random.default_rng([seed, place, 2]).gamma(1 / CV**2, 1.0, n).cumsum()
        arrivals.append(at * (seconds / at[-1]))
    source = f"generated: {n} requests a model in {seconds:g} s, CV {CV:g}, seed {seed}"
    return assemble("bursts", NAMES, arrivals, PROMPT, OUTPUT, seed, source)
