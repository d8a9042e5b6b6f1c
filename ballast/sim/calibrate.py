"""Measure this machine: what jobs of each model cost, what the link carries, what the loop adds."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ballast.core.actions import Short
from ballast.core.cost import StepCosts
from ballast.core.errors import DeviceError
from ballast.core.event import Arrival, Drain, JobDone, TransferDone
from ballast.core.job import Job, Load, SequenceWork
from ballast.core.request import Sampling, Submission
from ballast.core.settings import FleetSettings
from ballast.engine.device import LiveDevice
from ballast.engine.model import ModelState
from ballast.sim.device import Profile
from ballast.sim.measure_link import LinkMeter

PAUSE = 0.05
"""Seconds of idleness before a prefill is timed."""

REQUESTS = 6
"""Per model, in the run that shows what jobs take in service."""
SPACING = 0.35
"""Seconds between these requests, on average."""

Shape = tuple[tuple[int, int], ...]
"""A job: (new tokens, context before them) of each sequence."""


def calibrate(fleet: FleetSettings, rounds: int = 4, seed: int = 0) -> Profile:
    """A profile of this machine for the fleet's models.

    In each round every model in turn is activated over the (paced) link, timed, and runs a grid of
    jobs on its lane; `StepCosts` are fitted to the medians over rounds, which lie apart in time as
    the jobs of a busy fleet do. A short run of the loop beside a client then says how much longer
    jobs take in service, and what the engine itself adds per job. Takes some ten seconds per model;
    the machine must be otherwise idle.
    """
    device = LiveDevice(replace(fleet, preset="balloon", options={}), lambda outputs: None)
    try:
        device.populate()
        link = LinkMeter()
        taken: dict[str, dict[Shape, tuple[Job, list[float]]]] = {
            name: {} for name in device.state.models
        }
        for _ in range(rounds):
            for m in device.state.models.values():
                link.activated(_activate(device, m))
                link.measure(device, m)
                _measure(device, m, random.Random(seed), taken[m.spec.name])
                m.weights.evict()
        costs = {
            name: fit([(job, statistics.median(times)) for job, times in points.values()])
            for name, points in taken.items()
        }
        client = threading.Thread(target=_ask, args=(device, random.Random(seed)), daemon=True)
        client.start()
        device.run()
        client.join()
        entries = list(device.story.entries)
    finally:
        device.close()
    costs = in_service(costs, entries)
    overhead = overhead_of(entries)
    return Profile(costs=costs, link=link.rates(), overhead=overhead)


def fit(points: Sequence[tuple[Job, float]]) -> StepCosts:
    """Non-negative coefficients with least squares of the relative error over (job, seconds)."""
    rows = np.array([_terms(job.load) for job, _ in points]) / [[seconds] for _, seconds in points]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(rows / scale, np.ones(len(points)))
    return StepCosts(*(float(x) for x in solution / scale))


def _terms(n: Load) -> tuple[float, ...]:
    """What the first six coefficients of `StepCosts` are multiplied with."""
    prefill = (n.prefill_pairs, n.prefill_chunks)
    return (1.0, n.prefill_tokens, n.decode_sequences, n.decode_context, *prefill)


def relative_errors(costs: StepCosts, points: Sequence[tuple[Job, float]]) -> list[float]:
    """Of the fit, point by point: |predicted / measured - 1|."""
    return [abs(costs.seconds(job) / seconds - 1) for job, seconds in points]


def in_service(
    costs: Mapping[str, StepCosts], entries: Sequence[dict[str, Any]]
) -> dict[str, StepCosts]:
    """The same costs, scaled to what jobs took while a fleet was served.

    Beside clients and a loop a job takes longer than alone. One factor for all models, the median
    over jobs that only decode, scales everything; what jobs with a prefill take beyond that goes
    into `per_chunk`, as a share of `base`.
    """
    told = [
        (costs[e["model"]], Load(*(e[key] for key in Load._fields)), e["seconds"])
        for e in entries
        if e.get("event") == "JobDone"
    ]
    decodes = [s / c.of(n) for c, n, s in told if not n.prefill_chunks]
    factor = statistics.median(decodes) if decodes else 1.0
    # A fit to disturbed measurements may have no base, and so nothing of which to be a share.
    beyond = [
        (s - factor * c.of(n)) / (c.base * n.prefill_chunks)
        for c, n, s in told
        if n.prefill_chunks and c.base
    ]
    share = max(0.0, statistics.median(beyond)) if beyond else 0.0
    return {
        name: replace(c.scaled(factor), per_chunk=factor * c.per_chunk + share * c.base)
        for name, c in costs.items()
    }


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
        if job.load.decode_sequences:
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


def _ask(device: LiveDevice, rng: random.Random) -> None:
    """A client: requests of all models in turn, spaced so that the device idles now and then."""
    rest = threading.Event()
    for i in range(REQUESTS):
        for m in device.state.models.values():
            length = min(m.spec.max_model_len // 2, rng.choice((8, 24, 48, 96, 192)))
            submission = Submission(
                id=f"calibrate-{m.spec.name}-{i}",
                model=m.spec.name,
                prompt=tuple(rng.randrange(m.spec.vocab) for _ in range(length)),
                max_tokens=min(m.spec.max_model_len // 2, rng.choice((8, 16, 32))),
                ignore_eos=True,
            )
            device.post(Arrival(submission))
            rest.wait(rng.expovariate(1 / SPACING))
    device.post(Drain())
