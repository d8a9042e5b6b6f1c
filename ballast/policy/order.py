"""Models take turns job by job, whoever is in a hurry."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.compute import ComputeDecision, ComputeView, Phase
from ballast.policy.base import ComputePolicy


@dataclass(frozen=True, slots=True)
class RoundRobin(ComputePolicy):
    """The least recently run model; of those that have never run, the oldest request's first.

    `separate`: prompts are computed in jobs of their own, before the model decodes on; else chunks
    of them share jobs with its decode steps.
    """

    separate: float = 0

    @property
    def in_turns(self) -> bool:
        return True

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        last = (float("inf"),)
        chosen = min(view.runnable, key=lambda r: (r.last_run, r.first_prompt or last, r.model))
        phase = Phase.MIXED
        if self.separate:
            phase = Phase.DECODE if chosen.first_prompt is None else Phase.PREFILL
        return ComputeDecision(chosen.model, phase=phase)
