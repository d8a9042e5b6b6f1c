"""The live runner on a GPU: a lane is a host thread that launches one job at a time on a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.job import Job
from ballast.engine.runner import Executor, Keeper, LaneRunner, Record
from ballast.engine.streams_cuda import Streams
from ballast.memory.cuda_calls import Driver
from ballast.memory.cuda_cap import CachingCap
from ballast.memory.cuda_events import Events


class AllocatorOnDevice(Protocol):
    """What is capped; `ballast.memory.cuda_cap.CachingCap` in earnest."""

    @property
    def n_bytes(self) -> int: ...

    def resize(self, n_bytes: int) -> bool: ...

    def check(self) -> bool: ...


class Compute(Protocol):
    """What PyTorch does on a device."""

    @property
    def device(self) -> torch.device: ...

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Work that this thread launches meanwhile goes to that stream of the driver."""

    def allocator(self, n_bytes: int) -> AllocatorOnDevice:
        """Its allocator there, capped."""


class TorchOnGpu:
    """Implements `Compute`."""

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)

    def on(self, stream: int) -> AbstractContextManager[object]:
        there = torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(there)

    def allocator(self, n_bytes: int) -> AllocatorOnDevice:
        return CachingCap(self.device.index or 0, n_bytes)


class CudaRunner(LaneRunner):
    """Jobs end when all that they have launched has: pages that they used can change hands."""

    def __init__(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        driver: Driver,
        context: int,
        compute: Compute,
        streams: Streams,
        lanes: int = 1,
        keeper: Keeper | None = None,
        record: Record | None = None,
    ) -> None:
        """`context`: of the device, retained as long as this lives."""
        self._driver, self._context = driver, context
        self._compute, self._streams = compute, streams
        self._events = [Events(driver) for _ in range(lanes)]
        super().__init__(executors, post, clock, lanes, keeper, record)

    @contextmanager
    def running(self, job: Job) -> Iterator[None]:
        self._driver.set_current(self._context)
        stream, events = self._streams.take(job), self._events[job.lane]
        try:
            with self._compute.on(stream):
                yield
        finally:
            # Also of a job that broke off: what it had launched by then may still run.
            try:
                event = events.take()
                self._driver.record(event, stream)
                self._driver.wait(event)
                events.put_back(event)
            finally:
                self._streams.give_back(job)

    def close(self) -> None:
        super().close()
        self._driver.set_current(self._context)
        for events in self._events:
            events.close()
