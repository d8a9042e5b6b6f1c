"""Skip over many decode steps at once, while only the clock and sequence lengths can change.

Between two events of a device, models that only decode repeat their steps: each running request
gets a token, and now and then a block. A leap has the same effect as those turns of the loop: its
books, the outputs to clients and their times are the same to the last bit. It leaves the last of
the steps in flight, so that the next event meets an ordinary state.

This module handles models that have the whole device in turn, or one of them for as long as the
compute policy has set; all others are in `sim.leap_lanes`. Used by `SimDevice`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from ballast.core.clock import VirtualClock
from ballast.core.event import JobDoneEvent
from ballast.core.job import Job
from ballast.engine.compute_view import runnable
from ballast.engine.loop import Loop
from ballast.engine.model import ModelState
from ballast.sim.decoding import DecodeBatch, batch_of, fit
from ballast.sim.event_heap import EventHeap
from ballast.sim.leap_lanes import leap_on_lanes
from ballast.sim.runner import SimRunner

Passed = Callable[[Sequence[DecodeBatch]], None]
"""Gets the steps of a leap, as the batch of each, in order."""


def leap(
    loop: Loop,
    heap: EventHeap,
    runner: SimRunner,
    clock: VirtualClock,
    passed: Passed,
    horizon: float = inf,
    near: float = inf,
) -> int:
    """Pass over turns of `loop`, before `horizon`, in which it would only decode; how many.

    `near`: when another device turns next that this one shares links with, or is reached from; a
    leap in which bytes move does not go beyond it, any other leap does.
    """
    state = loop.state
    if state.asking or loop.commands.pending or state.lending.borrower.wanted():
        return 0
    if state.migration.departing:
        return 0  # a request leaves when a block of it has filled
    until = horizon if loop.until is None else min(loop.until, horizon)
    steps = _leap_alone(loop, heap, runner, clock, until, near)
    if not steps:
        steps = leap_on_lanes(loop, heap, runner, until, near)
    if steps:
        passed(steps)
    return len(steps)


def _leap_alone(
    loop: Loop,
    heap: EventHeap,
    runner: SimRunner,
    clock: VirtualClock,
    until: float,
    near: float,
) -> list[DecodeBatch]:
    """Pass over steps of jobs that have the whole device, about which no policy is asked."""
    job = loop.state.lanes.alone
    if job is None or (heap.next_end is None and not runner.moves((job.model,))):
        return []  # something else happens before it ends
    turns = _turns(loop, runner, job)
    if turns is None:
        return []
    if not loop.preset.compute.in_turns and loop.dispatcher.choice is not None:
        until = min(until, loop.dispatcher.choice.until)
    moves = runner.moves(turn.m.spec.name for turn in turns)
    if moves:
        until = min(until, near)
        heap.agenda.leap(heap)
        heap.agenda.run(_next(heap), until)
        until = min(until, heap.agenda.reached)
    first = heap.withdraw(job)
    if first is None:
        return []  # something else happens before it ends, or its end is not certain
    steps = _repeat(loop, heap, runner, clock, turns, first, until, moves=moves)
    if not steps:
        heap.schedule(*first)
        return []
    for batch in turns:
        batch.write()
    loop.leaps.finish_alone(job, turns[0].m, len(steps))
    return steps


def _repeat(
    loop: Loop,
    heap: EventHeap,
    runner: SimRunner,
    clock: VirtualClock,
    turns: deque[DecodeBatch],
    first: tuple[float, JobDoneEvent],
    until: float,
    *,
    moves: bool,
) -> list[DecodeBatch]:
    """Repeat the steps of `turns`, each in its turn, while they end before `until`.

    `first`: the end of the step in flight, and when it comes; `moves`: whether bytes may move over
    links meanwhile. Returns the batch of each step that has ended; the last one begun is in flight.
    """
    at, done = first
    seconds, stall = done.seconds, done.stall
    until = min(until, _next(heap))
    agenda, pool, steps = heap.agenda, loop.state.pool, list[DecodeBatch]()
    while at < until and turns[0].goes_on(runner):
        following = turns[1] if len(turns) > 1 else turns[0]
        blocks = following.blocks(len(turns) == 1)
        if blocks and not fit(pool, [(following, blocks)]):
            break
        if moves:
            agenda.run(min(at, _next(heap)), until)
            until = min(until, agenda.reached, _next(heap))
            if until <= at:
                break  # a change has brought an event
        clock.advance_to(at)
        turns[0].end_step(at, seconds, stall, 1.0)
        steps.append(turns[0])
        turns.rotate(-1)
        following.begin_step()
        name, n, context = following.m.spec.name, len(following.rows), following.context
        if moves:
            seconds, stall, at = runner.decodes_in_layers(name, n, context, until)
            until = min(until, agenda.reached)
            continue
        seconds, stall, at = runner.decodes(name, n, context)
        if len(turns) == 1 and runner.even(at):
            pace, overhead = runner.decodes_on(name, n)
            at, seconds = following.run_on(pace, overhead, at, seconds, until)
            more = len(following.ends) - len(steps)
            if more:
                clock.advance_to(following.ends[-1])
                runner.decoded(following.ends[-1], at)
                steps += [following] * more
    return steps


def _next(heap: EventHeap) -> float:
    """Time of the device's next known event; inf if there is none."""
    return inf if heap.next is None else heap.next


def _turns(loop: Loop, runner: SimRunner, job: Job) -> deque[DecodeBatch] | None:
    """The models that run, as they will come, that of the job in flight first; None where one of
    them may do anything but repeat its step, or where it is not certain which comes next."""
    state = loop.state
    if state.lanes.share(job) < 1:
        return None  # the next one may have more of the device
    following = _following(loop, job)
    if following is None:
        return None
    choice = loop.dispatcher.choice  # models in turn are asked about anew
    prompts = loop.preset.compute.in_turns or choice is None or choice.computes_prompts
    turns: deque[DecodeBatch] = deque()
    for m in (state.models[job.model], *following):
        batch = batch_of(m, state, runner, prompts)
        if batch is None or not batch.rows:
            return None
        turns.append(batch)
    return turns


def _following(loop: Loop, job: Job) -> list[ModelState] | None:
    """The models whose steps follow that of the job in flight, in turn, before it is that model's
    again: none where one model runs on. None where that is not certain."""
    state = loop.state
    if loop.preset.compute.in_turns:
        others = sorted(runnable(state), key=lambda m: m.last_run)
        return others if len(state.lanes.jobs) == 1 or not others else None
    held = loop.dispatcher.choice
    alone = len(state.lanes.jobs) == 1 or not runnable(state)
    return [] if alone and held is not None and held.model == job.model else None
