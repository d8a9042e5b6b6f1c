"""Run simulations of this server's fleet in a child process, one at a time, within limits.

A run takes a core and up to gigabytes: it has a process of its own with a low priority, which ends
with its client, and after `RUN_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ballast.core.settings import ServerSettings
from ballast.isolation.environment import child_environment
from ballast.isolation.limits import Limits
from ballast.server.admin.simulation_job import (
    HERE,
    MEMORY_BYTES,
    RECORDED,
    RUN_SECONDS,
    ErrorLine,
    Kind,
    SimulationJob,
)
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.sse import DONE, EventStream, event
from ballast.server.service import Service

COMMAND = (sys.executable, "-m", "ballast.bench.served_fleet")
LONGEST_LINE = 32 << 20
"""Most bytes of a result."""
START_SECONDS = 60.0
"""Seconds for a child to import its modules on a busy machine, beside `RUN_SECONDS`."""
PROGRESS = b'{"event":"progress"'
"""Beginning of a line that others follow."""


class Simulations:
    """Runs jobs in child processes of the server, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._present: _Run | None = None

    def stream(self, kind: Kind, wanted: dict[str, Any]) -> EventStream:
        """Run a job on the fleet as it is served now; `wanted`: further fields of the job. The
        response has the events `progress`, then `result` or `error`, and the run ends with it.
        Raises Fault (409) where there is nothing to simulate with, or while another run is on."""
        job = self._job(kind, **wanted)
        if self._present is not None:
            raise Fault(409, "a simulation runs already: one at a time", "refused")
        run = self._present = _Run(COMMAND, job)

        def finish() -> None:
            run.close()
            self._present = None

        return EventStream(run.events(), finish)

    def _job(
        self, kind: Kind, devices: str = HERE, workload: str = RECORDED, **wanted: Any
    ) -> SimulationJob:
        """Build a job with what is served, and what is known of it."""
        present = self._service.controller.devices
        specs, fleet = dict(present.specs), present.fleet
        served = {s.name for spec in specs.values() for s in spec.served}
        reports = [d.report for d in present.values() if d.report is not None]
        costs = {m.name: m.costs for r in reports for m in r.models if m.costs is not None}
        requests = [r for r in self._service.requests.trace() if r.model in served]
        if kind == "story":
            if fleet.story_path is None:
                raise _refused("this server writes no story: start it with --story FILE")
        elif not specs:
            raise _refused("no model is served yet")
        elif devices == HERE and (unknown := specs.keys() - costs):
            raise _refused(f"the costs of {min(unknown)!r} on this machine are not known yet")
        elif workload == RECORDED and not requests:
            raise _refused("no request has been answered yet")
        models = tuple(m for m in fleet.models if m.name in specs)
        return SimulationJob(
            kind=kind,
            fleet=replace(fleet, models=models, server=ServerSettings()),
            specs=list(specs.values()),
            costs=costs,
            link_bytes_per_second={r.device: r.activation_bytes_per_second for r in reports},
            devices=devices,
            workload=workload,
            requests=requests if workload == RECORDED and kind != "story" else [],
            **wanted,
        )


def _refused(why: str) -> Fault:
    return Fault(409, why, "refused")


class _Run:
    """One run: its child process, and the events that it sends."""

    def __init__(self, command: Sequence[str], job: SimulationJob) -> None:
        self._command = command
        self._job = job
        self._child: asyncio.subprocess.Process | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the run's events: after `progress`, `result` or `error`, and `DONE`."""
        try:
            async with asyncio.timeout(START_SECONDS + RUN_SECONDS):
                async for line in self._lines():
                    yield line
        except TimeoutError:
            yield _failed(f"it took more than {RUN_SECONDS} s: ask for less")
        finally:
            self.close()
            if self._child is not None:
                await self._child.wait()
        yield DONE

    async def _lines(self) -> AsyncIterator[bytes]:
        self._child = child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            limit=LONGEST_LINE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        # It has ended already; uvloop has a RuntimeError for that.
        with contextlib.suppress(ConnectionError, RuntimeError):
            child.stdin.write(msgspec.msgpack.encode(self._job))
            await child.stdin.drain()
            child.stdin.close()
        async for line in child.stdout:
            yield event(line.rstrip())
            if not line.startswith(PROGRESS):
                return  # its last word, whatever it still has to clean up
        code = await child.wait()
        limits = Limits(MEMORY_BYTES, RUN_SECONDS)
        why = limits.exceeded(signal.Signals(-code)) if code < 0 else "it failed, as the log says"
        yield _failed(f"{why}: ask for less")

    def close(self) -> None:
        """Kill the child, if it still runs."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()


def _failed(why: str) -> bytes:
    return event(encode(ErrorLine(why)))
