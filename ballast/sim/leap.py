"""Many decode steps at once, where nothing but the clock and lengths can change.

Between two events of a device, models that only decode repeat their steps in turn: each running
request gets a token, and now and then a block. A leap does what the loop would have done in those
turns: its books, what clients are told and when are the same to the last bit. It leaves the last of
the steps in flight, so that whatever comes next meets an ordinary state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from ballast.core.clock import VirtualClock
from ballast.core.event import Output, TokenOut
from ballast.core.job import Job, Load
from ballast.core.view import Residency
from ballast.engine.compute_view import runnable
from ballast.engine.loop import Loop
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.memory.pool import Pool
from ballast.sim.heap import EventHeap
from ballast.sim.runner import SimRunner

Said = Callable[[float, Output], None]


def leap(
    loop: Loop,
    heap: EventHeap,
    runner: SimRunner,
    clock: VirtualClock,
    said: Said,
    horizon: float = inf,
    near: float = inf,
) -> int:
    """Pass over turns of `loop`, before `horizon`, in which it would only decode; how many.

    `said(at, output)` gets what clients are sent meanwhile. `near`: when another device turns next
    that this one shares links with, or is reached from; a leap in which bytes move does not go
    beyond it, any other leap does.
    """
    job = loop.state.lanes.alone
    turns = _turns(loop)
    if job is None or turns is None:
        return 0
    agenda = heap.agenda
    held = None if loop.choice is None or len(turns) > 1 else loop.choice.until
    in_turns = loop.preset.compute.in_turns
    bounds = (loop.until, horizon, None if in_turns else held)
    until = min(t for t in bounds if t is not None)
    moves = runner.moves(turn.m.spec.name for turn in turns)
    if moves:
        until = min(until, near)
        agenda.leap(heap)
        agenda.run(_next(heap), until)
        until = min(until, agenda.reached)
    first = heap.withdraw(job)
    if first is None:
        return 0  # something else happens before it ends, or its end is not certain
    at, done = first
    turns[0].seconds, turns[0].stall = done.seconds, done.stall
    until = min(until, _next(heap))
    steps = 0
    while at < until and turns[0].goes_on(runner) and _pages_for(turns):
        if moves:
            agenda.run(min(at, _next(heap)), until)
            until = min(until, agenda.reached, _next(heap))
            if until <= at:
                break  # a change has brought an event
        clock.advance_to(at)
        turns[0].end_step(at, runner, said)
        turns.rotate(-1)
        at = turns[0].begin_step(runner, until if moves else None)
        steps += 1
    if steps == 0:
        heap.schedule(at, done)
    else:
        loop.leapt(job, turns[0].m, steps)
    return steps


def _next(heap: EventHeap) -> float:
    """When the device's next event happens that is known; inf if none is."""
    return inf if heap.next is None else heap.next


def _pages_for(turns: deque[_Batch]) -> bool:
    """Whether the step that follows the one in flight has the pages that it needs."""
    return turns[1].has_pages(0) if len(turns) > 1 else turns[0].has_pages(1)


def _turns(loop: Loop) -> deque[_Batch] | None:
    """The models that run, as they will come, that of the job in flight first; None where one of
    them may do anything but repeat its step, or where it is not certain which comes next."""
    state, job = loop.state, loop.state.lanes.alone
    if job is None or any(len(work.tokens) != 1 for work in job.work):
        return None
    if state.lanes.share(job) < 1:
        return None  # the next one may have more of the device
    if state.asking or loop.operations.pending or state.lending.borrower.wanted():
        return None
    following = _following(loop, job)
    if following is None:
        return None
    prompts = loop.choice is None or loop.choice.computes_prompts
    turns: deque[_Batch] = deque()
    for m in (state.models[job.model], *following):
        stays = (
            m.residency is Residency.RESIDENT and m.life.turning is None and m.life.swap_to is None
        )
        if m.frozen or m.running.leaving or not stays or not _only_decodes(m, state, prompts):
            return None
        turns.append(_Batch(m, state.pool))
    # Whoever has all of the prompt from the cache is still to be told when it was admitted.
    told = all(r.first_token_at is not None for batch in turns for r in batch.requests)
    # What waits for the end of a job waits for the end of this one.
    stay = not any(r.cancelled or r.waits_for for batch in turns for r in batch.requests)
    later = all(r.decoding for batch in list(turns)[1:] for r in batch.requests)
    now = len(job.work) == len(turns[0].requests)
    most = min(state.settings.step_tokens, state.settings.step_logits)
    fit = all(len(batch.requests) + bool(batch.m.shortages) <= most for batch in turns)
    return turns if told and stay and later and now and fit else None


