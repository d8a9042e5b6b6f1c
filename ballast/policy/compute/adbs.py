"""Run one prefill at a time, and decode steps of other models on the compute that it leaves.

Adaptive batch scheduling of MuxServe (Duan et al., 2024), section 3.3, Algorithm 3: the compute
policy of preset `muxserve`, whose memory policy is `ballast.policy.memory.quotas`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.core.compute import ComputeDecision, ComputeView, Phase, Runnable, WorkView
from ballast.core.job import JobLoad
from ballast.policy.base import ComputePolicy


@dataclass(frozen=True, slots=True)
class Rounds:
    """Memo: state that one decision leaves to the next."""

    past: tuple[str, ...] = ()
    """Models whose prompts have been computed, the latest last."""
    owed: bool = False
    """Whether a decode step ran although a prefill could have: the prefill is next."""

    def prefilled(self, model: str) -> Rounds:
        """Return the memo after prompts of a model were computed."""
        return Rounds((*(name for name in self.past if name != model), model))


@dataclass(frozen=True, slots=True)
class AdaptiveBatches(ComputePolicy):
    """Run prompts first, one prefill in flight on the device, models in turn; decodes fill the
    rest.

    While a prompt could be computed or is, decode steps share at most `decode_share` of the
    device's compute, and the prefill has the rest; a device's compute is divided into whole parts,
    each job having at least one. Otherwise decode steps share all of it.

    A prefill that finds too few parts free stops further decode steps from starting. That lasts no
    longer than the jobs in flight at that time, as nothing begins before it; the published code can
    wait for a decode to end that it stops itself. A prefill without memory for its KV stops none:
    decodes will free memory. A model whose streams have waited for `longest_gap` seconds, or for
    twice the time of a step of every model if that is longer, decodes before the next prefill,
    unless they decode in it; then a prefill follows. So neither kind of work starves, even on one
    lane.

    A model has one job at a time, in which its own streams decode beside its prompts: prefill and
    decode of one model share one copy of its weights, and one pass over them. `separate`: prompts
    are computed in jobs of their own instead.
    """

    decode_share: float = 0.5
    longest_gap: float = 0.2
    separate: float = 0

    @property
    def in_turns(self) -> bool:
        return True

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision | None:
        rounds = memo if isinstance(memo, Rounds) else Rounds()
        for r in view.runnable:
            if r.moves_kv:  # others may wait for this job
                return ComputeDecision(r.model, memo=rounds)
        prefilling = any(job.prefills for job in view.in_flight)
        prompts = [r for r in view.runnable if r.first_prompt is not None]
        if not prompts and not prefilling:
            return ComputeDecision(_next(view.runnable).model, memo=rounds)
        works = {r.model: view.work_of(r.model) for r in view.runnable}
        decodes = [r for r in view.runnable if works[r.model].decodes]
        if prompts and not prefilling:
            chosen = _next_prefill(prompts, rounds)
            pausing = decodes if self.separate else [r for r in decodes if r is not chosen]
            overdue = None if rounds.owed else self._overdue(view.now, pausing, works)
            if overdue is not None:
                return _step(overdue, Rounds(rounds.past, owed=True), self._parts_of_step(view))
            return self._prefill(view, chosen, decodes, rounds)
        return _step(_next(decodes), rounds, self._parts_of_step(view)) if decodes else None

    def _prefill(
        self,
        view: ComputeView,
        chosen: Runnable,
        decodes: Sequence[Runnable],
        rounds: Rounds,
    ) -> ComputeDecision | None:
        """Return a model's prefill; None while it waits for its part of the device."""
        beside = view.lanes > 1 and (view.in_flight or any(r is not chosen for r in decodes))
        parts = view.parts - self._share(view) if beside else view.parts
        if view.in_flight and view.free_parts < parts:
            return None
        phase = Phase.PREFILL if self.separate else Phase.MIXED
        memo = rounds.prefilled(chosen.model)
        return ComputeDecision(chosen.model, memo=memo, phase=phase, parts=parts)

    def _overdue(
        self, now: float, decodes: Sequence[Runnable], works: Mapping[str, WorkView]
    ) -> Runnable | None:
        """Return the model whose streams have waited longest for a token, if that is too long."""
        waited: list[tuple[float, Runnable]] = []
        steps = 0.0
        for r in decodes:
            work = works[r.model]
            last = min((d.last for d in work.decodes if d.first is not None), default=now)
            waited.append((last, r))
            context = sum(d.context for d in work.decodes)
            steps += work.costs.of(JobLoad(0, 0, 0, len(work.decodes), context))
        gap = max(self.longest_gap, 2 * steps)
        last, found = min(waited, key=lambda lr: (lr[0], lr[1].model), default=(now, None))
        return found if now - last >= gap else None

    def _share(self, view: ComputeView) -> int:
        """Return the parts that decode steps share beside a prefill."""
        return max(1, min(view.parts - 1, round(self.decode_share * view.parts)))

    def _parts_of_step(self, view: ComputeView) -> int | None:
        """Return the parts of each decode step beside a prefill; None: no limit."""
        return None if view.lanes == 1 else max(1, self._share(view) // (view.lanes - 1))


def _next_prefill(prompts: Sequence[Runnable], rounds: Rounds) -> Runnable:
    """Return the model whose prompts were computed longest ago."""
    last = {model: i for i, model in enumerate(rounds.past)}
    return min(prompts, key=lambda r: (last.get(r.model, -1), r.first_prompt or (), r.model))


def _next(decodes: Sequence[Runnable]) -> Runnable:
    """Return the model whose last job ended longest ago."""
    return min(decodes, key=lambda r: (r.last_run, r.model))


def _step(r: Runnable, rounds: Rounds, parts: int | None) -> ComputeDecision:
    return ComputeDecision(r.model, memo=rounds, phase=Phase.DECODE, parts=parts)
