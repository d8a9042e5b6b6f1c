"""Runs of a server that others measured and published: lengths, rates, and what clients saw.

Used by `benchmarks.sim_published`. Facts only: means of each run, from the files named in SOURCE.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.sim.model_catalogue import ModelFacts, facts

SOURCE = (
    "github.com/inference-sim/training, c4f0340, default_args/*/results/stage_*: vLLM's defaults "
    "(2,048 tokens a step, prefix cache), FP16, H100 SXM; clients of inference-perf over HTTP, "
    "arrivals at a constant rate; means of 3,000 to 12,000 requests each"
)
DEVICE = "H100-80G"
PROMPTS = 45
"""Distinct prompts, which recur: after their first time they are in the prefix cache."""
SYSTEM_PROMPT = 100
"""Tokens that prompts of nine to eleven groups of clients have in common."""
CODELLAMA = ModelFacts(
    name="CodeLlama-34b",
    parameters=33_743_970_304,
    active_parameters=33_743_970_304,
    layers=48,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=22016,
    vocab=32000,
)


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One run, at one rate. Seconds and tokens; means."""

    model: str
    tp: int
    workload: str
    rate: float
    prompt: int
    output: int
    """As asked for: the end of a text was ignored."""
    ttft: float
    latency: float
    """From a request to its last token."""

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output - 1)

    @property
    def sizes(self) -> ModelFacts:
        return CODELLAMA if self.model == CODELLAMA.name else facts(self.model)


RUNS = (
    PublishedRun("Llama-2-7b", 1, "codegen", 5, 592, 247, 0.02504, 1.8103),
    PublishedRun("Llama-2-7b", 1, "codegen", 10, 592, 247, 0.02945, 2.2159),
    PublishedRun("Llama-2-7b", 1, "roleplay", 6, 786, 251, 0.02713, 2.0711),
    PublishedRun("Llama-2-7b", 1, "general", 20, 575, 248, 0.05185, 4.1581),
    PublishedRun("CodeLlama-34b", 2, "general", 8, 574, 248, 0.04602, 3.6944),
    PublishedRun("CodeLlama-34b", 2, "codegen", 10, 593, 247, 0.04614, 3.7791),
    PublishedRun("CodeLlama-34b", 2, "roleplay", 6, 787, 251, 0.04568, 3.6697),
    PublishedRun("Llama-2-70b", 4, "general", 8, 575, 248, 0.05739, 4.6784),
    PublishedRun("Llama-2-70b", 4, "general", 20, 575, 248, 0.12127, 5.5775),
    PublishedRun("Llama-2-70b", 4, "codegen", 10, 593, 247, 0.05668, 4.7418),
    PublishedRun("Llama-2-70b", 4, "roleplay", 6, 787, 251, 0.05475, 4.5616),
)
