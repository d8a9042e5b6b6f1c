"""Choose the next job by deadline: spend slack on large batches, then run what is due first.

The compute policy of presets `balloon` and `prism`. Deadlines are those of TTFT and TPOT.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from ballast.core.compute import ComputeDecision, ComputeView, DecodeView, PromptView, WorkView
from ballast.core.job import JobLoad, chunk_pairs
from ballast.policy.base import ComputePolicy
from ballast.policy.compute.demand import Demand, Task

LEAST_CHUNK = 16
"""Fewest prompt tokens in a chunk, unless fewer are left."""
MOST_CREDIT = 1.0
"""Most seconds of a lane that late requests can save up."""
MOST_LATE = 0.25
"""Most part of a gap between tokens that is kept for jobs which take longer than expected."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The decodes of a model, each of which a step advances by a token."""

    work: WorkView
    seconds: float
    """Seconds of a step."""
    task: Task | None
    """Its steps for requests that can still keep their levels; None: none can."""
    progress: float
    """When the request that waits longest got its last token, or arrived."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One request's prompt, and those of late requests before it in its model's queue."""

    work: WorkView
    view: PromptView
    tokens: int
    """Tokens of its prompt and those before it."""
    task: Task | None
    """Its prefill, and those of late ones before it; None: its first token is or will be late."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A job that could run now."""

    work: WorkView
    due: float
    """When it must have ended, in seconds from now."""
    others: float
    """Seconds that it may take without making others late."""
    seconds: float
    """Least seconds that it takes."""
    tokens: int = 0
    """Tokens of the prompt that it is for and those before it; 0: it only decodes."""
    begun: int = 0
    """Tokens of all begun prompts of its model: the most in a job that ends by `due`."""


@dataclass(frozen=True, slots=True)
class DeadlineMemo:
    """What one decision leaves to the next."""

    model: str = ""
    """Of the last job."""
    at: float = 0.0
    credit: float = 0.0
    """Seconds that late requests may take from others."""


