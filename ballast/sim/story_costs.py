"""Fit job costs, job spread and loop overhead of a machine from a story recorded on it.

Used by `sim.calibrate`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.fitting import Vector, fit_linear
from ballast.sim.job_spread import JobSpread, quantiles_of
from ballast.sim.machine_profile import PAUSE, RECENT

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
    switched: bool = False
    """Whether the job before was another model's."""
    away: float = math.inf
    """Seconds since the end of its model's last job; infinite for the first."""
    turns: int = 0
    """Turns of the loop while it ran: requests came, or transfers ended."""

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
    def recent(self) -> bool:
        """Whether its model ran within `RECENT`."""
        return self.away < RECENT

    @property
    def cold(self) -> bool:
        """Whether it takes longer for what went before: a pause, a prefill, or another model."""
        return self.before is None or self.after_pause or self.settling or self.switched


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSeconds:
    """Further seconds of jobs whose code and data have left the caches."""

    wake: float = 0.0
    """After a pause, whatever came before that."""
    settling: tuple[float, ...] = (0.0,) * SETTLING
    """Added seconds of the first, second, ... decode step after a prefill."""
    switch: float = 0.0
    """After another model's job, the job's own model not having run within `RECENT`."""
    switch_back: float = 0.0
    """After another model's job, its own having run within `RECENT`."""

    def of(self, job: TimedJob) -> float:
        """Return the further seconds of `job`."""
        seconds = self.settling[job.step] if job.settling else 0.0
        if job.after_pause:
            return seconds + self.wake
        if not job.switched:
            return seconds
        return seconds + (self.switch_back if job.recent else self.switch)

    def scaled(self, factor: float) -> ColdSeconds:
        """Return `factor` times these seconds."""
        settling = tuple(factor * seconds for seconds in self.settling)
        return ColdSeconds(
            wake=factor * self.wake,
            settling=settling,
            switch=factor * self.switch,
            switch_back=factor * self.switch_back,
        )

    def plus(self, other: ColdSeconds) -> ColdSeconds:
        """Return the sums of both."""
        settling = tuple(a + b for a, b in zip(self.settling, other.settling, strict=True))
        return ColdSeconds(
            wake=self.wake + other.wake,
            settling=settling,
            switch=self.switch + other.switch,
            switch_back=self.switch_back + other.switch_back,
        )


@dataclass(frozen=True, slots=True)
class JobFit:
    """Expected seconds of jobs."""

    costs: Mapping[str, StepCosts]
    """By model, of jobs that are not cold."""
    cold: ColdSeconds
    turn: float = 0.0
    """Further seconds of a job for each turn of the loop with events while it runs."""

    def of(self, jobs: Sequence[TimedJob]) -> Vector:
        """Return the expected seconds of each job."""
        return np.array(
            [
                self.costs[job.model].of(job.load) + self.cold.of(job) + self.turn * job.turns
                for job in jobs
            ]
        )


def jobs_of(entries: Sequence[Mapping[str, Any]]) -> list[TimedJob]:
    """Return the jobs in a device's story, but for those of a leap, those that began while weights
    arrived (they waited for layers, and ran beside copies), and those during which a request came
    that the loop took later."""
    early = _begun_early(entries)
    receipts = sorted(e["arrival"] for e in entries if e.get("event") == "Arrival")
    turns = sorted({e["at"] for e in entries if e.get("event", "JobDone") != "JobDone"})
    started = {e["job"]: e["at"] for e in entries if "job" in e and "event" not in e}
    found: list[TimedJob] = []
    ended, before, of, step = float("-inf"), None, None, SETTLING
    last: dict[str, float] = {}
    """By model, when its last job ended."""
    for e in entries:
        if e.get("event") != "JobDone":
            continue
        load = JobLoad(*(e[key] for key in JobLoad._fields))
        if before is not None:
            step = 0 if before.prefill_chunks else step + 1
        job, model = e.get("job"), e["model"]
        began = e["at"] - e["seconds"]
        turn = started.get(job, began)
        beside = _between(turns, turn, e["at"])
        if job not in early and (beside or not _between(receipts, turn, e["at"])):
            delay = began - turn if job in started else None
            gap, switched = began - ended, of not in (None, model)
            away = began - last.get(model, -math.inf)
            found.append(
                TimedJob(
                    model, load, e["seconds"], gap, before, step, delay, switched, away, beside
                )
            )
        ended, before, of = e["at"], load, model
        last[model] = ended
    return found


