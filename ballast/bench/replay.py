"""Replay a workload open-loop: send each request at its time, however late earlier answers are.

`replay` drives any `BenchmarkTarget`: an engine in this process (`EngineTarget`), a server over
HTTP (`bench.http`), or controllers and workers (`bench.servers`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ballast.bench.progress import Progress, quiet
from ballast.bench.record import Prompts, RequestRecord, RequestRecorder, submission_for
from ballast.bench.sample import DecisionRecord, DeviceSample, MemorySample, decisions_of
from ballast.core.clock import Clock
from ballast.core.entries import StoryEntry
from ballast.core.errors import BallastError, BrokenPromise
from ballast.core.event import ArrivalEvent, CancelEvent, Event, Output, TokenOutput
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.sim.frozen_heap import frozen_heap
from ballast.workload.workload import Workload, WorkloadRequest

Sleep = Callable[[float], Awaitable[None]]

PATIENCE = 600.0
"""Seconds for which a request is waited for, whatever serves it: long answers on a machine that is
busy take minutes, and are answers."""
TIMER_LATENESS = 1.5e-3
"""Seconds by which timers of asyncio are late at most, as a rule: they count in milliseconds."""


async def punctual_sleep(seconds: float) -> None:
    """Sleep, and return within some tens of microseconds after `seconds`.

    `asyncio.sleep` alone returns a millisecond late, which TTFT would show: it counts from the
    moment at which a request should go out. The last `TIMER_LATENESS` are spent giving way to other
    tasks, again and again.
    """
    end = time.perf_counter() + seconds
    if seconds > TIMER_LATENESS:
        await asyncio.sleep(seconds - TIMER_LATENESS)
    while time.perf_counter() < end:
        await asyncio.sleep(0)


class TargetError(BallastError):
    """The target did not answer a request completely; the message states its response instead."""


class BenchmarkTarget(Protocol):
    """Interface of a system under test that serves requests."""

    @property
    def clock(self) -> Clock:
        """Clock of the times in the records."""

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        """Send a request, record its tokens and its end; raise TargetError where it fails.

        Must abort the request when cancelled.
        """

    async def memory(self) -> Mapping[str, DeviceSample]:
        """Return a sample of each device now; empty where memory is not visible."""

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        """Return decisions since `origin` on the target's clock, with times counted from there;
        empty where they are not visible."""


@dataclass(frozen=True, slots=True)
class WorkloadReplay:
    """Result of a replay."""

    records: tuple[RequestRecord, ...]
    wall_seconds: float
    """From the start of the workload to the last answer."""
    memory: tuple[MemorySample, ...]
    decisions: tuple[DecisionRecord, ...] = ()


async def replay(
    workload: Workload,
    target: BenchmarkTarget,
    prompts: Prompts,
    *,
    timeout: float = PATIENCE,
    memory_every: float = 0.5,
    progress: Progress = quiet,
    name: str | None = None,
    sleep: Sleep = punctual_sleep,
) -> WorkloadReplay:
    """Send every request at its time and wait for the answers, each at most `timeout` seconds.

    Prompts are made while waiting for their moment. A request that fails is recorded as failed,
    never raised. `memory_every` is the time between memory samples, in seconds. `progress` gets
    how many requests have ended, under `name`; None: the workload's.
    """
    with frozen_heap():
        clock = target.clock
        recorder = RequestRecorder(clock.now())
        sender = _Sender(target, recorder, timeout, progress, name or workload.name, workload)
        samples: list[MemorySample] = []
        sender.show()
        watcher = asyncio.create_task(_watch(target, recorder.origin, samples, memory_every))
        try:
            async with asyncio.TaskGroup() as group:
                for request in workload.requests:
                    submission = submission_for(request, prompts(request))
                    wait = recorder.origin + request.at - clock.now()
                    await sleep(max(0.0, wait))
                    group.create_task(sender.send(request, submission))
            wall_seconds = clock.now() - recorder.origin
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    decisions = await target.decisions(recorder.origin)
    return WorkloadReplay(recorder.records(), wall_seconds, tuple(samples), tuple(decisions))


class _Sender:
    """Sends requests to a target, records how they end, and shows how many have."""

    def __init__(
        self,
        target: BenchmarkTarget,
        recorder: RequestRecorder,
        timeout: float,
        progress: Progress,
        name: str,
        workload: Workload,
    ) -> None:
        """`timeout`: seconds for each request; `name`: of the workload, for `progress`."""
        self._target = target
        self._recorder = recorder
        self._timeout = timeout
        self._progress = progress
        self._name = name
        self._requests = len(workload.requests)
        self._ended = self._failed = 0

    async def send(self, request: WorkloadRequest, submission: Submission) -> None:
        """Send a request and wait for its end. Raises BrokenPromise alone."""
        recorder, clock = self._recorder, self._target.clock
        recorder.sent(request, submission.id, clock.now())
        reason = None
        try:
            async with asyncio.timeout(self._timeout):
                await self._target.run(submission, recorder)
        except TimeoutError:
            reason = f"no complete answer within {self._timeout:g} s"
        except BrokenPromise:
            raise
        except BallastError as error:
            reason = str(error)
        if reason is not None:
            recorder.failed(submission.id, clock.now(), reason)
        self._ended += 1
        self._failed += not recorder.answered(submission.id)
        self.show()

    def show(self) -> None:
        """Show how many requests have ended, and how many of them have failed."""
        note = f"{self._failed} failed" if self._failed else ""
        self._progress(self._name, self._ended, self._requests, note)


async def _watch(
    target: BenchmarkTarget, origin: float, samples: list[MemorySample], every: float
) -> None:
    while True:
        devices = await target.memory()
        if devices:
            samples.append(MemorySample(target.clock.now() - origin, dict(devices)))
        await asyncio.sleep(every)


class EngineTarget:
    """An engine in this process. Whatever it says must reach `outbox`, on any thread.

    ::

        target = EngineTarget(clock)
        device = LiveDevice(fleet, target.outbox, clock=clock)
        target.connect(device.post, device.snapshot)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._post: Callable[[Event], None] | None = None
        self._snapshot: Callable[[], DeviceReport] | None = None
        self._story: Sequence[StoryEntry] = ()
        self._open: dict[str, tuple[RequestRecorder, asyncio.AbstractEventLoop, asyncio.Event]] = {}

    @property
    def clock(self) -> Clock:
        return self._clock

    def connect(
        self,
        post: Callable[[Event], None],
        snapshot: Callable[[], DeviceReport] | None = None,
        story: Sequence[StoryEntry] = (),
    ) -> None:
        """Where events go, where memory can be read, and the growing list of a story's entries,
        with times of this target's clock."""
        self._post, self._snapshot, self._story = post, snapshot, story

    def outbox(self, outputs: list[Output]) -> None:
        """Record outputs; wakes a sender only for final ones, so that tokens stay cheap."""
        now = self._clock.now()
        for output in outputs:
            found = self._open.get(output.request_id)
            if found is None:
                continue
            recorder, loop, done = found
            recorder.record(now, output)
            if not isinstance(output, TokenOutput):
                # The sender may have given up meanwhile, and its event loop have gone with it.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(done.set)

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        """Post a request to the engine and wait for its final output."""
        if self._post is None:
            raise BrokenPromise("a replay on an engine that is not connected")
        done = asyncio.Event()
        self._open[submission.id] = (recorder, asyncio.get_running_loop(), done)
        try:
            self._post(ArrivalEvent(submission))
            await done.wait()
        except asyncio.CancelledError:
            self._post(CancelEvent(submission.id))
            raise
        finally:
            del self._open[submission.id]

    async def memory(self) -> Mapping[str, DeviceSample]:
        """From the device's snapshot."""
        if self._snapshot is None:
            return {}
        report = self._snapshot()
        return {report.device: DeviceSample.of(report)}

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        """From the device's story."""
        device = "" if self._snapshot is None else self._snapshot().device
        return [d for d in decisions_of(self._story, device, origin) if d.at >= 0]
