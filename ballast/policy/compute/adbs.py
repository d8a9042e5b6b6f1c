"""Run one prefill at a time, and decode steps of other models on the compute that it leaves.

Adaptive batch scheduling of MuxServe (Duan et al., 2024), section 3.3, Algorithm 3: the compute
policy of preset `muxserve`, whose memory policy is `ballast.policy.memory.quotas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ballast.core.compute import ComputeDecision, ComputeView, Phase, Runnable, WorkView
from ballast.core.job import JobLoad
from ballast.policy.base import ComputePolicy
from ballast.policy.compute.decode_shares import least_parts

RENEWED = 5.0
"""Seconds after which a model's part of compute is computed anew."""


class DecodeParts(NamedTuple):
    """Parts of the device's compute that a model's decode steps have beside a prefill."""

    parts: int
    since: float
    """When they were computed, in seconds."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Memo: state that one decision leaves to the next."""

    past: tuple[str, ...] = ()
    """Models whose prompts have been computed, the latest last."""
    owed: bool = False
    """Whether a decode step ran although a prefill could have: the prefill is next."""
    decodes: Mapping[str, DecodeParts] = field(default_factory=dict)
    """By model."""

    def prefilled(self, model: str) -> Rounds:
        """Return the memo after prompts of a model were computed."""
        past = (*(name for name in self.past if name != model), model)
        return replace(self, past=past, owed=False)


@dataclass(frozen=True, slots=True)
class AdaptiveBatches(ComputePolicy):
    """Run prompts first, one prefill in flight on the device, models in turn; decodes fill the
    rest.

    While a prompt could be computed or is, each model's decode steps have the least part of the
    device's compute on which it serves its rate alone (Algorithm 2 in section 3.2, on what has been
    seen of its requests and jobs), or all of them `decode_share` between them if that is not 0. The
    prefill has the rest; a device's compute is divided into whole parts, each job having at least
    one. Otherwise decode steps share all of it.

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

    decode_share: float = 0
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
        if view.lanes > 1 and not self.decode_share:
            rounds = _renewed(view, [works[r.model] for r in decodes], rounds)
        if prompts and not prefilling:
            chosen = _next_prefill(prompts, rounds)
            pausing = decodes if self.separate else [r for r in decodes if r is not chosen]
            overdue = None if rounds.owed else self._overdue(view.now, pausing, works)
            if overdue is not None:
                parts = self._parts_of_step(view, overdue.model, rounds)
                return _step(overdue, replace(rounds, owed=True), parts)
            return self._prefill(view, chosen, decodes, rounds)
        if not decodes:
            return None
        found = _next(decodes)
        return _step(found, rounds, self._parts_of_step(view, found.model, rounds))

    def _prefill(
        self,
        view: ComputeView,
        chosen: Runnable,
        decodes: Sequence[Runnable],
        rounds: Rounds,
    ) -> ComputeDecision | None:
        """Return a model's prefill; None while it waits for its part of the device."""
        others = [job.model for job in view.in_flight]
        others += [r.model for r in decodes if r is not chosen]
        beside = view.lanes > 1 and others
        parts = view.parts - self._share(view, others, rounds) if beside else view.parts
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

    def _share(self, view: ComputeView, models: Iterable[str], rounds: Rounds) -> int:
        """Return the parts that decode steps of these models share beside a prefill."""
        if self.decode_share:
            wanted = round(self.decode_share * view.parts)
        else:
            known = (rounds.decodes[name].parts for name in models if name in rounds.decodes)
            wanted = sum(sorted(known, reverse=True)[: view.lanes - 1])
        return max(1, min(view.parts - 1, wanted))

    def _parts_of_step(self, view: ComputeView, model: str, rounds: Rounds) -> int | None:
        """Return the parts of a model's decode step beside a prefill; None: no limit."""
        if view.lanes == 1:
            return None
        share = self._share(view, [model], rounds)
        return max(1, share // (view.lanes - 1)) if self.decode_share else share


def _renewed(view: ComputeView, works: Sequence[WorkView], rounds: Rounds) -> Rounds:
    """Return the memo with the parts of these models' decode steps, as of at most `RENEWED` seconds
    ago."""
    due = view.now - RENEWED
    old = [w for w in works if w.model not in rounds.decodes or rounds.decodes[w.model].since < due]
    if not old:
        return rounds
    found = {w.model: DecodeParts(least_parts(w, view.parts), view.now) for w in old}
    return replace(rounds, decodes={**rounds.decodes, **found})


def _next_prefill(prompts: Sequence[Runnable], rounds: Rounds) -> Runnable:
    """Return the model whose prompts were computed longest ago."""
    last = {model: i for i, model in enumerate(rounds.past)}
    return min(prompts, key=lambda r: (last.get(r.model, -1), r.first_prompt or (), r.model))


def _next(decodes: Sequence[Runnable]) -> Runnable:
    """Return the model whose last job ended longest ago."""
    return min(decodes, key=lambda r: (r.last_run, r.model))


def _step(r: Runnable, rounds: Rounds, parts: int | None) -> ComputeDecision:
    return ComputeDecision(r.model, memo=rounds, phase=Phase.DECODE, parts=parts)
