"""State in models' settings what a workload will ask of them, as an operator who knows it would.

Used wherever a benchmark runs a workload that is known beforehand, so that presets that give models
fixed places give them to those with the most work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.workload.workload import Workload


def expecting(fleet: FleetSettings, workload: Workload) -> FleetSettings:
    """Return the fleet with what the workload asks of each model, where the fleet does not state
    it: tokens per second, and the tokens of its longest request."""
    models = tuple(
        replace(m, **expected_of(m, [m.name, *(a.name for a in m.adapters)], workload))
        for m in fleet.models
    )
    return replace(fleet, models=models)


def specs_expecting(specs: Iterable[ModelSpec], workload: Workload) -> list[ModelSpec]:
    """Return the specs with the same."""
    return [replace(s, **expected_of(s, [m.name for m in s.served], workload)) for s in specs]


def expected_of(
    model: ModelSpec | ModelSettings, names: Sequence[str], workload: Workload
) -> dict[str, Any]:
    """Return the settings that state what a workload asks of the model of these `names`, its
    adapters' included; what is stated stays."""
    tokens = [r.prompt_tokens + r.output_tokens for r in workload.requests if r.model in names]
    return {
        "expected_tokens": model.expected_tokens or sum(tokens) / max(workload.seconds, 1.0),
        "expected_longest": model.expected_longest or max(tokens, default=0),
    }
