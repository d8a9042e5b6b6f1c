"""Run jobs on lanes of a live device: each lane is a thread that runs one job at a time.

Implements the engine's `Runner` (`CpuRunner`; `CudaRunner` extends the same base), and defines
`Executor`, which runs one model's jobs. Ends of jobs are posted to the loop's inbox as events.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError, DeviceLost
from ballast.core.event import Event, JobDoneEvent, JobFailedEvent, JobResult
from ballast.core.job import Job, SequenceWork
from ballast.kernels.team import bind

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the work of one model's jobs."""

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]: ...

    def stalled(self) -> float:
        """Return the seconds that jobs have waited for layers since the last call."""

    def carried(self) -> tuple[float, float]:
        """Return the seconds for which links carried what jobs read elsewhere, and what they wrote
        there, since the last call."""


class Keeper(Protocol):
    """Checks memory that jobs have allocated, after each job; `ballast.memory.arena.AllocatorCap`
    implements it."""

    @property
    def renewing(self) -> bool:
        """Whether it needs a moment in which no job runs."""

    def check(self, *, alone: bool) -> object:
        """Check memory after a job, or while `renewing`. `alone`: no job runs meanwhile."""


@dataclass(frozen=True, slots=True)
class ModelActivating:
    """Entry in a lane's queue: the weights of a model are in transfer."""

    model: str


Record = Callable[[Iterable[str]], object]
"""Called with the ids of all requests in flight, whenever these change."""


class LaneRunner(ABC):
    """Runs jobs, each on its lane's thread; `running` gives a job its part of the device.

    Reports through `post`, from lanes' threads. A job that raises, whatever it raises, fails alone;
    `when_lost` is for a lane's thread that ends for any other reason.
    """

    def __init__(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        lanes: int = 1,
        keeper: Keeper | None = None,
        record: Record | None = None,
    ) -> None:
        """`executors`: of each model, what runs it on each lane. `record` is called before and
        after each job."""
        self._executors = executors
        self._post = post
        self._clock = clock
        self._keeper = keeper
        self._record = record
        self._lost: Callable[[DeviceError], object] = _ignore
        self._change = threading.Condition()
        """Held while it changes which jobs run, and while `keeper` and `record` are called."""
        self._running: dict[int, tuple[Job, float]] = {}
        """(job, start time) by lane. The dict is replaced, never changed."""
        self._jobs: list[queue.SimpleQueue[Job | ModelActivating | None]] = []
        self._lanes: list[threading.Thread] = []
        for lane in range(lanes):
            self._jobs.append(queue.SimpleQueue())
            self._lanes.append(
                threading.Thread(target=self._live, args=(lane,), name=f"lane{lane}", daemon=True)
            )
            self._lanes[-1].start()

    @property
    def job_since(self) -> float | None:
        """Start time of the oldest running job; None while all lanes are idle."""
        return min((since for _, since in self._running.values()), default=None)

    def when_lost(self, call: Callable[[DeviceError], object]) -> None:
        """Set a callback for a lane's thread that ends unexpectedly: its jobs would never end."""
        self._lost = call

    def start(self, job: Job) -> None:
        """Begin `job` after those started before on its lane."""
        self._jobs[job.lane].put(job)

    def close(self) -> None:
        """End the lanes after the jobs they run."""
        for jobs in self._jobs:
            jobs.put(None)
        for lane in self._lanes:
            lane.join()

    @abstractmethod
    def running(self, job: Job) -> AbstractContextManager[object]:
        """Context entered on the job's lane around its work; on exit all of the work has ended."""

    def _live(self, lane: int) -> None:
        lost = DeviceError(f"lane{lane}", "its thread has ended")  # there may be no memory later
        try:
            self._work(lane)
        except BaseException:
            self._lost(lost)
            log.critical("the thread of lane %d has ended", lane, exc_info=True)

    def _work(self, lane: int) -> None:
        while (job := self._next(lane)) is not None:
            begun = self._begin(job)
            try:
                with self.running(job):
                    executor = self._executors[job.model][lane]
                    executor.stalled(), executor.carried()  # of a job that failed
                    results = tuple(executor.run(job.work))
                seconds, stall = self._clock.now() - begun, executor.stalled()
            except DeviceLost:
                # The loop ends, and its process. The job stays on record as in flight: it may be
                # what broke the device.
                log.critical("job %d of %s lost the device", job.id, job.model, exc_info=True)
                return
            except BaseException as error:
                # Also what is no Exception: `sys.exit` in a library, a panic in Rust.
                log.exception("job %d of %s failed", job.id, job.model)
                self._post(JobFailedEvent(job, f"{type(error).__name__}: {error}"))
            else:
                self._post(JobDoneEvent(job, results, seconds, stall, executor.carried()))
            self._end(job)

    def _next(self, lane: int) -> Job | None:
        """Wait for the lane's next job and return it; None: the lane ends."""
        while isinstance(job := self._jobs[lane].get(), ModelActivating):
            pass
        return job

    def activating(self, model: str) -> None:  # noqa: B027
        """Note that a model's weights are in transfer. From any thread."""

    def _begin(self, job: Job) -> float:
        """Wait until the job may run, note it as running, and return its start time."""
        with self._change:
            while self._pausing():
                if self._running:
                    self._change.wait()
                else:
                    self._pause()
            begun = self._clock.now()
            self._running = {**self._running, job.lane: (job, begun)}
            self._recorded()
        return begun

    def _pausing(self) -> bool:
        """Whether work waits for a moment in which no job runs."""
        return self._keeper is not None and self._keeper.renewing

    def _pause(self) -> None:
        """Do the work that has waited for a moment in which no job runs."""
        if self._keeper is not None:
            self._keeper.check(alone=True)

    def _end(self, job: Job) -> None:
        with self._change:
            self._running = {i: at for i, at in self._running.items() if i != job.lane}
            self._recorded()
            if self._keeper is not None:
                self._keeper.check(alone=not self._running)
            self._change.notify_all()

    def _recorded(self) -> None:
        if self._record is not None:
            jobs = (job for job, _ in self._running.values())
            self._record(w.request_id for job in jobs for w in job.work)


