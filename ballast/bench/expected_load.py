"""State in models' settings what a workload will ask of them, as an operator who knows it would.

Used wherever a benchmark runs a workload that is known beforehand, so that presets that give models
fixed places give them to those with the most work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.workload.workload import Workload


def expecting(fleet: FleetSettings, workload: Workload) -> FleetSettings:
    """Return the fleet with what the workload asks of each model, where the fleet does not state
    it: tokens per second, and the tokens of its longest request."""
    asked = request_tokens(workload)
    models = tuple(
        replace(m, **expected_of(m, [m.name, *(a.name for a in m.adapters)], asked))
        for m in fleet.models
    )
    return replace(fleet, models=models)


def specs_expecting(specs: Iterable[ModelSpec], workload: Workload) -> list[ModelSpec]:
    """Return the specs with the same."""
    asked = request_tokens(workload)
    return [replace(s, **expected_of(s, [m.name for m in s.served], asked)) for s in specs]


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """Tokens of the requests of a workload that lasts `seconds`, by model."""

    by_model: Mapping[str, Sequence[int]]
    seconds: float


def request_tokens(workload: Workload) -> RequestTokens:
    """Return the tokens of each request, prompt and output together."""
    tokens: dict[str, list[int]] = {}
    for r in workload.requests:
        tokens.setdefault(r.model, []).append(r.prompt_tokens + r.output_tokens)
    return RequestTokens(tokens, max(workload.seconds, 1.0))


def expected_of(
    model: ModelSpec | ModelSettings, names: Sequence[str], asked: RequestTokens
) -> dict[str, Any]:
    """Return the settings that state what is asked of the model of these `names`, its adapters'
    included; what is stated stays."""
    tokens = [n for name in names for n in asked.by_model.get(name, ())]
    return {
        "expected_tokens": model.expected_tokens or sum(tokens) / asked.seconds,
        "expected_longest": model.expected_longest or max(tokens, default=0),
    }
