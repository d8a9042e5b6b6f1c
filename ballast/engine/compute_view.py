"""Build the view of compute policies: models that could run a job, and the requests in each job.

Used by `Dispatcher` before it asks the compute policy which model runs next, and by the simulator's
leaps. Reads the state only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice

from ballast.core.compute import ComputeView, DecodeView, PromptView, Runnable, WorkView
from ballast.core.request import Precedence, Request, next_due
from ballast.engine import staging
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState

Looked = Callable[[str], None]
"""Called with a model's name before the policy reads that model's work."""
MOST_PROMPTS = 8
"""Most waiting requests of each model that a compute policy sees: the first in the queue."""


def runnable(state: DeviceState) -> list[ModelState]:
    """Return the models that could run a job now."""
    return [m for m in state.models.values() if could_run(state, m)]


def could_run(state: DeviceState, m: ModelState) -> bool:
    """Return whether a model could run a job now."""
    life = m.life
    if not life.ready:
        return False
    if m.frozen:
        return staging.moves_alone(m)
    return m.running.can_run or admissible(state, m)


def admissible(state: DeviceState, m: ModelState) -> bool:
    """Return whether the first waiting request may be admitted, if it finds pages.

    False after a refusal until memory has been freed, and until its KV has been looked for."""
    if not m.waiting or m.held or state.tiers.is_searching(m.waiting.first):
        return False
    return m.blocked != (m.waiting.first.id, state.freed)


def compute_view(
    state: DeviceState, models: Iterable[ModelState], looked: Looked | None = None
) -> ComputeView:
    """Return a snapshot of runnable `models`. Each model's work is looked up when the policy reads
    it, from the state at that moment; `looked` is called before."""

    def work_of(name: str) -> WorkView:
        if looked is not None:
            looked(name)
        return _work(state, state.models[name])

    found = tuple(
        Runnable(m.spec.name, m.last_run, _first_prompt(state, m), staging.moves_alone(m))
        for m in models
    )
    return ComputeView(
        state.now,
        state.settings.step_tokens,
        found,
        work_of,
        len(state.lanes.jobs),
        state.lanes.parts,
        state.lanes.in_flight,
    )


def _first_prompt(state: DeviceState, m: ModelState) -> Precedence | None:
    if admissible(state, m):
        return m.waiting.first.order
    return next((r.order for r in m.running if not r.decoding and not r.fetching), None)


def _work(state: DeviceState, m: ModelState) -> WorkView:
    decoding, prefilling = m.phases()
    waiting: Iterable[Request] = ()
    if admissible(state, m):
        room = max(0, m.spec.max_running - len(m.running))
        waiting = islice(m.waiting, min(room, MOST_PROMPTS))
    expected = m.traffic.expecting()
    return WorkView(
        m.spec.name,
        m.costs,
        tuple(_decode(m, r, expected) for r in decoding),
        tuple(_prompt(m, r, expected) for r in chain(prefilling, waiting)),
        m.traffic.expected(state.now),
        0.0 if m.estimator is None else m.estimator.late,
    )


def _decode(m: ModelState, r: Request, expected: Callable[[int], int]) -> DecodeView:
    slo = m.slo(r)
    return DecodeView(
        r.order,
        r.submission.arrival + slo.ttft,
        r.first_token_at,
        r.last_at,
        r.generated,
        expected(r.submission.max_tokens - r.generated),
        slo.tpot,
        len(r.tokens),
    )


def _prompt(m: ModelState, r: Request, expected: Callable[[int], int]) -> PromptView:
    slo = m.slo(r)
    due = r.submission.arrival + slo.ttft
    return PromptView(
        r.order,
        len(r.tokens) - r.computed,
        r.computed,
        next_due(due, r.first_token_at, r.generated, slo.tpot),
        r.last_at,
        expected(r.submission.max_tokens - r.generated),
        slo.tpot,
    )
