"""Fit job costs, job spread and loop overhead of a machine from a story recorded on it.

Used by `sim.calibrate`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.fitting import Vector, fit_linear
from ballast.sim.job_spread import JobSpread, quantiles_of
from ballast.sim.machine_profile import PAUSE

AT_ONCE = 1e-4
"""Seconds without work up to which one job followed another at once."""

SETTLING = 4
"""Decode steps after a prefill that take longer than those which follow: their code and data have
left the caches. Measured on two CPUs, where the fifth is within a tenth of the later ones."""

TERMS = 6
"""Coefficients of `StepCosts` that are fitted: the first of them."""

STALL = 3.0
"""Factor on the expected duration beyond which a job counts as held up by something else."""


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job as it ran in service."""

    model: str
    load: JobLoad
    seconds: float
    """Seconds that the job had the lane."""
    gap: float
    """Seconds since the end of the job before, as the loop saw it; infinite for the first."""
    before: JobLoad | None
    """Load of the job before."""
    step: int = SETTLING
    """Jobs since the last one with a prefill: 0 for the first after it."""
    delay: float | None = None
    """Seconds from the turn of the loop that started the job until it began; None: unknown."""

    @property
    def idle(self) -> float:
        """Seconds without work before it: up to the turn of the loop that started it. Where that is
        unknown, all since the job before, or 0 where the loop may have worked meanwhile."""
        if self.delay is None:
            return self.gap if self.gap > PAUSE else 0.0
        return self.gap - self.delay

    @property
    def after_pause(self) -> bool:
        return self.idle > PAUSE

    @property
    def settling(self) -> bool:
        """Whether it is one of the first decode steps after a prefill."""
        return self.step < SETTLING and not self.load.prefill_chunks

    @property
    def cold(self) -> bool:
        """Whether it takes longer for what went before: a pause, or a prefill."""
        return self.before is None or self.after_pause or self.settling


@dataclass(frozen=True, slots=True)
class JobFit:
    """Expected seconds of jobs."""

    costs: Mapping[str, StepCosts]
    """By model, of jobs that are not cold."""
    wake: float
    """Further seconds of a job after a pause."""
    settling: tuple[float, ...]
    """Further seconds of the first, second, ... decode step after a prefill."""

    def of(self, jobs: Sequence[TimedJob]) -> Vector:
        """Return the expected seconds of each job."""
        return np.array([self.costs[job.model].of(job.load) + self._cold(job) for job in jobs])

    def _cold(self, job: TimedJob) -> float:
        seconds = self.wake if job.after_pause else 0.0
        return seconds + (self.settling[job.step] if job.settling else 0.0)


def jobs_of(entries: Sequence[Mapping[str, Any]]) -> list[TimedJob]:
    """Return the jobs in a device's story, but for those of a leap, those that began while weights
    arrived (they waited for layers, and ran beside copies), and those during which a request came
    (the server took processor time from them, which is no cost of theirs)."""
    early = _begun_early(entries)
    receipts = sorted(e["arrival"] for e in entries if e.get("event") == "Arrival")
    started = {e["job"]: e["at"] for e in entries if "job" in e and "event" not in e}
    found: list[TimedJob] = []
    ended, before, step = float("-inf"), None, SETTLING
    for e in entries:
        if e.get("event") != "JobDone":
            continue
        load = JobLoad(*(e[key] for key in JobLoad._fields))
        if before is not None:
            step = 0 if before.prefill_chunks else step + 1
        job = e.get("job")
        began = e["at"] - e["seconds"]
        turn = started.get(job, began)
        disturbed = bisect_left(receipts, e["at"]) > bisect_right(receipts, turn)
        if job not in early and not disturbed:
            delay = began - turn if job in started else None
            found.append(
                TimedJob(e["model"], load, e["seconds"], began - ended, before, step, delay)
            )
        ended, before = e["at"], load
    return found


def _begun_early(entries: Sequence[Mapping[str, Any]]) -> set[int]:
    """Jobs that began between a model's first layers and its last."""
    opened: set[int] = set()
    early: set[int] = set()
    for e in entries:
        event = e.get("event")
        if event == "FirstJobReady":
            opened.add(e["transfer_id"])
        elif event == "TransferDone":
            opened.discard(e["transfer_id"])
        elif event is None and opened and "job" in e:
            early.add(e["job"])
    return early


def fit_jobs(jobs: Sequence[TimedJob]) -> JobFit:
    """Fit what jobs take, without the loop between them (`with_loop`).

    Non-negative coefficients with the least soft-L1 of the relative error, by model; what cold jobs
    take beyond them is fitted along, as most prefills may be cold. Then it is the median of that,
    the same for all models. Then everything is scaled so that all together take what they took: a
    queue feels means, of a distribution that leans to the right.
    """
    costs = {}
    for model in dict.fromkeys(job.model for job in jobs):
        own = [job for job in jobs if job.model == model]
        terms = np.array([(*_terms(job.load), *_cold_terms(job)) for job in own])
        seconds = np.array([job.seconds for job in own])
        fitted = fit_linear(terms, seconds, np.zeros(terms.shape[1]))
        costs[model] = StepCosts(*fitted[:TERMS])
    beyond = [job.seconds - costs[job.model].of(job.load) for job in jobs]
    wake, settling = _cold_medians(jobs, beyond)
    fit = JobFit(costs, wake, settling)
    factor = _over(np.array([job.seconds for job in jobs]), fit.of(jobs))
    return JobFit(
        {model: c.scaled(factor) for model, c in costs.items()},
        factor * wake,
        tuple(factor * seconds for seconds in settling),
    )