def _ignore(error: DeviceError) -> None:
    """The log has it."""


PAUSE = 1e-3
"""Seconds without a job after which a lane's threads are bound to CPUs anew."""


def _bound_by_operator() -> bool:
    """Return whether the environment configures the binding of OpenMP's threads to CPUs."""
    return any(name in os.environ for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"))


class CpuRunner(LaneRunner):
    """Runs jobs on CPU threads; each job has its part of the intra-op threads."""

    def __init__(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        threads: int | None,
        lanes: int = 1,
        keeper: Keeper | None = None,
        record: Record | None = None,
    ) -> None:
        """`threads`: intra-op threads of a job with the whole device; None: PyTorch's choice."""
        self._threads = threads
        self._set: dict[int, int] = {}
        """Intra-op threads set in PyTorch, by lane."""
        self._binds = lanes == 1 and hasattr(os, "sched_getaffinity") and not _bound_by_operator()
        self._ended = float("-inf")
        """Time at which the last job ended."""
        super().__init__(executors, post, clock, lanes, keeper, record)

    @contextmanager
    def running(self, job: Job) -> Iterator[None]:
        wanted = job.parts or self._threads
        if wanted is not None and wanted != self._set.get(job.lane):
            torch.set_num_threads(wanted)
            self._set[job.lane] = wanted
        if self._binds and self._clock.now() > self._ended + PAUSE:
            self._bind()
        yield
        self._ended = self._clock.now()

    def _bind(self) -> None:
        """A CPU for each thread, where there is one: that of a single lane with as many threads as
        this process has CPUs. Again after each pause, as these may change."""
        cpus = sorted(os.sched_getaffinity(os.getpid()))  # of the main thread, which is not bound
        if len(cpus) == torch.get_num_threads():
            bind(cpus)
