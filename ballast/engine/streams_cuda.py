"""Streams for the lanes of a GPU, each with its part of the multiprocessors where that can be."""

from __future__ import annotations

import logging

from ballast.core.job import Job
from ballast.memory.cuda_calls import Driver

log = logging.getLogger(__name__)


class PlainStreams:
    """A stream for each lane; the first goes before the others where both have work."""

    def __init__(self, driver: Driver, lanes: int) -> None:
        """A context is current."""
        self._driver = driver
        _, greatest = driver.priorities()
        self.all = [
            driver.new_stream(greatest if lane == 0 and lanes > 1 else 0) for lane in range(lanes)
        ]

    def take(self, job: Job) -> int:
        return self.all[job.lane]

    def give_back(self, job: Job) -> None:
        """Its lane's next job takes it again."""

    def close(self) -> None:
        for stream in self.all:
            self._driver.destroy_stream(stream)
        self.all = []
