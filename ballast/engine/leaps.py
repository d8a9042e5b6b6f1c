"""Account for many decode steps at once, in virtual time.

Used by the simulator only. `ballast.sim.leap` computes when decode-only steps end and updates the
requests; this module updates the loop's own records: lanes, jobs, lives of models, the story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ballast.core.clock import Clock
from ballast.core.event import Output
from ballast.core.job import Job
from ballast.core.story import Story
from ballast.engine.compute_view import Looked
from ballast.engine.dispatcher import Dispatcher
from ballast.engine.model import ModelState
from ballast.engine.plan import plan
from ballast.engine.state import DeviceState


class EndedStep(NamedTuple):
    """A decode step that has ended within a leap."""

    job: Job
    at: float
    seconds: float
    """Seconds on its lane, without those in which it waited for layers."""


class Leaps:
    """Moves a device's records over the steps of a leap."""

    def __init__(
        self,
        state: DeviceState,
        clock: Clock,
        dispatcher: Dispatcher,
        story: Story,
        end_turn: Callable[[list[Output]], None],
    ) -> None:
        """`end_turn` ends a turn of the loop in the story."""
        self._state, self._clock, self._dispatcher = state, clock, dispatcher
        self._story, self._end_turn = story, end_turn

    def finish_alone(self, job: Job, following: ModelState, steps: int) -> None:
        """End a leap of jobs that had the whole device: `job` and those after it, `steps` in all.
        The next job, of the model `following`, begins."""
        state, before = self._state, self._state.now
        state.now = now = self._clock.now()
        self._end(job)
        state.jobs += steps
        self._dispatcher.n_jobs += steps - 1
        stepped = [m for m in state.models.values() if m.last_run > before]
        stepped.sort(key=lambda m: m.last_run)
        for m in stepped:
            m.weights.job_passed()
        lasts = [(m.last_run, m.decode_seconds) for m in stepped]
        self._story.record_leap(now, job, steps, lasts, (r for m in stepped for r in m.running))
        choice = self._dispatcher.choice
        work = plan(following, state.settings, now, state.freed, choice)
        self._dispatcher.begin(following, work)
        self._end_turn([])

    def end_step(self, job: Job) -> None:
        """End `job`, a decode step on one of several lanes, now; `finish_on_lanes` records it in
        the story."""
        self._state.now = self._clock.now()
        self._end(job)
        self._state.jobs += 1

    def begin_step(self, looked: Looked) -> Job | None:
        """Begin the next job, if one may begin, of a model that only decodes. It has no work until
        `finish_on_lanes`. `looked`: see `compute_view`."""
        if not self._state.lanes.ready:
            return None
        chosen, others = self._dispatcher.choose((), looked)
        if chosen is None:
            return None
        job = self._dispatcher.make_job(chosen.model, (), others, chosen.parts)
        self._state.models[chosen.model].life.begin_job(job, self._state.now)
        self._state.lanes.begin(job)
        return job

    def finish_on_lanes(
        self, ended: Sequence[EndedStep], begun: Iterable[Job], since: float
    ) -> list[Job]:
        """End a leap on several lanes, which began at `since`: these steps have ended, in this
        order. Returns the jobs `begun` in it that are in flight, with their work."""
        state = self._state
        stepped = [m for m in state.models.values() if m.last_run > since]
        for m in stepped:
            m.weights.job_passed()
        first = ended[0].job
        lasts = [(step.at, step.seconds) for step in ended]
        moved = (r for m in stepped for r in m.running)
        jobs = [step.job for step in ended]
        self._story.record_leap(state.now, first, len(ended), lasts, moved, jobs)
        whole = []
        for job in begun:
            m = state.models[job.model]
            work = tuple(plan(m, state.settings, state.now, state.freed))
            whole.append(replace(job, work=work))
            at = m.life.job_began
            m.life.end_job()
            self._dispatcher.record(m, whole[-1], at)
        self._end_turn([])
        return whole

    def _end(self, job: Job) -> None:
        state, m = self._state, self._state.models[job.model]
        m.life.end_job()
        m.running.end(state.requests[part.request_id] for part in job.work)
        state.lanes.end(job)
