"""Skip over decode steps of models on several lanes, or that a compute policy schedules.

Used by `sim.leap`. At the end of each step the compute policy decides as in the loop, and the model
that begins gets the same lane and part of the device. A leap leaves out only what has no observer:
work and results of jobs that end within it, views for the memory policy, which would not be called,
and the story of each turn.
"""

from __future__ import annotations

from ballast.core.job import Job
from ballast.engine.compute_view import runnable
from ballast.engine.leaps import EndedStep
from ballast.engine.loop import Loop
from ballast.sim.decoding import DecodeBatch, batch_of, fit
from ballast.sim.event_heap import EventHeap
from ballast.sim.runner import SimRunner


def leap_on_lanes(
    loop: Loop, heap: EventHeap, runner: SimRunner, until: float, near: float
) -> list[DecodeBatch]:
    """The steps of a leap that ends before `until`; `near`: as of `sim.leap.leap`.

    Other jobs go on beside it: the leap ends before the first of them does.
    """
    found = heap.next_end
    if found is None or not found[0] < until:
        return []  # something else happens before
    if runner.calls_at(loop.state.now):
        return []  # a job begins when they have returned
    batches = _batches(loop, runner)
    if found[1].job.model not in batches:
        return []
    flying = [job for job in loop.state.lanes.jobs if job is not None]
    if runner.goes_through_layers({*batches, *(job.model for job in flying)}):
        return []
    if runner.moves(()):  # its end brings an event
        until = min(until, near, heap.agenda.next)
    state, since = loop.state, loop.state.now
    steps: list[DecodeBatch] = []
    ended: list[EndedStep] = []
    begun: dict[int, Job] = {}
    """Jobs in flight that have begun within the leap, by id."""
    while (found := heap.next_end) is not None and not state.asking:
        at, done = found
        job = done.job
        batch = batches.get(job.model)
        if batch is None or not at < until or not batch.goes_on(runner):
            break
        idle = [(b, b.blocks(0)) for b in batches.values() if b.m.job is None]
        needs = [(batch, batch.blocks(1)), *idle]
        if runner.maps_kv and any(blocks for _, blocks in needs):
            break  # it takes calls, and the job begins when they have returned
        if not fit(state.pool, needs):
            break
        heap.take_end(job)
        batch.end_step(at, done.seconds, done.stall, state.lanes.share(job))
        loop.leaps.end_step(job)
        begun.pop(job.id, None)
        steps.append(batch)
        ended.append(EndedStep(job, at, done.seconds - done.stall))
        while (new := loop.leaps.begin_step(lambda name: batches[name].write())) is not None:
            begun[new.id] = new
            its = batches[new.model]
            its.begin_step()
            runner.step(new, len(its.rows), its.context)
    if steps:
        for batch in batches.values():
            batch.write()
        for whole in loop.leaps.finish_on_lanes(ended, list(begun.values()), since):
            runner.give_work(whole)
    return steps


def _batches(loop: Loop, runner: SimRunner) -> dict[str, DecodeBatch]:
    """By model, those that only decode: of all that could begin a job, and of the jobs in flight as
    many as there are; none where a model that could begin may do something else."""
    state = loop.state
    batches: dict[str, DecodeBatch] = {}
    for m in runnable(state):
        batch = batch_of(m, state, runner, prompts=True)
        if batch is None or not batch.rows:
            return {}
        batches[m.spec.name] = batch
    for job in state.lanes.jobs:
        if job is None:
            continue
        batch = batch_of(state.models[job.model], state, runner, prompts=True)
        if batch is not None:
            batches[batch.m.spec.name] = batch
    return batches