def _following(loop: Loop, job: Job) -> list[ModelState] | None:
    """The models whose steps follow that of the job in flight, in turn, before it is that model's
    again: none where one model runs on. None where that is not certain."""
    state = loop.state
    if loop.preset.compute.in_turns:
        others = sorted(runnable(state), key=lambda m: m.last_run)
        return others if len(state.lanes.jobs) == 1 or not others else None
    held = loop.choice
    alone = len(state.lanes.jobs) == 1 or not runnable(state)
    return [] if alone and held is not None and held.model == job.model else None


def _only_decodes(m: ModelState, state: DeviceState, prompts: bool) -> bool:
    """Whether a step of its running requests, which have pages, neither admits nor asks for more;
    `prompts`: whether it may admit.

    A request that found no room waits on while no more becomes free, and its shortage is known.
    """
    if m.held or not m.waiting or len(m.running) >= m.spec.max_running:
        return not m.shortages
    first = m.waiting.first.id
    known = all(s.request_id == first for s in m.shortages)
    return known and (not prompts or m.blocked == (first, state.freed))


class _Batch:
    """The running requests of one model, all of which decode."""

    def __init__(self, m: ModelState, pool: Pool) -> None:
        self.m = m
        self.requests = tuple(m.running)
        self._pool = pool
        self._rows = [(r, r.tokens, r.id, r.prompt_tokens) for r in m.running]
        self._left = min((r.submission.max_tokens - r.generated for r in m.running), default=0)
        """Steps until the first of them has its last token."""
        self._context = sum(len(r.tokens) for r in m.running)
        """KV tokens that its next step, or that in flight, reads."""
        stops = [frozenset(r.submission.stop_token_ids) for r in m.running]
        self._stops = stops if any(stops) else []
        self._quiet = self._steps_to_a_full_block()
        """So many steps end before one that fills a block."""
        self._grown = False
        """Blocks are there for every token."""
        self.seconds = self.stall = 0.0
        """Of the step in flight, and of these, what it waits for layers."""

    def goes_on(self, runner: SimRunner) -> bool:
        """Whether all requests go on after the step in flight."""
        if self._left <= 1:
            return False
        for r, stops in zip(self.requests, self._stops, strict=False):
            if runner.token(self.m.spec, r.id, len(r.tokens)) in stops:
                return False
        return True

    def has_pages(self, more: int) -> bool:
        """Whether KV of `more` tokens (0 or 1) beyond what each has is there for the taking."""
        if self._grown and (self._quiet or not more):
            return True
        size = self.m.spec.block_tokens
        blocks = sum(len(r.tokens) + more > len(r.blocks) * size for r in self.requests)
        if not blocks:
            return True
        kv = self.m.kv
        pages = kv.pages_for(blocks)
        limit = pages if kv.limit is None else kv.limit - kv.pages
        return pages <= min(limit, self._pool.free - self._pool.promised)

    def end_step(self, at: float, runner: SimRunner, said: Said) -> None:
        """Each has a token more."""
        m = self.m
        spec, token_of = m.spec, runner.token
        for r, tokens, name, prompt in self._rows:
            n = len(tokens)
            token = token_of(spec, name, n)
            r.computed = n
            tokens.append(token)
            r.last_token_at = at
            said(at, TokenOut(name, token, n - prompt))
        if self._quiet:
            self._quiet -= 1
        else:
            for r in self.requests:
                if r.computed % spec.block_tokens == 0:
                    m.kv.remember(r.tokens, r.blocks, r.computed, r.salt)
            self._quiet = self._steps_to_a_full_block()
            self._grown = False
        self._left -= 1
        # Setting `last_used` counts the requests' new tokens as a change, too.
        m.last_run = m.last_used = at
        m.lane_seconds += self.seconds
        m.took(self.seconds - self.stall, Load(0, 0, 0, len(self.requests), self._context))
        self._context += len(self.requests)

    def begin_step(self, runner: SimRunner, until: float | None) -> float:
        """Make room for each one's token; when the step will end.

        `until`: as of `SimRunner.decodes_in_layers`; None where nothing moves.
        """
        m = self.m
        if not self._grown:
            for r in self.requests:
                if len(r.tokens) > len(r.blocks) * m.spec.block_tokens:
                    short = m.kv.grow(r.blocks, len(r.tokens))
                    assert short is None, "has_pages"
            self._grown = True
        name, n = m.spec.name, len(self.requests)
        if until is None:
            self.seconds, self.stall, end = runner.decodes(name, n, self._context)
        else:
            step = runner.decodes_in_layers(name, n, self._context, until)
            self.seconds, self.stall, end = step
        return end

    def _steps_to_a_full_block(self) -> int:
        size = self.m.spec.block_tokens
        return min((-len(r.tokens) % size for r in self.requests), default=0)
