"""Start jobs on idle lanes: choose a model, form its next job, hand the job to the runner.

Used by the loop, once a turn, and by the simulator's leaps. The compute policy chooses the model,
`plan` forms the job; jobs run in the `Runner`, never here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from ballast.core.compute import ComputeDecision
from ballast.core.errors import BrokenPromise
from ballast.core.event import Output
from ballast.core.job import Job, SequenceWork
from ballast.core.story import Story
from ballast.engine import staging
from ballast.engine.compute_view import Looked, compute_view, could_run, runnable
from ballast.engine.decider import MemoryDecider
from ballast.engine.life_rules import EarlyStart
from ballast.engine.model import ModelState
from ballast.engine.plan import plan
from ballast.engine.state import DeviceState

ROUNDS = 8
"""Most times that one turn asks the memory policy about shortages found while forming a job."""


class Runner(Protocol):
    """Runs jobs on lanes: threads or GPU streams when live, a cost formula in the simulator."""

    def start(self, job: Job) -> None:
        """Begin `job`; a `JobDoneEvent` or `JobFailedEvent` will come through the inbox."""


class Dispatcher:
    """Starts a device's jobs; keeps the compute policy's decision and memo, and numbers jobs."""

    def __init__(
        self,
        state: DeviceState,
        runner: Runner,
        story: Story,
        decider: MemoryDecider,
    ) -> None:
        self._state, self._runner = state, runner
        self._story, self._decider = story, decider
        self.choice: ComputeDecision | None = None
        """The compute policy's decision, as long as it holds."""
        self._memo: object = None
        """Memo of the compute policy."""
        self.n_jobs = 0
        """Number of the last job."""
        self._rounds = 0
        """Times that the memory policy may still be asked while forming jobs in this turn."""

    def dispatch(self, outputs: list[Output]) -> None:
        """Start jobs on idle lanes while models have any, asking the memory policy about new
        shortages first."""
        state = self._state
        state.promises.fill()
        self._rounds = ROUNDS
        tried: set[str] = set()
        while state.stopped is None and state.lanes.ready:
            chosen, others = self.choose(tried)
            if chosen is None:
                return
            m = state.models[chosen.model]
            tried.add(chosen.model)
            rounds = self._rounds
            work = self._form(m, chosen, outputs)
            if self._rounds < rounds:
                tried.clear()  # what they lacked may be there now
            if work:
                self.begin(m, work, others, chosen.parts)
            else:
                self.choice = None

    def choose(
        self, tried: Collection[str], looked: Looked | None = None
    ) -> tuple[ComputeDecision | None, int]:
        """Choose the model that runs next, of those not tried; None if there is none, or the
        compute policy lets none run. Returns how many others could run as well."""
        state, held = self._state, self.choice
        models = [m for m in runnable(state) if m.spec.name not in tried]
        if not models:
            return None, 0
        if held is not None and state.now < held.until:
            alone = len(state.lanes.jobs) == 1 or len(models) == 1
            if alone and any(m.spec.name == held.model and m.running for m in models):
                return held, len(models) - 1
        view = compute_view(state, models, looked)
        self.choice = chosen = self._decider.preset.compute(view, self._memo)
        if chosen is not None:
            self._memo = chosen.memo
        elif not state.lanes.busy:
            order = self._decider.preset.order
            raise BrokenPromise(f"order {order!r} begins no job, and none is in flight")
        return chosen, len(models) - 1

    def _form(
        self, m: ModelState, chosen: ComputeDecision, outputs: list[Output]
    ) -> list[SequenceWork]:
        """Form the work of a model's next job, after the memory policy has done what it can about
        new shortages; it is formed anew after each decision, which may have undone some of it."""
        state = self._state
        while True:
            known = m.shortages
            work = plan(m, state.settings, state.now, state.freed, chosen)
            if self._rounds == 0 or all(s in known for s in m.shortages):
                if self._decider.while_short and any(s not in m.shortages for s in known):
                    state.news.n += 1
                return work or staging.idle_work(m)
            self.choice = None  # pages are short, or were
            if not self._decider.decide(outputs):
                return work or staging.idle_work(m)
            self._rounds -= 1
            if not could_run(state, m):
                return []

    def begin(
        self,
        m: ModelState,
        work: list[SequenceWork],
        others: int = 0,
        most: int | None = None,
    ) -> None:
        """Start a model's next job, on at most `most` parts of the device's compute; `others` other
        models could have a job as well."""
        staging.begin(m, work)
        job = self.make_job(m.spec.name, work, others, most)
        self.record(m, job, self._state.now)
        self._runner.start(job)

    def make_job(
        self, model: str, work: Iterable[SequenceWork], others: int, most: int | None
    ) -> Job:
        """Make the next job and give it a lane; arguments as of `begin`."""
        self.n_jobs += 1
        lane, parts = self._state.lanes.place(others, most)
        return Job(self.n_jobs, lane, model, tuple(work), parts)

    def record(self, m: ModelState, job: Job, at: float) -> None:
        """Record in state and story that a job of `m` is in flight since `at`."""
        m.running.begin(self._state.requests[part.request_id] for part in job.work)
        if m.life.early_start is EarlyStart.ALLOWED:
            m.life.begin_early_job(job, at)
        else:
            m.life.begin_job(job, at)
        self._state.lanes.begin(job)
        self._story.record_job(at, job)
