"""State in models' settings what a workload will ask of them, as an operator who knows it would.

Used wherever a benchmark runs a workload that is known beforehand, so that presets that give models
fixed places give them to those with the most work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.workload.workload import Workload


def expecting(fleet: FleetSettings, workload: Workload) -> FleetSettings:
    """Return the fleet with the tokens per second that the workload asks of each model, where the
    fleet does not state them."""
    rates = tokens_per_second(workload)
    models = tuple(replace(m, expected_tokens=_of(m, _names(m), rates)) for m in fleet.models)
    return replace(fleet, models=models)


def specs_expecting(specs: Iterable[ModelSpec], workload: Workload) -> list[ModelSpec]:
    """Return the specs with the same."""
    rates = tokens_per_second(workload)
    return [replace(s, expected_tokens=_of(s, [m.name for m in s.served], rates)) for s in specs]


def tokens_per_second(workload: Workload) -> Mapping[str, float]:
    """Return the tokens of prompts and outputs per second that are asked of each model."""
    tokens: Counter[str] = Counter()
    for r in workload.requests:
        tokens[r.model] += r.prompt_tokens + r.output_tokens
    seconds = max(workload.seconds, 1.0)
    return {model: n / seconds for model, n in tokens.items()}


def _names(m: ModelSettings) -> Sequence[str]:
    """Names in workloads of a model and its adapters."""
    return [m.name, *(a.name for a in m.adapters)]


def _of(
    model: ModelSpec | ModelSettings, names: Sequence[str], rates: Mapping[str, float]
) -> float:
    return model.expected_tokens or sum(rates.get(name, 0.0) for name in names)
