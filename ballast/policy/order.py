"""Models take turns job by job, whoever is in a hurry."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.compute import ComputeDecision, ComputeView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The least recently run model; of those that have never run, the oldest request's first."""

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        last = (float("inf"),)
        chosen = min(view.runnable, key=lambda r: (r.last_run, r.first_prompt or last, r.model))
        return ComputeDecision(chosen.model)
