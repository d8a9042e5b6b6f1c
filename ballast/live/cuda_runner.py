"""Run jobs on a GPU's lanes: each lane is a host thread that launches one job at a time.

The GPU's implementation of the engine's `Runner`; it also records CUDA graphs of decode steps while
no job runs. A job ends only when all of its GPU work has: its pages may then be reused.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.job import Job
from ballast.kernels.gpu.attention import attention_kernels
from ballast.kernels.gpu.batch import GpuAttention, GpuBatch
from ballast.live.cuda_streams import Streams
from ballast.live.runner import Executor, Keeper, LaneRunner, ModelActivating, Record
from ballast.memory.cuda.allocator_cap import CudaAllocatorCap
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.fences import EventPool
from ballast.memory.cuda.graphs import TorchRecorder
from ballast.models.gpu.graphs import GraphCache
from ballast.models.gpu.recording import GraphRecorder

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.05
"""Seconds that a lane has no job before it tries to record a graph: longer than a lane waits
between two steps of the same requests."""
RUNS = 8
"""Runs of one bucket without a graph after which jobs wait for its recording."""
MOST_PAUSES = 0.05
"""Largest fraction of time that jobs wait for recordings."""


class AllocatorOnDevice(Protocol):
    """PyTorch's capped allocator on a GPU; implemented by `CudaAllocatorCap`
    (`ballast.memory.cuda.allocator_cap`)."""

    @property
    def n_bytes(self) -> int: ...

    def resize(self, n_bytes: int) -> bool: ...

    def check(self) -> bool: ...

    def close(self) -> None: ...


class GpuCompute(Protocol):
    """PyTorch on a device: attention, streams, allocator, graphs. Tests use a stand-in."""

    @property
    def device(self) -> torch.device: ...

    @property
    def attention(self) -> Callable[[GpuBatch], GpuAttention]:
        """Factory of the attention of a batch."""

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Context in which work that this thread launches goes to a stream of the driver."""

    def current(self) -> int:
        """Return the driver's stream to which this thread's work goes now."""

    def allocator(self, n_bytes: int) -> AllocatorOnDevice:
        """Return PyTorch's allocator on the device, capped at `n_bytes`."""

    def release_pinned(self) -> None:
        """Give back pinned memory that PyTorch keeps unused, and its events on the streams that
        copied from it: before these streams are destroyed."""

    def recorder(self, stream: int) -> GraphRecorder:
        """Return a recorder of graphs on `stream`, which nothing else may use."""


class TorchOnGpu:
    """Implements `GpuCompute`."""

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)
        self.attention = attention_kernels(self.device)
        self._external: dict[int, torch.cuda.Stream] = {}

    def on(self, stream: int) -> AbstractContextManager[object]:
        there = self._external.get(stream)
        if there is None:
            there = torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]
            self._external[stream] = there
        return torch.cuda.stream(there)

    def current(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def allocator(self, n_bytes: int) -> AllocatorOnDevice:
        return CudaAllocatorCap(self.device.index or 0, n_bytes)

    def release_pinned(self) -> None:
        torch.cuda.synchronize(self.device)
        # Public from some version after 2.11 on.
        public = getattr(torch.accelerator, "empty_host_cache", None)
        (public or torch._C._host_emptyCache)()

    def recorder(self, stream: int) -> GraphRecorder:
        return TorchRecorder(self.device.index or 0, stream)


class CudaRunner(LaneRunner):
    """Runs jobs on streams. A job ends when all work that it launched has: then other owners may
    use its pages."""

    def __init__(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        driver: Driver,
        context: int,
        compute: GpuCompute,
        streams: Streams,
        lanes: int = 1,
        keeper: Keeper | None = None,
        record: Record | None = None,
        graphs: GraphCache | None = None,
        quiet_seconds: float = QUIET_SECONDS,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        """`context`: the device's CUDA context, which must outlive this object; `rest` is called
        at the end, to finish work that jobs have begun beside themselves."""
        self._rest = rest
        self._next_pause = 0.0
        """Time on the clock before which jobs do not wait for a recording."""
        self._graphs, self._quiet_seconds = graphs, quiet_seconds
        self._driver, self._context = driver, context
        self._compute, self._streams = compute, streams
        self._events = [EventPool(driver) for _ in range(lanes)]
        super().__init__(executors, post, clock, lanes, keeper, record)

    @contextmanager
    def running(self, job: Job) -> Iterator[None]:
        self._driver.set_current(self._context)
        stream, events = self._streams.acquire(job), self._events[job.lane]
        try:
            with self._compute.on(stream), self._graphs_on(stream):
                yield
        finally:
            # Also of a job that broke off: what it had launched by then may still run.
            try:
                event = events.acquire()
                self._driver.record(event, stream)
                self._driver.wait(event)
                events.release(event)
            finally:
                self._streams.release(job)

    def _graphs_on(self, stream: int) -> AbstractContextManager[None]:
        return nullcontext() if self._graphs is None else self._graphs.on(stream)

    def activating(self, model: str) -> None:
        """Have graphs that the model has lost recorded during its activation, if no job runs."""
        if self._graphs is not None:
            # Not here, in the loop's thread: while something is recorded, the cache is locked.
            self._jobs[0].put(ModelActivating(model))

    def _next(self, lane: int) -> Job | None:
        graphs = self._graphs
        while graphs is not None:
            try:
                seconds = self._quiet_seconds if graphs.wanted else None
                job = self._jobs[lane].get(timeout=seconds)
            except queue.Empty:
                self.record_one(graphs)
                continue
            if not isinstance(job, ModelActivating):
                return job
            graphs.activating(job.model)
            if graphs.due(RUNS):
                self.record_one(graphs)
        return super()._next(lane)

    def _pausing(self) -> bool:
        return super()._pausing() or self._due()

    def _due(self) -> bool:
        """Whether jobs must wait for a recording: under constant load none would happen otherwise.

        They wait for running jobs to end, and for one recording."""
        graphs = self._graphs
        return graphs is not None and graphs.due(RUNS) and self._clock.now() >= self._next_pause

    def _pause(self) -> None:
        super()._pause()
        if self._graphs is not None and self._due():
            began = self._clock.now()
            self._make_one(self._graphs)
            now = self._clock.now()
            self._next_pause = now + (now - began) / MOST_PAUSES

    def record_one(self, graphs: GraphCache) -> bool:
        """Record one wanted graph, unless a job runs or is queued; return whether it was tried.

        Jobs on all lanes wait meanwhile: during a recording PyTorch's allocator frees no cached
        memory, and a job that reaches the cap would fail."""
        with self._change:
            if self._running or not all(jobs.empty() for jobs in self._jobs):
                return False
            self._make_one(graphs)
            return True

    def _make_one(self, graphs: GraphCache) -> None:
        self._driver.set_current(self._context)
        try:
            graphs.record_one()
        except Exception:  # jobs run without it
            log.exception("a CUDA graph could not be recorded")

    def close(self) -> None:
        super().close()
        self._driver.set_current(self._context)
        self._rest()
        for events in self._events:
            events.close()
