"""Orders of compute that know no service levels: in turns, and first come first served."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ballast.core.compute import ComputeDecision, ComputeView, Phase, Runnable
from ballast.core.request import Order
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
        return ComputeDecision(chosen.model, phase=_phase(chosen, self.separate))


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed(ComputePolicy):
    """The model with the oldest of the most important requests that can go on, its others beside
    it, until that request has ended (AlpaServe, Li et al., 2023, as MuxServe compares with it:
    section 4.1). Options as of `RoundRobin`.
    """

    separate: float = 0

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        chosen = min(view.runnable, key=lambda r: (not r.moves_kv, _oldest(view, r), r.model))
        until = math.inf if chosen.first_prompt is None else -math.inf
        return ComputeDecision(chosen.model, until=until, phase=_phase(chosen, self.separate))


def _oldest(view: ComputeView, r: Runnable) -> Order:
    """The request of a model that comes first of those it could go on with."""
    if r.moves_kv:
        return _NOBODY
    work = view.work_of(r.model)
    orders = [*(d.order for d in work.decodes), *(p.order for p in work.prompts)]
    return min(orders, default=_NOBODY)


_NOBODY = Order(0, -math.inf, 0)


def _phase(chosen: Runnable, separate: float) -> Phase:
    if not separate:
        return Phase.MIXED
    return Phase.DECODE if chosen.first_prompt is None else Phase.PREFILL
