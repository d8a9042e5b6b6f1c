"""Which jobs run at the same time on one device, and what part of its compute each of them has."""

from __future__ import annotations

from ballast.core.compute import InFlight
from ballast.core.job import Job
from ballast.core.settings import DeviceSettings


class Lanes:
    """The lanes of a device, each idle or with one job in flight.

    The device's compute consists of equal parts (threads, on a CPU), which jobs that run at the
    same time divide among them. A job keeps its parts until it ends; one that begins while nothing
    else could gets all that are free. So a model that is served alone loses nothing, and whoever
    comes to it waits for one job at most.
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
        """The lane of the job to begin next, and its parts (None: the device has one lane): `most`
        at most, if the compute policy says so; else those free, divided with so many `others` as
        could begin as well."""
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
        """Of the device's compute, that of a job."""
        return 1.0 if job.parts is None else job.parts / self.parts

    @property
    def _free(self) -> int:
        return self.parts - sum(self._parts(job) for job in self.jobs if job is not None)

    def _parts(self, job: Job) -> int:
        return job.parts or self.parts
