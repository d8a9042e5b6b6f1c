"""Measure this machine: what jobs of each model cost, what the link carries, what the loop adds."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ballast.core.actions import Short
from ballast.core.cost import StepCosts
from ballast.core.errors import DeviceError
from ballast.core.event import Arrival, Drain, JobDone, TransferDone
from ballast.core.job import Job, SequenceWork
from ballast.core.request import Sampling, Submission
from ballast.core.settings import FleetSettings
from ballast.engine.device import LiveDevice
from ballast.engine.state import ModelState
from ballast.sim.simulate import Profile

PAUSE = 0.05
"""Seconds of idleness before a prefill is timed."""

Shape = tuple[tuple[int, int], ...]
"""A job: (new tokens, context before them) of each sequence."""


def calibrate(fleet: FleetSettings, rounds: int = 4, seed: int = 0) -> Profile:
    """A profile of this machine for the fleet's models.

    In each round every model in turn is activated over the (paced) link, timed, and runs a grid of
    jobs on its lane; `StepCosts` are fitted to the medians over rounds, which lie apart in time as
    the jobs of a busy fleet do. The engine's own time per job is taken from a short run of its
    loop. Takes a few seconds per model; the device must be otherwise idle.
    """
    device = LiveDevice(replace(fleet, preset="balloon", options={}), lambda outputs: None)
    try:
        device.populate()
        moved, seconds = 0, 0.0
        taken: dict[str, dict[Shape, tuple[Job, list[float]]]] = {
            name: {} for name in device.state.models
        }
        for _ in range(rounds):
            for m in device.state.models.values():
                done = _activate(device, m)
                moved, seconds = moved + done.n_bytes, seconds + done.seconds
                _measure(device, m, random.Random(seed), taken[m.spec.name])
                m.weights.evict()
        costs = {
            name: fit([(job, statistics.median(times)) for job, times in points.values()])
            for name, points in taken.items()
        }
        overhead = _loop_overhead(device)
    finally:
        device.close()
    return Profile(costs=costs, link_bytes_per_second=moved / seconds, overhead=overhead)


def fit(points: Sequence[tuple[Job, float]]) -> StepCosts:
    """Non-negative coefficients with least squares of the relative error over (job, seconds)."""
    unit = StepCosts(1, 1, 1, 1, 1)
    rows = np.array([[x / seconds for x in unit.features(job)] for job, seconds in points])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(rows / scale, np.ones(len(points)))
    return StepCosts(*(float(x) for x in solution / scale))


def relative_errors(costs: StepCosts, points: Sequence[tuple[Job, float]]) -> list[float]:
    """Of the fit, point by point: |predicted / measured - 1|."""
    return [abs(costs.seconds(job) / seconds - 1) for job, seconds in points]


def overhead_of(entries: Iterable[dict[str, Any]]) -> float:
    """The engine's own seconds per job, from a story: the median gap between back-to-back jobs.

    The gap between two ends, less the second job's time on the lane.
    """
    ends = [(e["at"], e["seconds"]) for e in entries if e.get("event") == "JobDone"]
    gaps = [at - before - seconds for (before, _), (at, seconds) in itertools.pairwise(ends)]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def _activate(device: LiveDevice, m: ModelState) -> TransferDone:
    short = m.weights.activate(device.state.next_transfer())
    if isinstance(short, Short):
        raise DeviceError("calibrate", f"{m.spec.name} alone is short of {short.pages} pages")
    event = device.inbox.take(None)[0]
    assert isinstance(event, TransferDone)
    return event


def _shapes(most_tokens: int, most_sequences: int, most_context: int) -> Iterator[Shape]:
    for tokens in (16, 64, 192, most_tokens):
        yield ((min(tokens, most_tokens, most_context), 0),)
    half = min(most_tokens, most_context // 2)
    yield ((half, most_context - half),)
    for sequences in (1, 2, 4, 8, 16):
        if sequences <= most_sequences:
            yield ((1, 15),) * sequences
            yield ((1, most_context - 1),) * sequences
    yield ((half // 2, 0), *[(1, most_context // 2)] * min(4, most_sequences))


def _measure(
    device: LiveDevice,
    m: ModelState,
    rng: random.Random,
    taken: dict[Shape, tuple[Job, list[float]]],
) -> None:
    """Run each job of the grid on the lane, once more, as it comes in service.

    A decode step follows another: the second of two counts. A prefill begins cold, after other
    models or after nothing: it runs once, after a pause.
    """
    settings, spec = device.fleet.device, m.spec
    room = device.state.pool.free * settings.page_bytes // spec.kv_bytes_per_token // 2
    sequences = min(16, settings.step_logits, spec.max_running)
    context = max(32, min(spec.max_model_len, 512, room // sequences))
    for shape in _shapes(settings.step_tokens, sequences, context):
        job, tables = _job(m, shape, rng)
        if job.decode_sequences:
            _run(device, job)
        else:
            device.inbox.take(device.clock.now() + PAUSE)
        seconds = _run(device, job)
        for table in tables:
            m.kv.free(table)
        taken.setdefault(shape, (job, []))[1].append(seconds)


def _run(device: LiveDevice, job: Job) -> float:
    """A job's time on the lane, through the runner and the inbox as in service."""
    device.runner.start(job)
    event = device.inbox.take(None)[0]
    if not isinstance(event, JobDone):
        raise DeviceError("calibrate", f"a job of {job.model} did not end well: {event}")
    return event.seconds


def _job(m: ModelState, shape: Shape, rng: random.Random) -> tuple[Job, list[list[int]]]:
    tables, work = [], []
    for i, (tokens, context) in enumerate(shape):
        table: list[int] = []
        short = m.kv.grow(table, tokens + context)
        if short is not None:
            raise DeviceError("calibrate", f"short of {short.pages} pages for {m.spec.name}")
        tables.append(table)
        ids = [rng.randrange(m.spec.vocab) for _ in range(tokens)]
        work.append(SequenceWork(f"c{i}", ids, context, table, Sampling()))
    return Job(0, 0, m.spec.name, tuple(work)), tables


def _loop_overhead(device: LiveDevice, n_tokens: int = 64) -> float:
    """Serve one request at a time on the idle device and look at the gaps between its jobs."""
    for m in device.state.models.values():
        n = min(n_tokens, m.spec.max_model_len - 8)
        submission = Submission(
            id=f"o-{m.spec.name}", model=m.spec.name, prompt=(1,) * 8, max_tokens=n, ignore_eos=True
        )
        device.post(Arrival(submission))
    device.post(Drain())
    device.run()
    return overhead_of(device.story.entries)
