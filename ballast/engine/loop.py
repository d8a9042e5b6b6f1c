"""The loop of one device: take events, decide, apply, run. The same live and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ballast.core.actions import Action, Refuse
from ballast.core.clock import Clock
from ballast.core.compute import ComputeDecision
from ballast.core.errors import BrokenPromise
from ballast.core.event import Event, Operate, Output, Timer
from ballast.core.job import Job, SequenceWork
from ballast.core.request import Request, State
from ballast.core.story import Story
from ballast.core.traffic import TrafficStats
from ballast.core.view import DeviceView
from ballast.engine.apply import apply
from ballast.engine.commands import Answered, Operations
from ballast.engine.compute_view import Looked, compute_view, could_run, runnable
from ballast.engine.events import handle
from ballast.engine.life import Landing
from ballast.engine.model import ModelState
from ballast.engine.plan import plan
from ballast.engine.return_borrowed import vacate
from ballast.engine.state import DeviceState
from ballast.engine.story_snapshot import snapshot
from ballast.engine.views import device_view
from ballast.policy.memory.defaults import last_resort
from ballast.policy.presets import Preset

ROUNDS = 8
"""Most times that one turn asks the policy about shortages found while forming a job."""


class Inbox(Protocol):
    """Where events come from."""

    def take(self, until: float | None) -> list[Event]:
        """The next events, in order; waits for one, at most until the clock shows `until`.

        An empty list means that `until` has come.
        """


class Runner(Protocol):
    """What runs jobs."""

    def start(self, job: Job) -> None:
        """Begin `job`; a JobDone or JobFailed will come through the inbox."""


class Stepped(NamedTuple):
    """A decode step that has ended in a leap of virtual time."""

    job: Job
    at: float
    seconds: float
    """Of its lane, without those in which it waited for layers."""


class Loop:
    """One device's loop. Everything it needs is handed in; it asks no other clock or queue."""

    def __init__(
        self,
        state: DeviceState,
        preset: Preset,
        inbox: Inbox,
        runner: Runner,
        clock: Clock,
        outbox: Callable[[list[Output]], None],
        story: Story,
        answered: Answered | None = None,
    ) -> None:
        """`answered` is told how operations end."""
        self.state = state
        self.preset = preset
        self.inbox = inbox
        self.runner = runner
        self.clock = clock
        self.outbox = outbox
        self.story = story
        self.operations = Operations(state, preset.memory, story, answered)
        self.turn_since: float | None = None
        """When the present turn began, on the clock; None while it waits for events."""
        self.choice: ComputeDecision | None = None
        """Of the compute policy, as long as it holds."""
        self._turn: object = None
        """What the compute policy remembers."""
        self._memo: object = None
        self._admission_memo: object = None
        """What the admission policy remembers."""
        self._reorder_at: float | None = None
        """When the admission policy wished to be asked again: no remedy where all are stuck."""
        self._wake_at: float | None = None
        """When the policy wished to be asked again."""
        self._while_short = False
        """Whether the policy wished to be asked again when somebody finds the pages it lacked."""
        self._expires_at: float | None = None
        """When the next idle model's time to live is over."""
        self._jobs = 0
        self._rounds = 0
        """Times that forming jobs may still ask the policy in this turn."""
        self._unfilled = 0
        """Leases that the machine had no memory for, of which the story has been told."""

    def run(self) -> None:
        """Turn until drained or stopped; every request accepted has been answered then."""
        self.begin()
        try:
            while not self.state.over:
                self.turn()
            self.end()
        finally:
            self.story.turned()

    def begin(self) -> None:
        """Before the first turn."""
        self.state.now = now = self.clock.now()
        self.state.link_bytes_per_second = self.state.link.bytes_per_second
        for m in self.state.models.values():
            m.traffic = TrafficStats.since(now)
        if self.story.whole:
            self.story.begins(now, snapshot(self.state, self.preset, self.story))
        outputs: list[Output] = []
        self._proceed(outputs)
        self._tell(outputs)

    def end(self) -> None:
        """After the last turn: what is open is told that it will not be answered."""
        outputs: list[Output] = []
        for m in self.state.models.values():
            reason = self.state.stopped or "the device has drained"
            outputs += self.state.fail_all(m, "unavailable", reason)
        why = self.state.stopped or "the device has drained"
        self.operations.give_up(why)
        if outputs:
            self.outbox(outputs)
        self.story.ends(self.state.now, why, outputs)

    @property
    def until(self) -> float | None:
        """When it turns next, on its clock, if no event comes before."""
        state = self.state
        return _earliest(
            self._wake_at,
            self._reorder_at,
            self._expires_at,
            state.patience.next,
            state.lending.next,
        )

    def leapt(self, job: Job, following: ModelState, steps: int) -> None:
        """In virtual time: `job` and those after it, `steps` in all, have ended. They only decoded;
        what came of them has been told and is in the books. The next is `following`'s."""
        state, before = self.state, self.state.now
        state.now = now = self.clock.now()
        m = state.models[job.model]
        m.life.end_job()
        m.running.end(state.requests[part.request_id] for part in job.work)
        state.lanes.end(job)
        state.jobs += steps
        self._jobs += steps - 1
        stepped = [m for m in state.models.values() if m.last_run > before]
        stepped.sort(key=lambda m: m.last_run)
        for m in stepped:
            m.weights.passed()
        lasts = [(m.last_run, m.decode_seconds) for m in stepped]
        self.story.leap(now, job, steps, lasts, (r for m in stepped for r in m.running))
        work = plan(following, state.settings, now, state.freed, self.choice)
        self._begin(following, work)
        self._tell([])

    def step_ended(self, job: Job) -> None:
        """In virtual time: `job`, a decode step, has ended now. What came of it is known to who
        leaps, and told by `leapt_on_lanes`."""
        state, m = self.state, self.state.models[job.model]
        state.now = self.clock.now()
        m.life.end_job()
        m.running.end(state.requests[part.request_id] for part in job.work)
        state.lanes.end(job)
        state.jobs += 1

    def next_step(self, looked: Looked) -> Job | None:
        """In virtual time: begin the job that comes next, if one may begin, of a model that only
        decodes. It has no work yet (`leapt_on_lanes`). `looked`: see `compute_view`."""
        if not self.state.lanes.ready:
            return None
        chosen, others = self._choose((), looked)
        if chosen is None:
            return None
        job = self._job(chosen.model, (), others, chosen.parts)
        self.state.models[chosen.model].life.begin_job(job, self.state.now)
        self.state.lanes.begin(job)
        return job

    def leapt_on_lanes(
        self, ended: Sequence[Stepped], begun: Iterable[Job], since: float
    ) -> list[Job]:
        """In virtual time: these steps have ended since then, in this order, and what came of them
        is in the books. Returns the jobs that have `begun` and are in flight, with their work."""
        state = self.state
        stepped = [m for m in state.models.values() if m.last_run > since]
        for m in stepped:
            m.weights.passed()
        first = ended[0].job
        lasts = [(step.at, step.seconds) for step in ended]
        moved = (r for m in stepped for r in m.running)
        jobs = [step.job for step in ended]
        self.story.leap(state.now, first, len(ended), lasts, moved, jobs)
        whole = []
        for job in begun:
            m = state.models[job.model]
            work = tuple(plan(m, state.settings, state.now, state.freed))
            whole.append(replace(job, work=work))
            at = m.life.job_began
            m.life.end_job()
            self._start(m, whole[-1], at)
        self._tell([])
        return whole

    def turn(self) -> None:
        """One turn: events in, decisions, jobs out, answers out."""
        until = self.until
        events = self.inbox.take(until)
        outputs: list[Output] = []
        self.turn_since = self.state.now = now = self.clock.now()
        self.state.link_bytes_per_second = self.state.link.bytes_per_second
        if not events or (until is not None and now >= until):
            events = [*events, Timer()]
        self.story.link(now, self.state.link_bytes_per_second)
        for event in events:
            self.story.event(now, event)
            if isinstance(event, Operate):
                self.operations.begin(event, outputs)
            else:
                said = handle(self.state, event)
                self.story.said(said)
                outputs += said
        heard = len(outputs)
        if self.operations.pending:
            self.operations.settle(outputs)
        lending = self.state.lending
        if not lending.alone and lending.borrower.wanted():
            vacate(self.state, self.story, self.preset.memory)
        self._proceed(outputs)
        if not lending.alone:
            lending.answer()
        self._tell(outputs[heard:])
        self.turn_since = None

    def _tell(self, outputs: list[Output]) -> None:
        """To the story: what decisions brought, and that the turn is over."""
        story, state = self.story, self.state
        story.ended(state.now, outputs)
        if state.pool.unfilled != self._unfilled:
            self._unfilled = state.pool.unfilled
            story.stray(state.now, "the machine had no memory for pages that were free")
        story.turned()

    def _proceed(self, outputs: list[Output]) -> None:
        """Decide, start the next job, and only then say what the last one brought."""
        if self.state.asking:
            self._decide(outputs)
            self.choice = None
        self._dispatch(outputs)
        resorts = 0
        while self._stuck:
            # The last job may have ended what stood in the way of a remedy.
            self.choice = None
            if not self._decide(outputs):
                resorts += 1
                self._last_resort(outputs, shared=resorts > ROUNDS)
                if self.state.lending.awaiting:
                    break
                self._decide(outputs)
            self._dispatch(outputs)
        if outputs:
            self.outbox(outputs)
        self.state.migration.tell()

    def _decide(self, outputs: list[Output]) -> bool:
        """Ask the policy and do what it says; whether anything has changed by it."""
        view = device_view(self.state)
        expired = self._expire(view, outputs)
        if expired:
            view = device_view(self.state)
        reordered = self._reorder(view, outputs)
        if reordered:
            view = device_view(self.state)
        self.state.asked = self.state.news.n
        decision = self.preset.memory(view, self._memo)
        self._memo, self._while_short = decision.memo, decision.while_short
        later = decision.wake_at is not None and decision.wake_at > view.now
        self._wake_at = decision.wake_at if later else None
        self.state.promises.suspend()
        done = expired or reordered
        for action in decision.actions:
            refused = apply(self.state, action, outputs)
            self.story.decision(view.now, action, refused)
            done = done or refused is None
        if self.state.promises.make(decision.promises, self.state.models):
            self.story.promises(view.now, self.state.promises.stated)
            return True
        return done

    def _reorder(self, view: DeviceView, outputs: list[Output]) -> bool:
        """Have the admission policy order queues; whether it has changed any."""
        decision = self.preset.admission(view, self._admission_memo)
        self._admission_memo, self._reorder_at = decision.memo, decision.wake_at
        done = False
        for action in decision.actions:
            refused = apply(self.state, action, outputs)
            self.story.decision(view.now, action, refused, by="admission")
            done = done or refused is None
        return done

    def _expire(self, view: DeviceView, outputs: list[Output]) -> bool:
        """Evict models whose time to live is over, before the policy is asked; whether there were
        any."""
        expiry = self.preset.memory.expire(view)
        self._expires_at = expiry.wake_at
        for eviction in expiry.evictions:
            refused = apply(self.state, eviction, outputs)
            self.story.decision(self.state.now, eviction, refused, by="ttl")
        return bool(expiry.evictions)

    def _dispatch(self, outputs: list[Output]) -> None:
        """Start jobs on idle lanes where models have any; ask about new shortages first."""
        state = self.state
        state.promises.fill()
        self._rounds = ROUNDS
        tried: set[str] = set()
        while state.stopped is None and state.lanes.ready:
            chosen, others = self._choose(tried)
            if chosen is None:
                return
            m = state.models[chosen.model]
            tried.add(chosen.model)
            rounds = self._rounds
            work = self._form(m, chosen, outputs)
            if self._rounds < rounds:
                tried.clear()  # what they lacked may be there now
            if work:
                self._begin(m, work, others, chosen.parts)
            else:
                self.choice = None

    def _choose(
        self, tried: Collection[str], looked: Looked | None = None
    ) -> tuple[ComputeDecision | None, int]:
        """Which model runs next, if one of those not tried can and the policy lets it, and how many
        others could run."""
        state, held = self.state, self.choice
        models = [m for m in runnable(state) if m.spec.name not in tried]
        if not models:
            return None, 0
        if held is not None and state.now < held.until:
            alone = len(state.lanes.jobs) == 1 or len(models) == 1
            if alone and any(m.spec.name == held.model and m.running for m in models):
                return held, len(models) - 1
        view = compute_view(state, models, looked)
        self.choice = chosen = self.preset.compute(view, self._turn)
        if chosen is not None:
            self._turn = chosen.memo
        elif not state.lanes.busy:
            raise BrokenPromise(f"order {self.preset.order!r} begins no job, and none is in flight")
        return chosen, len(models) - 1

    def _form(
        self, m: ModelState, chosen: ComputeDecision, outputs: list[Output]
    ) -> list[SequenceWork]:
        """The work of `m`'s next job, once the policy has done what it can about new shortages; it
        is formed anew after each decision, which may have undone some of it."""
        state = self.state
        while True:
            known = m.shortages
            work = state.begin_swap(m) or plan(m, state.settings, state.now, state.freed, chosen)
            if self._rounds == 0 or all(s in known for s in m.shortages):
                if self._while_short and any(s not in m.shortages for s in known):
                    state.news.n += 1
                return work
            self.choice = None  # pages are short, or were
            if not self._decide(outputs):
                return work
            self._rounds -= 1
            if not could_run(state, m):
                return []

    def _begin(
        self,
        m: ModelState,
        work: list[SequenceWork],
        others: int = 0,
        most: int | None = None,
    ) -> None:
        """Start `m`'s next job, on `most` parts of the compute or fewer; so many other models may
        have one as well."""
        job = self._job(m.spec.name, work, others, most)
        self._start(m, job, self.state.now)
        self.runner.start(job)

    def _job(self, model: str, work: Iterable[SequenceWork], others: int, most: int | None) -> Job:
        """The next job, on its lane; as of `_begin`."""
        self._jobs += 1
        lane, parts = self.state.lanes.place(others, most)
        return Job(self._jobs, lane, model, tuple(work), parts)

    def _start(self, m: ModelState, job: Job, at: float) -> None:
        """A job of `m` is in flight since then."""
        m.running.begin(self.state.requests[part.request_id] for part in job.work)
        if m.life.landing is Landing.OPEN:
            m.life.begin_early_job(job, at)
        else:
            m.life.begin_job(job, at)
        self.state.lanes.begin(job)
        self.story.job(at, job)

    @property
    def _stuck(self) -> bool:
        """Whether requests could run, but nothing is in flight and nothing will wake the loop."""
        state = self.state
        if not state.requests or state.in_flight or state.lending.awaiting:
            return False
        return self._wake_at is None and any(map(_may_run, state.requests.values()))

    def _last_resort(self, outputs: list[Output], shared: bool) -> None:
        """No decision helped, and nothing is on its way: do what the policy has for that.

        What all policies share (`last_resort`) is done where the policy's own answer changes
        nothing, or if `shared`: a policy without a remedy must not keep requests waiting for ever.
        """
        if self.state.migration.forget_all():
            return
        view = device_view(self.state)
        done = False
        if not shared:
            for action in self.preset.memory.when_stuck(view):
                done = self._resort_to(action, outputs) or done
        if not done:
            for action in last_resort(view):
                self._resort_to(action, outputs)

    def _resort_to(self, action: Action, outputs: list[Output]) -> bool:
        """Do it; whether it was done. A request that runs can be refused here as well."""
        state = self.state
        if isinstance(action, Refuse) and action.request_id in state.requests:
            reason = f"preset {self.preset.name!r} found no memory for this request"
            refusal = replace(action, why=f"{reason}: {action.why}")
            self.story.decision(state.now, refusal, None)
            failed = state.requests[action.request_id]
            outputs.append(state.fail(failed, "out_of_memory", refusal.why))
            return True
        refused = apply(state, action, outputs)
        self.story.decision(state.now, action, refused, by="shortage")
        return refused is None


def _may_run(request: Request) -> bool:
    """Whether memory and a lane are all that a request lacks."""
    return request.state is not State.PAUSED


def _earliest(*moments: float | None) -> float | None:
    """Of moments that may never come."""
    return min((t for t in moments if t is not None), default=None)