def _between(moments: Sequence[float], begin: float, end: float) -> int:
    """How many of the ascending `moments` lie after `begin` and before `end`."""
    return max(0, bisect_left(moments, end) - bisect_right(moments, begin))


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
    queue feels means, of a distribution that leans to the right. All of this is of jobs during
    which the loop did not turn. What a turn adds is the median over decode steps during which it
    did: in longer jobs it drowns.
    """
    calm = [job for job in jobs if not job.turns]
    costs = {}
    for model in dict.fromkeys(job.model for job in jobs):
        every = [job for job in jobs if job.model == model]
        own = [job for job in every if not job.turns] or every
        terms = np.array([(*_terms(job.load), *_cold_terms(job)) for job in own])
        seconds = np.array([job.seconds for job in own])
        fitted = fit_linear(terms, seconds, np.zeros(terms.shape[1]))
        costs[model] = StepCosts(*fitted[:TERMS])
    beyond = [job.seconds - costs[job.model].of(job.load) for job in calm]
    cold = _cold_medians(calm, beyond)
    seconds = np.array([job.seconds for job in calm])
    factor = _over(seconds, JobFit(costs, cold).of(calm)) if calm else 1.0
    scaled = {model: c.scaled(factor) for model, c in costs.items()}
    fit = JobFit(scaled, cold.scaled(factor))
    turned = [job for job in jobs if job.turns and not job.load.prefill_chunks]
    slower = np.array([job.seconds for job in turned]) - fit.of(turned)
    turn = _median([float(s) / job.turns for s, job in zip(slower, turned, strict=True)])
    return replace(fit, turn=turn)


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
    costs = {
        model: replace(
            c,
            per_sequence=c.per_sequence + float(each),
            per_chunk=c.per_chunk + float(each + admission),
        )
        for model, c in fit.costs.items()
    }
    cold = fit.cold.plus(_cold_medians([*close, *woken], beyond))
    return float(fixed), replace(fit, costs=costs, cold=cold)


def _cold_medians(jobs: Sequence[TimedJob], beyond: Sequence[float]) -> ColdSeconds:
    """Return the medians of `beyond`, not below 0, over each of the first decode steps after a
    prefill, over jobs after another model's, their own having run before or not, and over jobs
    after a pause; 0 where there is none. Of two kinds of switches one stands for both where the
    other is not there."""
    pairs = list(zip(jobs, beyond, strict=True))
    steps: list[list[float]] = [[] for _ in range(SETTLING)]
    for job, seconds in pairs:
        if job.settling and not job.after_pause and not job.switched:
            steps[job.step].append(seconds)
    known = ColdSeconds(settling=tuple(_median(step) for step in steps))
    left = [(job, seconds - known.of(job)) for job, seconds in pairs]
    switches = [(job, seconds) for job, seconds in left if job.switched and not job.after_pause]
    back = [seconds for job, seconds in switches if job.recent]
    away = [seconds for job, seconds in switches if not job.recent]
    wake = [seconds for job, seconds in left if job.after_pause]
    return replace(
        known, switch=_median(away or back), switch_back=_median(back or away), wake=_median(wake)
    )


def _median(values: Sequence[float]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0


def _over(seen: Vector, expected: Vector) -> float:
    """By how much what was seen exceeds what was expected, all together; stalls are no more than
    `STALL` of what was expected."""
    return float(np.minimum(seen, STALL * expected).sum() / expected.sum())


def _handled(ended: JobLoad | None, job: TimedJob) -> tuple[float, float, float]:
    """Count the loop's work before `job`: once, sequences of the `ended` job, prompts of `job`."""
    assert ended is not None
    return 1.0, ended.decode_sequences + ended.prefill_chunks, job.load.prefill_chunks


def _terms(n: JobLoad) -> tuple[float, ...]:
    """Terms that the first `TERMS` coefficients of `StepCosts` multiply."""
    prefill = (n.prefill_pairs, n.prefill_chunks)
    return (1.0, n.prefill_tokens, n.decode_sequences, n.decode_context, *prefill)


def _cold_terms(job: TimedJob) -> tuple[float, ...]:
    """Whether it came after a pause, after another model's job without one, and as the first,
    second, ... settling step."""
    steps = (job.settling and job.step == step for step in range(SETTLING))
    switched = job.switched and not job.after_pause
    return (job.after_pause, switched and not job.recent, switched and job.recent, *steps)
