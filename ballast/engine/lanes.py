"""Track the jobs in flight on a device's lanes, and divide the device's compute among them.

Part of `DeviceState`, used by the dispatcher. Bookkeeping only: runners turn parts into threads or
GPU streams.
"""

from __future__ import annotations

from ballast.core.compute import InFlight
from ballast.core.job import Job
from ballast.core.settings import DeviceSettings


class Lanes:
    """The lanes of a device, each idle or with one job in flight.

    The device's compute consists of equal parts (threads, on a CPU), which concurrent jobs divide
    among them. A job keeps its parts until it ends; a job that begins while no other model could
    run one gets all free parts. So a model that is served alone has the whole device, and another
    model waits for one job at most.
    """

    def __init__(self, settings: DeviceSettings) -> None:
        self.parts = settings.parts
        self.jobs: list[Job | None] = [None] * settings.lanes

    @property
    def busy(self) -> bool:
        """Whether any job is in flight."""
        return any(job is not None for job in self.jobs)

    @property
    def alone(self) -> Job | None:
        """The job in flight, if it is the only one."""
        running = [job for job in self.jobs if job is not None]
        return running[0] if len(running) == 1 else None

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """Jobs in flight, as compute policies see them."""
        return tuple(
            InFlight(job.model, job.prefills, self._parts(job))
            for job in self.jobs
            if job is not None
        )

    @property
    def ready(self) -> bool:
        """Whether one more job may begin."""
        return None in self.jobs and self._free > 0

    def place(self, others: int, most: int | None = None) -> tuple[int, int | None]:
        """Return the lane and the parts of the next job (parts None: the device has one lane).

        Parts are at most `most` if the compute policy gives it; else the free parts, divided by
        the number of jobs that could begin now: this one and `others`, within the idle lanes."""
        if len(self.jobs) == 1:
            return 0, None
        if most is not None:
            return self.jobs.index(None), max(1, min(most, self._free))
        takers = min(self.jobs.count(None), 1 + others)
        return self.jobs.index(None), max(1, self._free // takers)

    def begin(self, job: Job) -> None:
        self.jobs[job.lane] = job

    def end(self, job: Job) -> None:
        self.jobs[job.lane] = None

    def share(self, job: Job) -> float:
        """Return a job's fraction of the device's compute, 0 to 1."""
        return 1.0 if job.parts is None else job.parts / self.parts

    @property
    def _free(self) -> int:
        return self.parts - sum(self._parts(job) for job in self.jobs if job is not None)

    def _parts(self, job: Job) -> int:
        return job.parts or self.parts