def spread_of(jobs: Sequence[TimedJob], fit: JobFit) -> JobSpread:
    """Return the spread of job durations around those expected: jobs are weighted by their expected
    seconds, and stalls count as `STALL` times the expectation."""
    expected = fit.of(jobs)
    ratios = np.minimum(np.array([job.seconds for job in jobs]) / expected, STALL)
    return JobSpread(quantiles=quantiles_of(ratios.tolist(), expected.tolist()))


def slower_than(fit: JobFit, jobs: Sequence[TimedJob]) -> float:
    """Return the share by which `jobs` took longer than expected, all together; not below 0."""
    if not jobs:
        return 0.0
    return max(0.0, _over(np.array([job.seconds for job in jobs]), fit.of(jobs)) - 1.0)


def with_loop(jobs: Sequence[TimedJob], fit: JobFit) -> tuple[float, JobFit]:
    """Return the loop's own seconds at every job, and `fit` with what else the loop does.

    From the gaps between back-to-back jobs that are not cold: a constant, a part for each sequence
    of the job that ended, whose tokens are handed out, and one for each prefill chunk of the next,
    which is admitted. What the loop takes longer before cold jobs is added to what these do: after
    a pause from its turn on, in which it took the request.
    """
    close = [j for j in jobs if j.before is not None and j.idle <= AT_ONCE and j.gap > 0]
    warm = [j for j in close if not j.cold]
    if not warm:
        return 0.0, fit
    terms = np.array([_handled(job.before, job) for job in warm])
    gaps = np.array([job.gap for job in warm])
    coefficients = np.array(fit_linear(terms, gaps, np.zeros(3)))
    fixed, each, admission = _over(gaps, terms @ coefficients) * coefficients
    woken = [j for j in jobs if j.after_pause and j.delay is not None]
    taken = [(j.gap, _handled(j.before, j)) for j in close]
    # In virtual time a job pays for handing out its own tokens, not those of the one before.
    taken += [(j.delay, _handled(j.load, j)) for j in woken if j.delay is not None]
    beyond = [seconds - float(np.dot(n, (fixed, each, admission))) for seconds, n in taken]
    wake, settling = _cold_medians([*close, *woken], beyond)
    costs = {
        model: replace(
            c,
            per_sequence=c.per_sequence + float(each),
            per_chunk=c.per_chunk + float(each + admission),
        )
        for model, c in fit.costs.items()
    }
    added = tuple(a + b for a, b in zip(fit.settling, settling, strict=True))
    return float(fixed), JobFit(costs, fit.wake + wake, added)


def _cold_medians(
    jobs: Sequence[TimedJob], beyond: Sequence[float]
) -> tuple[float, tuple[float, ...]]:
    """Return the median of `beyond`, not below 0, over jobs after a pause, and over each of the
    first decode steps after a prefill; 0 where there is none."""
    pairs = list(zip(jobs, beyond, strict=True))
    steps: list[list[float]] = [[] for _ in range(SETTLING)]
    for job, seconds in pairs:
        if job.settling and not job.after_pause:
            steps[job.step].append(seconds)
    settling = tuple(_median(step) for step in steps)
    wake = [
        seconds - (settling[job.step] if job.settling else 0.0)
        for job, seconds in pairs
        if job.after_pause
    ]
    return _median(wake), settling


def _median(values: Sequence[float]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0


def _over(seen: Vector, expected: Vector) -> float:
    """By how much what was seen exceeds what was expected, all together; stalls are no more than
    `STALL` of what was expected."""
    return float(np.minimum(seen, STALL * expected).sum() / expected.sum())


def _handled(ended: JobLoad | None, job: TimedJob) -> tuple[float, float, float]:
    """What the loop does before `job`: once, for each sequence of the `ended` job, and for each
    prompt of the next."""
    assert ended is not None
    return 1.0, ended.decode_sequences + ended.prefill_chunks, job.load.prefill_chunks


def _terms(n: JobLoad) -> tuple[float, ...]:
    """Terms that the first `TERMS` coefficients of `StepCosts` multiply."""
    prefill = (n.prefill_pairs, n.prefill_chunks)
    return (1.0, n.prefill_tokens, n.decode_sequences, n.decode_context, *prefill)


def _cold_terms(job: TimedJob) -> tuple[float, ...]:
    """Whether it came after a pause, and whether as the first, second, ... settling step."""
    return (job.after_pause, *(job.settling and job.step == step for step in range(SETTLING)))
