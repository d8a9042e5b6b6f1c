"""Measure what this machine's engine costs behind a server: `ballast profile --http`, and
benchmarks whose servers are reached without HTTP (`BurstClient`, `behind_server`).

The server and its clients use processors that jobs use too, so that jobs take longer than in one
process, and every answer passes through them. The load is that of `sim.calibrate`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ballast.bench.http import HttpTarget
from ballast.bench.progress import Progress, quiet
from ballast.bench.record import RequestRecorder
from ballast.bench.replay import BenchmarkTarget, TargetError
from ballast.bench.server_process import serving
from ballast.bench.story_report import sampling_requests
from ballast.core.clock import Clock
from ballast.core.entries import StoryEntry
from ballast.core.errors import ConfigError, DeviceError
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.live.inbox import MonotonicClock
from ballast.sim.calibrate import PRESET, Burst, bursts, with_engine
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.story_reader import read_device_stories
from ballast.workload.workload import WorkloadRequest


def calibrate_over_http(
    file: Path,
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    measured: MachineProfile,
    rounds: int = 4,
    seed: int = 0,
    progress: Progress = quiet,
) -> MachineProfile:
    """Return `measured` with the costs of the engine behind a server that serves `file`.

    Starts `ballast serve`, sends it the bursts of `sim.calibrate` over HTTP, and fits job costs to
    the server's story. `answer` is the median, over requests that were alone, of how much earlier
    the engine had the first token than the client: seconds on the way in and on the way out.
    `fleet`, `specs`: what the file says, and its models' sizes. Raises ConfigError for several
    devices or lanes, DeviceError where requests fail.
    """
    if fleet.of_one_device("a profile").lanes > 1:
        raise ConfigError("lanes", fleet.device.lanes, "one lane: jobs are timed one by one")
    key = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory() as folder:
        story = Path(folder) / "story.jsonl"
        options = ("--preset", PRESET, "--no-changes", "--log-level", "error")
        environment = os.environ | {"BALLAST_API_KEY": key}
        progress("measuring over HTTP: starting a server", 0, None)
        client = BurstClient(specs, rounds, seed, progress)
        with serving(file, *options, "--story", str(story), environment=environment) as server:
            asyncio.run(_send_over_http(client, server.url, key))
        (life,) = read_device_stories(story)
    return behind_server(measured, life.entries, client)


async def _send_over_http(client: BurstClient, url: str, key: str) -> None:
    async with HttpTarget(url, client.clock, key) as target:
        await client.send_bursts(target)


def behind_server(
    measured: MachineProfile, entries: Sequence[StoryEntry], client: BurstClient
) -> MachineProfile:
    """Return `measured` with the costs of an engine to which `client` has sent its bursts, fitted
    to the `entries` of its story. Raises DeviceError if these lack a request."""
    in_engine = ttft_of(entries)
    if len(in_engine) != client.sent:
        raise DeviceError("calibrate", f"{client.sent} requests, but {len(in_engine)} in the story")
    beyond = [seconds - in_engine[n] for n, seconds in client.alone]
    answer = max(0.0, statistics.median(beyond))
    return with_engine(replace(measured, answer=answer), entries)


def ttft_of(entries: Sequence[StoryEntry]) -> list[float]:
    """Return, of each request of a device's story in order of arrival, the seconds from the turn of
    the loop that took it to the turn that had its first token."""
    arrived: dict[int, float] = {}
    first: dict[int, float] = {}
    jobs: dict[int, StoryEntry] = {}
    for entry in entries:
        event = entry.get("event")
        if event == "Arrival":
            arrived[entry["n"]] = entry["at"]
        elif event == "JobDone":
            for n in sampling_requests(jobs.pop(entry["job"])):
                first.setdefault(n, entry["at"])
        elif event is None and "job" in entry:
            jobs[entry["job"]] = entry
    return [first[n] - at for n, at in arrived.items() if n in first]


class BurstClient:
    """Sends the bursts of a calibration to a server, each when the one before has been answered."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        rounds: int,
        seed: int,
        progress: Progress = quiet,
        name: str = "",
    ) -> None:
        """`name`: begins the ids of its requests, where a server has several such clients."""
        self.sent = 0
        """Requests so far."""
        self.alone: list[tuple[int, float]] = []
        """Number and TTFT in seconds of each request that was alone in its burst."""
        self.clock: Clock = MonotonicClock()
        self._bursts = [_named(burst, name) for burst in bursts(specs, rounds, seed)]
        self._progress = progress

    async def send_bursts(self, target: BenchmarkTarget) -> None:
        """Send all bursts. `target` has this client's clock. Raises DeviceError where a request
        fails."""
        for i, burst in enumerate(self._bursts):
            self._progress("measuring behind a server", i, len(self._bursts))
            recorder = RequestRecorder()
            for n, submission in enumerate(burst.requests):
                asked = WorkloadRequest(
                    id=n,
                    at=0.0,
                    model=submission.model,
                    prompt_tokens=len(submission.prompt),
                    output_tokens=submission.max_tokens,
                )
                recorder.sent(asked, submission.id, self.clock.now())
            try:
                await self._send(target, burst, recorder)
            except TargetError as error:
                raise DeviceError("calibrate", str(error)) from error
            records = recorder.records()
            if not all(record.answered for record in records):
                raise DeviceError("calibrate", f"a request of {burst.requests[0].model} failed")
            if len(records) == 1:
                assert records[0].first_token is not None
                self.alone.append((self.sent, records[0].first_token - records[0].sent))
            self.sent += len(records)
            await asyncio.sleep(burst.pause)
        self._progress("measuring behind a server", len(self._bursts), len(self._bursts))

    @staticmethod
    async def _send(target: BenchmarkTarget, burst: Burst, recorder: RequestRecorder) -> None:
        """Send a burst's requests, the late one after its delay, and wait for all answers."""
        running = [target.run(submission, recorder) for submission in burst.at_once]
        if burst.late is not None:
            running.append(_run_late(target, burst.late, recorder, burst.delay))
        await asyncio.gather(*running)


def _named(burst: Burst, name: str) -> Burst:
    at_once = [replace(request, id=name + request.id) for request in burst.at_once]
    late = None if burst.late is None else replace(burst.late, id=name + burst.late.id)
    return replace(burst, at_once=at_once, late=late)


async def _run_late(
    target: BenchmarkTarget, submission: Submission, recorder: RequestRecorder, delay: float
) -> None:
    await asyncio.sleep(delay)
    await target.run(submission, recorder)