@dataclass(frozen=True, slots=True)
class Deadline(ComputePolicy):
    """Spend slack on large batches; when it is gone, run the earliest deadline first.

    A first token is due by the TTFT level. TPOT is a mean over the answer: the next token is due at
    (time of the first) + (tokens so far) * (TPOT), so faster steps earn slack, which is spent while
    other models run. `Demand` sums up what is due over time; its *headroom* is the least by which
    it falls short of the time there is. As long as a job leaves the others headroom, the order
    makes batches large: prompts first, in chunks that fit; then the model that ran last decodes on,
    until its requests end; then the next. Without headroom the earliest deadline is first. A prompt
    begins only if it can end in time beside all work begun, so that under overload most requests
    keep their levels.

    The only model that could run computes its prompts first come first served, in the largest jobs;
    but while no request is late, prompts join its streams within these streams' slack: an answer of
    two tokens has no third to make up for a long job.

    Late requests come after all others, and have `late_share` of the lane's time, the one that
    waited longest first. `longest_wait`: most seconds that a service level counts for.
    `longest_gap`: seconds within which any stream gets its next token (or twice the time of a step
    of every model, if longer); a prompt's smallest job may come on top. `margin`: headroom kept in
    reserve, in multiples of the longest job that could run.
    """

    late_share: float = 0.05
    longest_wait: float = 10.0
    longest_gap: float = 0.2
    margin: float = 2.0

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        turn = memo if isinstance(memo, DeadlineMemo) else DeadlineMemo(at=view.now)
        alone = len(view.runnable) == 1
        if alone and view.runnable[0].first_prompt is None:
            return self._freely(view, turn, math.inf)
        for r in view.runnable:
            if r.moves_kv:  # others may wait for this job
                passed = DeadlineMemo(turn.model, view.now, turn.credit)
                return ComputeDecision(r.model, memo=passed)
        works = [view.work_of(r.model) for r in view.runnable]
        if alone and not works[0].decodes:
            return self._freely(view, turn)
        batches = [self._batch(view.now, w) for w in works if w.decodes]
        pausing = self._pausing(view.now, batches, max(w.late for w in works))
        if not alone and pausing and pausing[0][0] <= 0:
            return self._run(pausing[0][1], 0, turn)
        prompts = [p for w in works for p in self._prompts(view, w)]
        demand, begun = self._demand(batches, prompts, self.coming(view.now))
        late = self._latest(view, batches, prompts, begun)
        if alone and late is not None:
            return self._freely(view, turn)
        credit = 0.0
        if late is not None:
            most = max(MOST_CREDIT, late.seconds)
            credit = min(most, turn.credit + self.late_share * (view.now - turn.at))
            if credit >= late.seconds:
                n = self._chunk(view, late, min(credit, _pause(pausing, late)))
                spent = self._job_seconds(late.work, n)
                return self._run(late, n, DeadlineMemo(late.work.model, view.now, credit - spent))
        turn = DeadlineMemo(turn.model, view.now, credit)
        options = self._options(view, batches, begun, demand, turn.model)
        reserve = self.margin * max((o.seconds for o in options), default=0.0)
        for option in options:
            spare = option.others - reserve - option.seconds
            if spare >= 0:
                pause = _pause(pausing, option)
                until = view.now + min(spare, pause)
                if late is not None and self.late_share > 0:
                    until = min(until, view.now + (late.seconds - credit) / self.late_share)
                n = self._chunk(view, option, min(option.others - reserve, pause))
                return self._run(option, n, turn, until)
        if options:
            urgent = min(options, key=lambda o: (o.due, o.work.model))
            joins = (
                o for o in options if o.work is urgent.work and o.tokens and o.seconds <= o.others
            )
            urgent = next(joins, urgent)
            most = min(urgent.others, _pause(pausing, urgent))
            return self._run(urgent, self._chunk(view, urgent, most), turn)
        if late is None:  # no request waits
            return ComputeDecision(view.runnable[0].model, memo=turn)
        return self._run(late, self._chunk(view, late, _pause(pausing, late)), turn)

    def coming(self, now: float) -> Sequence[Task]:
        """Return prefills of expected requests, for which headroom is left; none here."""
        return ()

    # -- what there is to do ----------------------------------------------------------------------

    def _batch(self, now: float, work: WorkView) -> _Batch:
        """Return a model's decodes; those that can keep their levels say when a step is due."""
        decodes = work.decodes
        seconds = work.costs.of(JobLoad(0, 0, 0, len(decodes), sum(d.context for d in decodes)))
        due, pace, steps = math.inf, math.inf, 1
        for d in decodes:
            if self._keeps(now, d, seconds):
                next_due, its_pace = self._next_due(d), min(d.pace, self.longest_wait)
                if d.first is not None and next_due < now + seconds:
                    # Behind its pace, as after a shortage: it catches up by its last token.
                    its_pace = min(its_pace, (_last_due(d) - now) / d.outputs)
                    next_due = now + its_pace
                due = min(due, next_due)
                pace = min(pace, its_pace)
                steps = max(steps, d.outputs)
        task = None if due == math.inf else Task(due - now, seconds, pace, steps)
        return _Batch(work, seconds, task, min(d.last for d in decodes))

    def _pausing(
        self, now: float, batches: Sequence[_Batch], late: float
    ) -> list[tuple[float, _Option]]:
        """Return each batch's next step and the seconds that it may still pause, shortest first; a
        step of another model may end after that, and jobs take `late` seconds longer."""
        gap = max(self.longest_gap, 2 * sum(b.seconds for b in batches))
        gap = max(gap - late, (1 - MOST_LATE) * gap)
        slowest = (*nlargest(2, (b.seconds for b in batches)), 0.0)
        found = []
        for b in batches:
            last = min((d.last for d in b.work.decodes if d.first is not None), default=math.inf)
            left = last + gap - b.seconds - slowest[b.seconds == slowest[0]] - now
            found.append((left, _Option(b.work, math.inf, math.inf, b.seconds)))
        return sorted(found, key=lambda entry: entry[0])

    def _keeps(self, now: float, d: DecodeView, step: float) -> bool:
        """Whether a request keeps its service level if it decodes without a pause from now on."""
        if d.first is None:
            return now + step <= self._next_due(d)
        return d.first <= d.due and now + d.outputs * step <= _last_due(d)

    def _next_due(self, d: DecodeView) -> float:
        due = d.due if d.first is None else d.first + d.generated * d.pace
        return min(due, d.last + self.longest_wait)

    def _prompts(self, view: ComputeView, work: WorkView) -> list[_Prompt]:
        """Return a model's prompts in the order of jobs: each is due no later than those after it
        that can be in time, and includes the work of late ones before it."""
        found: list[_Prompt] = []
        tokens, ahead, late = 0, 0.0, 0.0
        for p in work.prompts:
            tokens += p.tokens
            seconds = prefill_seconds(work, p, view.step_tokens)
            due = min(p.due, p.last + self.longest_wait) - view.now
            if ahead + seconds <= due:
                found.append(_Prompt(work, p, tokens, Task(due, late + seconds)))
                late = 0.0
            else:
                found.append(_Prompt(work, p, tokens, None))
                late += seconds
            ahead += seconds
        due = math.inf
        for i, entry in reversed(list(enumerate(found))):
            if entry.task is not None:
                due = min(due, entry.task.due)
                found[i] = replace(entry, task=replace(entry.task, due=due))
        return found

    def _demand(
        self, batches: Sequence[_Batch], prompts: Sequence[_Prompt], coming: Sequence[Task]
    ) -> tuple[Demand, list[_Prompt]]:
        """Return the demand of work begun and of prompts that can be in time beside it, and these
        prompts in order of deadline."""
        running = [b.task for b in batches if b.task is not None]
        decoding = {b.work.model: b.task for b in batches if b.task is not None}
        waiting = [(p.task, p) for p in prompts if p.task is not None]
        waiting.sort(key=lambda tp: (tp[0].due, tp[1].view.order))
        promised = [(task, p, self._steps(p, task, decoding)) for task, p in waiting]
        demand = Demand(running, [t for task, _, steps in promised for t in (task, *steps)])
        kept: list[_Prompt] = []
        for task, p, steps in promised:
            if demand.add(task, *steps) or (not running and not kept):
                kept.append(p)
        begun = [p.task for p in kept if p.task is not None]
        return Demand(running, [*begun, *coming], all_of_them=True), kept

    def _steps(self, p: _Prompt, task: Task, batches: dict[str, Task]) -> list[Task]:
        """Return the decode work of a prompt's answer: little for each token while its model's
        batch decodes anyway, whole steps after that. `batches`: those counted so far, updated by
        this one."""
        n, costs = p.view.outputs - 1, p.work.costs
        if n <= 0:
            return []
        context = p.view.start + p.view.tokens
        pace = min(p.view.pace, self.longest_wait)
        own = costs.of(JobLoad(0, 0, 0, 1, context))
        more = costs.per_sequence + context * costs.per_context
        batch = batches.get(p.work.model)
        if batch is None:
            batches[p.work.model] = alone = Task(task.due + pace, own, pace, n)
            return [alone]
        beside = min(n, math.ceil(batch.steps * batch.pace / pace))
        rarely = max(0.0, 1.0 - pace / batch.pace)  # part of its tokens that need a further step
        batches[p.work.model] = Task(batch.due, own, min(pace, batch.pace), max(batch.steps, n))
        steps = [Task(task.due + pace, more + rarely * own, pace, beside)]
        if n > beside:
            steps.append(Task(task.due + (beside + 1) * pace, own, pace, n - beside))
        return steps

    # -- what could run now -----------------------------------------------------------------------

    def _options(
        self,
        view: ComputeView,
        batches: Sequence[_Batch],
        begun: Sequence[_Prompt],
        demand: Demand,
        last: str,
    ) -> list[_Option]:
        """List jobs for requests that can keep their levels, in order of preference."""
        steps = []
        at_hand = {b.work.model: b for b in batches if b.task is not None}
        place = {b.work.model: i for i, b in enumerate(at_hand.values())}
        for model, b in at_hand.items():
            assert b.task is not None
            others = demand.headroom(place[model])
            steps.append(
                (model != last, b.task.due, _Option(b.work, b.task.due, others, b.seconds))
            )
        tokens: dict[str, int] = {}
        for p in begun:
            tokens[p.work.model] = max(p.tokens, tokens.get(p.work.model, 0))
        joins: list[_Option] = []
        starts: list[_Option] = []
        for i, p in enumerate(begun):
            assert p.task is not None
            batch = at_hand.get(p.work.model)
            if batch is None or batch.task is None:
                others = demand.headroom(len(place) + i)
            else:  # its batch steps with it
                others = demand.headroom(place[p.work.model], len(place) + i)
                others = min(others, max(0.0, batch.task.due))
            least = self._job_seconds(p.work, least_chunk(p.work, view.step_tokens))
            most = tokens[p.work.model]
            option = _Option(p.work, p.task.due, others, least, p.tokens, most)
            (starts if batch is None else joins).append(option)
        return [*joins, *starts, *(o for *_, o in sorted(steps, key=lambda s: s[:2]))]

    def _latest(
        self,
        view: ComputeView,
        batches: Sequence[_Batch],
        prompts: Sequence[_Prompt],
        begun: Sequence[_Prompt],
    ) -> _Option | None:
        """Return the job of the late request that waited longest for a token, if any is late."""
        late: list[tuple[float, _Option]] = [
            (b.progress, _Option(b.work, math.inf, math.inf, b.seconds))
            for b in batches
            if b.task is None
        ]
        behind = {id(p) for p in begun}
        for p in prompts:
            if id(p) not in behind:
                least = self._job_seconds(p.work, least_chunk(p.work, view.step_tokens))
                late.append((p.view.last, _Option(p.work, math.inf, math.inf, least, p.tokens)))
        return min(late, key=lambda entry: entry[0])[1] if late else None

    @staticmethod
    def _freely(view: ComputeView, turn: DeadlineMemo, until: float = -math.inf) -> ComputeDecision:
        """Return the job of the only model that could run, as large as a job may be."""
        (only,) = view.runnable
        memo = DeadlineMemo(only.model, view.now, turn.credit)
        return ComputeDecision(only.model, None, until, memo)

    @staticmethod
    def _run(
        option: _Option, n: int, turn: DeadlineMemo, until: float = -math.inf
    ) -> ComputeDecision:
        """Return the decision for an option, with `n` tokens of prompts."""
        model = option.work.model
        return ComputeDecision(model, n, until if n == 0 else -math.inf, replace(turn, model=model))

    def _chunk(self, view: ComputeView, option: _Option, seconds: float) -> int:
        """Return the most prompt tokens in a job of at most `seconds`; at least `least_chunk`."""
        if not option.tokens:
            return 0
        least = least_chunk(option.work, view.step_tokens)

        def fitting(tokens: int, seconds: float) -> int:
            sizes = range(least, max(least, min(view.step_tokens, tokens)) + 1)
            n = bisect_right(sizes, seconds, key=lambda n: self._job_seconds(option.work, n))
            return sizes[max(0, n - 1)]

        most = fitting(option.tokens, seconds)
        if option.begun > option.tokens:  # more prompts share one pass over the weights
            most = max(most, fitting(option.begun, min(seconds, option.due)))
        return most

    @staticmethod
    def _job_seconds(work: WorkView, n: int) -> float:
        """Return the seconds of a job with `n` tokens of a model's prompts beside its decodes."""
        tokens = chunks = pairs = 0
        for p in work.prompts:
            part = min(p.tokens, n - tokens)
            if part <= 0:
                break
            tokens, chunks = tokens + part, chunks + 1
            pairs += chunk_pairs(part, p.start)
        context = sum(d.context for d in work.decodes)
        return work.costs.of(JobLoad(tokens, chunks, pairs, len(work.decodes), context))


def _pause(pausing: Sequence[tuple[float, _Option]], option: _Option) -> float:
    """Return the seconds that streams of other models than an option's may still pause."""
    return min((left for left, o in pausing if o.work is not option.work), default=math.inf)


def _last_due(d: DecodeView) -> float:
    """Return when the last token of an answer that has begun is due, given its expected length."""
    assert d.first is not None, "its first token has come"
    return d.first + d.pace * (d.generated + d.outputs - 1)


def prefill_seconds(work: WorkView, p: PromptView, step_tokens: int) -> float:
    """Return the seconds of a prompt in jobs of `step_tokens`, each a pass over the weights."""
    jobs = -(-p.tokens // step_tokens)
    return work.costs.prefill_seconds(p.tokens, p.start) + (jobs - 1) * work.costs.base


def least_chunk(work: WorkView, step_tokens: int) -> int:
    """Return the tokens whose arithmetic takes as long as a chunk's pass over the weights."""
    costs = work.costs
    even = math.ceil(costs.base / costs.per_token) if costs.per_token > 0 else step_tokens
    return max(1, min(max(LEAST_CHUNK, even), step_tokens))
