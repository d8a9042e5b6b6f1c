"""Fit job costs, job spread and loop overhead of a machine from a story recorded on it.

Used by `sim.calibrate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.sim.fitting import Vector, fit_linear
from ballast.sim.job_spread import JobSpread, quantiles_of

IDLE = 1.5e-3
"""Seconds between two jobs beyond which there was nothing to do: the loop needs a third of it."""

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

    @property
    def after_pause(self) -> bool:
        return self.gap > IDLE

    @property
    def cold(self) -> bool:
        """Threads and caches are not those of a decode step that follows another: it began after a
        pause, or decodes after a prefill."""
        if self.before is None or self.after_pause:
            return True
        return self.before.prefill_chunks > 0 and not self.load.prefill_chunks


def jobs_of(entries: Sequence[Mapping[str, Any]]) -> list[TimedJob]:
    """Return the jobs in a device's story, except those of a leap, and those that began while
    weights arrived: they waited for layers, and ran beside copies."""
    early = _begun_early(entries)
    done = [e for e in entries if e.get("event") == "JobDone"]
    found: list[TimedJob] = []
    ended, before = float("-inf"), None
    for e in done:
        load = JobLoad(*(e[key] for key in JobLoad._fields))
        if e.get("job") not in early:
            gap = e["at"] - e["seconds"] - ended
            found.append(TimedJob(e["model"], load, e["seconds"], gap, before))
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


def costs_of(jobs: Sequence[TimedJob]) -> tuple[float, dict[str, StepCosts]]:
    """Seconds that a cold job takes longer, the same for all; and by model the costs of its jobs.

    Non-negative coefficients with the least soft-L1 of the relative error over jobs that are not
    cold (all, of a model whose prompts only cold ones computed), and the median of what the cold
    take beyond that. Then everything is scaled so that all together take what they took: a queue
    feels means, of a distribution that leans to the right.
    """
    costs = {}
    for model in dict.fromkeys(job.model for job in jobs):
        own = [job for job in jobs if job.model == model]
        warm = [job for job in own if not job.cold]
        if _kinds(warm) == _kinds(own):
            own = warm
        terms = np.array([_terms(job.load) for job in own])
        seconds = np.array([job.seconds for job in own])
        costs[model] = StepCosts(*fit_linear(terms, seconds, np.zeros(terms.shape[1])))
    beyond = [job.seconds - costs[job.model].of(job.load) for job in jobs if job.cold]
    wake = max(0.0, float(np.median(beyond))) if beyond else 0.0
    expected = _expected(jobs, wake, costs)
    factor = _over(np.array([job.seconds for job in jobs]), expected)
    return factor * wake, {model: c.scaled(factor) for model, c in costs.items()}


def spread_of(jobs: Sequence[TimedJob], wake: float, costs: Mapping[str, StepCosts]) -> JobSpread:
    """Return the spread of job durations around the expectations of `costs_of`: jobs are weighted
    by their expected seconds, and stalls count as `STALL` times the expectation."""
    expected = _expected(jobs, wake, costs)
    ratios = np.minimum(np.array([job.seconds for job in jobs]) / expected, STALL)
    return JobSpread(quantiles=quantiles_of(ratios.tolist(), expected.tolist()))


def with_loop(
    jobs: Sequence[TimedJob], costs: Mapping[str, StepCosts]
) -> tuple[float, dict[str, StepCosts]]:
    """The loop's own seconds at every job, and the costs with what it does for each sequence.

    From the gaps between back-to-back jobs: a constant, a part for each sequence of the job that
    ended, whose tokens are handed out, and one for each prefill chunk of the next, which is
    admitted.
    """
    close = [j for j in jobs if j.before is not None and not j.after_pause and j.gap > 0]
    if not close:
        return 0.0, dict(costs)
    terms = np.array([_handled(job) for job in close])
    gaps = np.array([job.gap for job in close])
    coefficients = np.array(fit_linear(terms, gaps, np.zeros(3)))
    fixed, each, admission = _over(gaps, terms @ coefficients) * coefficients
    return float(fixed), {
        model: replace(
            c,
            per_sequence=c.per_sequence + float(each),
            per_chunk=c.per_chunk + float(each + admission),
        )
        for model, c in costs.items()
    }


def _expected(jobs: Sequence[TimedJob], wake: float, costs: Mapping[str, StepCosts]) -> Vector:
    return np.array([costs[j.model].of(j.load) + (wake if j.cold else 0.0) for j in jobs])


def _over(seen: Vector, expected: Vector) -> float:
    """By how much what was seen exceeds what was expected, all together; stalls are no more than
    `STALL` of what was expected."""
    return float(np.minimum(seen, STALL * expected).sum() / expected.sum())


def _handled(job: TimedJob) -> tuple[float, float, float]:
    assert job.before is not None
    ended = job.before.decode_sequences + job.before.prefill_chunks
    return 1.0, ended, job.load.prefill_chunks


def _kinds(jobs: Sequence[TimedJob]) -> tuple[bool, bool]:
    """Whether there are prefills among them, and whether decodes."""
    return (
        any(job.load.prefill_chunks for job in jobs),
        any(job.load.decode_sequences for job in jobs),
    )


def _terms(n: JobLoad) -> tuple[float, ...]:
    """Terms that the first six coefficients of `StepCosts` multiply."""
    prefill = (n.prefill_pairs, n.prefill_chunks)
    return (1.0, n.prefill_tokens, n.decode_sequences, n.decode_context, *prefill)
