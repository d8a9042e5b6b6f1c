"""The live runner on CPU: a lane is a thread that runs one job at a time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from ballast.core.clock import Clock
from ballast.core.event import Event, JobDone, JobFailed, Result
from ballast.core.job import Job, SequenceWork

log = logging.getLogger(__name__)


class Executor(Protocol):
    """A model that can run the work of a job."""

    def run(self, work: Sequence[SequenceWork]) -> list[Result]: ...


Record = Callable[[Iterable[str]], object]
"""Is told the ids of the requests that are in flight from now on."""


class CpuRunner:
    """Runs jobs on a lane thread with `threads` intra-op threads; reports through `post`."""

    def __init__(
        self,
        executors: Mapping[str, Executor],
        post: Callable[[Event], None],
        clock: Clock,
        threads: int | None,
        after_job: Callable[[], object] | None = None,
        record: Record | None = None,
    ) -> None:
        """`after_job` is called on the lane between jobs, `record` before and after each."""
        self._executors = executors
        self._post = post
        self._clock = clock
        self._threads = threads
        self._after_job = after_job
        self._record = record
        self.job_since: float | None = None
        """When the job on the lane began, on the clock; None while it is idle."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lane = threading.Thread(target=self._work, name="lane0", daemon=True)
        self._lane.start()

    def start(self, job: Job) -> None:
        """Begin `job` after those started before."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the lane after the job it runs."""
        self._jobs.put(None)
        self._lane.join()

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            self.job_since = begun = self._clock.now()
            if self._record is not None:
                self._record(w.request_id for w in job.work)
            try:
                results = tuple(self._executors[job.model].run(job.work))
            except Exception as error:  # the fleet outlives a job that breaks
                log.exception("job %d of %s failed", job.id, job.model)
                self._post(JobFailed(job, f"{type(error).__name__}: {error}"))
            else:
                self._post(JobDone(job, results, self._clock.now() - begun))
            if self._record is not None:
                self._record(())
            self.job_since = None
            if self._after_job is not None:
                self._after_job()
