"""Provide CUDA streams for a GPU's lanes, each with its share of the multiprocessors if possible.

Used by the GPU runner. The share is by green contexts; without these, lanes have plain streams.

With green contexts the multiprocessors are split once, into as many groups as there are lanes; each
run of neighbouring groups has a stream whose work runs there and nowhere else. A job alone has the
stream of the whole device, those at the same time have runs that do not overlap. Else each lane has
a stream, and the hardware divides what there is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.job import Job
from ballast.memory.cuda.calls import Driver

log = logging.getLogger(__name__)


class Streams(Protocol):
    """Streams of the lanes. Used by any lane's thread."""

    @property
    def all(self) -> Sequence[int]: ...

    def acquire(self, job: Job) -> int:
        """Return the stream for a job; no other job uses it until `release`."""

    def release(self, job: Job) -> None:
        """Release a job's stream; all of the job's work must have ended."""

    def twin(self, stream: int) -> int:
        """Make a stream for recording graphs, with the multiprocessors and the priority of one of
        `all`. No job uses it and no fence waits for it. A context must be current."""

    def close(self) -> None: ...


def lane_streams(driver: Driver, device: int, lanes: int) -> Streams:
    """Make the lanes' streams: by green contexts if driver and device support them, else plain.

    A context must be current."""
    if lanes == 1:
        return PlainStreams(driver, lanes)
    try:
        return GreenStreams(driver, device, lanes)
    except DeviceError as error:
        log.warning("lanes share all multiprocessors: %s", error)
        return PlainStreams(driver, lanes)


class PlainStreams:
    """One stream for each lane, without fixed shares; the first has the highest priority."""

    def __init__(self, driver: Driver, lanes: int) -> None:
        self._driver = driver
        _, greatest = driver.priorities()
        self._priorities = [greatest if lane == 0 and lanes > 1 else 0 for lane in range(lanes)]
        self.all = [driver.new_stream(priority) for priority in self._priorities]
        self._twins: list[int] = []

    def acquire(self, job: Job) -> int:
        return self.all[job.lane]

    def release(self, job: Job) -> None:
        """Do nothing: the lane's next job uses the same stream."""

    def twin(self, stream: int) -> int:
        made = self._driver.new_stream(self._priorities[self.all.index(stream)])
        self._twins.append(made)
        return made

    def close(self) -> None:
        for stream in (*self.all, *self._twins):
            self._driver.destroy_stream(stream)
        self.all, self._twins = [], []


class GreenStreams:
    """Streams on runs of neighbouring groups of multiprocessors, by (first group, groups);
    `Job.parts` counts groups."""

    def __init__(self, driver: Driver, device: int, lanes: int) -> None:
        """Raises DeviceError, and leaves nothing behind, if green contexts cannot be made, or
        events of the primary context cannot be recorded on their streams, as each job requires."""
        self._driver, self._groups = driver, lanes
        self._contexts: dict[tuple[int, int], int] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._twins: list[int] = []
        self._taken: dict[int, range] = {}
        """Groups used by the job on each lane."""
        self._lock = threading.Lock()
        try:
            split = driver.split(device, lanes)
            for n in range(1, lanes):
                for first in range(lanes - n + 1):
                    context = driver.green_context(device, split, first, n)
                    self._contexts[first, n] = context
                    self._streams[first, n] = driver.green_stream(context)
            self._streams[0, lanes] = driver.new_stream()
            for stream in self._streams.values():
                _try(driver, stream)
        except DeviceError:
            self.close()
            raise

    @property
    def all(self) -> list[int]:
        return list(self._streams.values())

    def acquire(self, job: Job) -> int:
        """Return a stream on as many groups as the job has parts, or on fewer if the free ones are
        not neighbours."""
        wanted = job.parts or self._groups
        with self._lock:
            used = {group for run in self._taken.values() for group in run}
            free = [
                (first, n)
                for first, n in self._streams
                if n <= wanted and used.isdisjoint(range(first, first + n))
            ]
            if not free:
                raise BrokenPromise(f"job {job.id}: no multiprocessors are free")
            # The widest; of equals, the one that leaves the others together.
            first, n = max(free, key=lambda run: (run[1], -run[0]))
            self._taken[job.lane] = range(first, first + n)
            return self._streams[first, n]

    def release(self, job: Job) -> None:
        with self._lock:
            del self._taken[job.lane]

    def twin(self, stream: int) -> int:
        run = next(run for run, made in self._streams.items() if made == stream)
        context = self._contexts.get(run)
        driver = self._driver
        twin = driver.new_stream() if context is None else driver.green_stream(context)
        self._twins.append(twin)
        return twin

    def close(self) -> None:
        for stream in (*self._streams.values(), *self._twins):
            self._driver.destroy_stream(stream)
        for context in self._contexts.values():
            self._driver.destroy_green(context)
        self._streams, self._contexts, self._twins = {}, {}, []


def _try(driver: Driver, stream: int) -> None:
    """Record an event on an idle stream and wait for it. Raises DeviceError where either fails."""
    event = driver.new_event()
    try:
        driver.record(event, stream)
        driver.wait(event)
    finally:
        driver.destroy_event(event)
