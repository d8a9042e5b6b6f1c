"""Choose the next model by orders that ignore service levels: round robin, or first come first
served.

Round robin is the compute policy of most presets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.compute import ComputeDecision, ComputeView, Phase, Runnable
from ballast.core.request import Precedence
from ballast.policy.base import ComputePolicy
from ballast.policy.memory.temporal_sharing import ModelTurn


@dataclass(frozen=True, slots=True)
class RoundRobin(ComputePolicy):
    """Run the least recently run model; of models that have never run, the one with the oldest
    request.

    `separate`: prompts are computed in jobs of their own, before the model decodes on; else prompt
    chunks share jobs with its decode steps.
    """

    separate: float = 0

    @property
    def in_turns(self) -> bool:
        return True

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        last = (float("inf"),)
        chosen = min(view.runnable, key=lambda r: (r.last_run, r.first_prompt or last, r.model))
        return ComputeDecision(chosen.model, phase=_phase(chosen, self.separate))


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed(ComputePolicy):
    """Run the model with the oldest of the most important requests that can go on, with its other
    requests in the same batch, until that request has ended.

    As AlpaServe (Li et al., 2023), which MuxServe compares with (section 4.1). `longest_turn`,
    unless 0: most seconds of that; then the model with the oldest request of the other models is
    next. `separate`: as of `RoundRobin`.
    """

    separate: float = 0
    longest_turn: float = 0

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        if not self.longest_turn or any(r.moves_kv for r in view.runnable):
            return self._job(_first(view, view.runnable), math.inf, memo)
        turn = memo if isinstance(memo, ModelTurn) else ModelTurn("", -math.inf)
        runnable = {r.model: r for r in view.runnable}
        if view.now < turn.since + self.longest_turn and turn.model in runnable:
            return self._job(runnable[turn.model], turn.since + self.longest_turn, turn)
        chosen = _first(view, [r for r in view.runnable if r.model != turn.model] or view.runnable)
        if all(job.model != turn.model for job in view.in_flight):
            turn = ModelTurn(chosen.model, view.now)
        return self._job(chosen, turn.since + self.longest_turn, turn)

    def _job(self, chosen: Runnable, until: float, memo: object) -> ComputeDecision:
        """Return the chosen model's next job, and if it only decodes, let further ones follow
        `until` then."""
        until = until if chosen.first_prompt is None else -math.inf
        return ComputeDecision(
            chosen.model, until=until, memo=memo, phase=_phase(chosen, self.separate)
        )


def _first(view: ComputeView, models: Sequence[Runnable]) -> Runnable:
    """Return a model whose next job moves KV, which others may wait for; else the one with the
    oldest of the most important requests."""
    return min(models, key=lambda r: (not r.moves_kv, _oldest(view, r), r.model))


def _oldest(view: ComputeView, r: Runnable) -> Precedence:
    """Return the precedence of a model's first request that its next job could compute."""
    if r.moves_kv:
        return _NOBODY
    work = view.work_of(r.model)
    orders = [*(d.order for d in work.decodes), *(p.order for p in work.prompts)]
    return min(orders, default=_NOBODY)


_NOBODY = Precedence(0, -math.inf, 0)


def _phase(chosen: Runnable, separate: float) -> Phase:
    if not separate:
        return Phase.MIXED
    return Phase.DECODE if chosen.first_prompt is None else Phase.PREFILL
