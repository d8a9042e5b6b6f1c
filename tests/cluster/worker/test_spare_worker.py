"""A process that waits takes the place of a worker that dies, if it still can."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.server_process import child_called
from ballast.cluster.worker.liveness_watch import Activity
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.process_names import SERVING, SPARE
from ballast.cluster.worker.spare_worker import SpareWorker
from ballast.core.settings import ServerSettings
from tests.cluster.worker.test_worker import DEADLINE, FAKE, FLEET

LIMITS = ServerSettings()
STOPPED = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
"""A process that stops, and never connects."""


async def spare(of: SpareWorker[LocalWorker]) -> int:
    """Its process id, once it waits."""
    while not of.waits:
        await asyncio.sleep(0.01)
    return child_called(SPARE, os.getpid())


def test_a_spare_waits_and_then_serves() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(FAKE))
            assert spares.take() is None
            spares.prepare(LIMITS)
            waiting = await spare(spares)
            spares.prepare(LIMITS)
            worker = spares.take()
            assert worker is not None
            assert worker.waits
            assert list((await worker.start(FLEET)).specs) == ["a"]
            assert (worker.pid, child_called(SERVING, os.getpid())) == (waiting, waiting)
            assert not worker.waits
            await worker.close()

    asyncio.run(scenario())


class Slow:
    """A worker that is prepared once the test has it so."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waits = self.closed = False
        self.used: Activity | None = None

    def activity(self) -> Activity | None:
        return self.used

    async def prepare(self) -> None:
        await self.go.wait()
        self.waits = True

    async def close(self, patience: float = 0.0) -> None:
        self.closed = True


def test_a_spare_that_is_not_ready_goes_on() -> None:
    async def scenario() -> None:
        made = list[Slow]()

        def make() -> Slow:
            made.append(Slow())
            return made[-1]

        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(make)
            spares.prepare(LIMITS)
            assert spares.take() is None
            while not made:
                await asyncio.sleep(0)
            [slow] = made
            assert not slow.closed
            slow.go.set()
            while not spares.waits:
                await asyncio.sleep(0)
            assert spares.take() is slow
            await spares.close()
            assert not slow.closed

    asyncio.run(scenario())


def test_a_spare_whose_preparation_hangs_is_replaced() -> None:
    """One does nothing after a while, the next computes for ever, the third is prepared."""

    async def scenario() -> None:
        made = list[Slow]()

        def make() -> Slow:
            made.append(Slow())
            return made[-1]

        limits = replace(LIMITS, starting_seconds=0.02, loading_seconds=1.0)
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(make, tick=0.01)
            spares.prepare(limits)
            while not made:
                await asyncio.sleep(0)
            made[0].used = 1, 0
            while len(made) < 2:
                await asyncio.sleep(0.01)
            spares.prepare(replace(limits, starting_seconds=1e6))
            made[1].used = 10**9, 0
            while not made[1].closed:
                await asyncio.sleep(0.01)
            assert made[0].closed
            assert len(made) == 2  # the next one after a while, or when one is wanted
            spares.prepare(LIMITS)
            while len(made) < 3:
                await asyncio.sleep(0)
            made[2].go.set()
            while not spares.waits:
                await asyncio.sleep(0)
            assert spares.take() is made[2]
            await spares.close()

    asyncio.run(scenario())


def test_a_process_that_is_stopped_while_it_is_prepared_is_replaced() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(STOPPED), tick=0.01)
            spares.prepare(replace(LIMITS, starting_seconds=0.5))
            while spares._worker is None or not spares._worker.started:
                await asyncio.sleep(0.01)
            first = spares._worker
            while spares._worker is first:
                await asyncio.sleep(0.01)
            await spares.close()
            assert not Path(f"/proc/{first.pid}").exists()

    asyncio.run(scenario())


def test_a_spare_that_died_is_not_used() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(FAKE))
            spares.prepare(LIMITS)
            pid = await spare(spares)
            os.kill(pid, signal.SIGKILL)
            while spares.waits:  # until the event loop has been told of the death
                await asyncio.sleep(0.01)
            assert spares.take() is None
            spares.prepare(LIMITS)
            pid = await spare(spares)
            await spares.close()
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("command", [("/nonexistent",), ("/bin/false",)])
def test_a_spare_that_cannot_start_is_no_fault(command: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(command))
            spares.prepare(LIMITS)
            while spares._machine.ready is None and spares._machine._failures < 2:
                await asyncio.sleep(0.01)
            assert spares.take() is None
            await spares.close()

    asyncio.run(scenario())
