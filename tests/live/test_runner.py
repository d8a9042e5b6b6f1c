"""Lanes' threads: a job may raise anything; a lane that is lost ends the device's loop at once."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.clock import VirtualClock
from ballast.core.errors import DeviceError
from ballast.core.event import Event, JobDoneEvent, JobFailedEvent, JobResult
from ballast.core.job import Job, SequenceWork
from ballast.live.runner import CpuRunner
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.live.test_live_device import asked, fleet, paths  # noqa: F401

DEADLINE = 240.0
"""Seconds after which a wait counts as failed; no test waits so long to pass."""


class Panic(BaseException):
    """As extension modules raise where they cannot go on."""


class Model:
    """An executor that raises what it is asked to, by the id of its job's first request."""

    def __init__(self, **raises: BaseException) -> None:
        self._raises = raises

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        error = self._raises.get(work[0].request_id)
        if error is not None:
            raise error
        return []

    def stalled(self) -> float:
        return 0.0

    def carried(self) -> tuple[float, float]:
        return 0.0, 0.0


def job(id: int, request: str) -> Job:
    return Job(id, 0, "m", (SequenceWork(request, (1,), 0, [0], None),))


@pytest.mark.parametrize(
    "error", [RuntimeError("fire"), SystemExit(3), KeyboardInterrupt(), MemoryError(), Panic()]
)
def test_whatever_a_job_raises_its_lane_goes_on(error: BaseException) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    runner = CpuRunner({"m": [Model(bad=error)]}, events.put, VirtualClock(), 1)
    bad, good = job(1, "bad"), job(2, "good")
    runner.start(bad)
    runner.start(good)
    first, second = events.get(timeout=DEADLINE), events.get(timeout=DEADLINE)
    runner.close()
    assert isinstance(first, JobFailedEvent)
    assert first.job is bad
    assert type(error).__name__ in first.reason
    assert isinstance(second, JobDoneEvent)
    assert second.job is good


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError()])
def test_a_lane_that_is_lost_says_so(error: BaseException) -> None:
    """What fails here is no job: the books of the lane itself cannot be kept."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def record(ids: Iterable[str]) -> None:
        if not list(ids):  # after the job
            raise error

    lost: queue.SimpleQueue[DeviceError] = queue.SimpleQueue()
    runner = CpuRunner({"m": [Model()]}, events.put, VirtualClock(), 1, record=record)
    runner.when_lost(lost.put)
    runner.start(job(1, "good"))
    assert isinstance(events.get(timeout=DEADLINE), JobDoneEvent)
    assert str(lost.get(timeout=DEADLINE)) == "lane0: its thread has ended"
    runner.close()


def test_a_lost_lane_ends_the_loop_and_its_story_replays(
    paths: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = replace(fleet(paths), story_path=str(tmp_path / "story"))
    server = InProcess(settings)
    jobs = 0

    def record(ids: Iterable[str]) -> None:
        nonlocal jobs
        jobs += bool(list(ids))
        if jobs == 5:
            sys.exit(3)

    server.device.runner._record = record
    with pytest.raises(DeviceError, match="lane0: its thread has ended"), server:
        server.generate(asked(2))
    (life,) = read_device_stories(tmp_path / "story")
    assert not life.over
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
    assert found.jobs >= 5
