"""Run a workload on controllers and worker processes as a server has them, but without HTTP.

Used by `bench.run` for fleets of several devices, and by benchmarks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from ballast.bench.expected_load import expecting
from ballast.bench.progress import Progress, quiet
from ballast.bench.record import RequestRecorder, prompts_of, vocabularies_of
from ballast.bench.replay import PATIENCE, replay
from ballast.bench.report import Report
from ballast.bench.sample import DecisionRecord, DeviceSample, decisions_of
from ballast.cluster.controller import Controller
from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.core.clock import Clock
from ballast.core.errors import Unavailable
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings, Slo
from ballast.live.inbox import MonotonicClock
from ballast.workload.workload import Workload

LAST_SECONDS = 10.0
"""Seconds that workers have to exit once all requests are answered."""


@dataclass(frozen=True, slots=True)
class ServersRun:
    """One run on live servers: report, final device reports and moves of models."""

    report: Report
    devices: tuple[DeviceReport, ...]
    """Last report of each device, server by server."""
    moves: tuple[dict[str, Any], ...]
    """Actions of the fleet policies, in order, and the reason if one was refused."""


class ServersTarget:
    """Benchmark target of several servers; a request goes to the first that serves its model."""

    def __init__(self, servers: Sequence[Controller], clock: Clock) -> None:
        self._servers = tuple(servers)
        self._clock = clock

    @property
    def clock(self) -> Clock:
        return self._clock

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        """Raises Unavailable where no worker is to be expected."""
        stream = self._server(submission.model).router.submit([submission])
        try:
            while stream.more:
                outputs = await stream.take()
                now = self._clock.now()
                for output in outputs:
                    recorder.record(now, output)
        finally:
            stream.close()

    async def memory(self) -> Mapping[str, DeviceSample]:
        """Each device as its worker last reported it."""
        return {
            name: DeviceSample.of(device.report)
            for server in self._servers
            for name, device in server.devices.items()
            if device.report is not None
        }

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        """Return the decisions in the controllers' records since `origin`, with times counted from
        there; the records are on the event loop's clock."""
        found: list[DecisionRecord] = []
        began = asyncio.get_running_loop().time() - (self._clock.now() - origin)
        for server in self._servers:
            entries = ({"at": moment, **what} for moment, what in server.devices.decisions)
            found += decisions_of(entries, next(iter(server.devices)), began)
        return [d for d in found if d.at >= 0]

    def _server(self, model: str) -> Controller:
        for server in self._servers:
            if any(
                served.name == model
                for base in server.devices.specs.values()
                for served in base.served
            ):
                return server
        raise Unavailable(f"no server has {model}")


async def run_servers(
    fleets: Sequence[FleetSettings],
    workload: Workload,
    slos: Mapping[str, Slo],
    *,
    name: str,
    timeout: float = PATIENCE,
    progress: Progress = quiet,
    command: Sequence[str] = COMMAND,
) -> ServersRun:
    """Run a workload open-loop on this machine, on a server started for each of `fleets`.

    No spare worker is kept: a worker that dies is not replaced at once. Raises Unavailable where a
    model cannot be served.
    """
    progress(f"{name}: starting {len(fleets)} servers", 0)
    fleets = [expecting(fleet, workload) for fleet in fleets]
    async with serving_fleets(fleets, command) as servers:
        target = ServersTarget(servers, MonotonicClock())
        specs = [spec for server in servers for spec in server.devices.specs.values()]
        prompts = prompts_of(vocabularies_of(specs))
        done = await replay(
            workload, target, prompts, timeout=timeout, progress=progress, name=name
        )
        devices = [d.report for server in servers for d in server.devices.values()]
        moves = [
            what for server in servers for _, what in server.devices.decisions if "epoch" in what
        ]
    report = Report.of(
        done.records,
        slos,
        done.wall_seconds,
        done.memory,
        done.decisions,
        name=name,
        workload=workload.describe(),
    )
    return ServersRun(report, tuple(r for r in devices if r is not None), tuple(moves))


@asynccontextmanager
async def serving_fleets(
    fleets: Sequence[FleetSettings], command: Sequence[str] = COMMAND
) -> AsyncIterator[list[Controller]]:
    """Start independent servers, one after the other."""
    brokers = [KvBroker.of(fleet.kv) for fleet in fleets]
    servers = [
        Controller(_maker(command, fleet, broker))
        for fleet, broker in zip(fleets, brokers, strict=True)
    ]
    try:
        for server, fleet in zip(servers, fleets, strict=True):
            await server.start(replace(fleet, server=replace(fleet.server, spare_worker=False)))
        for server in servers:
            for model, why in server.devices.failed.items():
                raise Unavailable(f"{model} is not served: {why}")
        yield servers
    finally:
        await asyncio.gather(*(server.close(LAST_SECONDS) for server in servers))
        for broker in brokers:
            if broker is not None:
                broker.shut()


def _maker(
    command: Sequence[str], fleet: FleetSettings, kv_broker: KvBroker | None
) -> LocalWorkers:
    """Make workers that share their segments, and their KV if the fleet has a tier for it."""
    broker = SegmentBroker(fleet.has_gpus)
    return LocalWorkers(lambda: LocalWorker(command, broker, kv_broker))
