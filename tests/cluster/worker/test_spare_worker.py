"""A process that waits takes the place of a worker that dies, if it still can."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ballast.bench.server_process import child_called
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.process_names import SERVING, SPARE
from ballast.cluster.worker.spare_worker import SpareWorker
from tests.cluster.worker.test_worker import DEADLINE, FAKE, FLEET


async def spare(of: SpareWorker[LocalWorker]) -> int:
    """Its process id, once it waits."""
    while not of.waits:
        await asyncio.sleep(0.01)
    return child_called(SPARE, os.getpid())


def test_a_spare_waits_and_then_serves() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(FAKE))
            assert await spares.take() is None
            await spares.prepare()
            waiting = await spare(spares)
            await spares.prepare()
            worker = await spares.take()
            assert worker is not None
            assert worker.waits
            assert list((await worker.start(FLEET)).specs) == ["a"]
            assert (worker.pid, child_called(SERVING, os.getpid())) == (waiting, waiting)
            assert not worker.waits
            await worker.close()

    asyncio.run(scenario())


def test_a_spare_that_is_not_ready_goes_on() -> None:
    class Slow:
        """A worker that is prepared once the test has it so."""

        def __init__(self) -> None:
            self.go = asyncio.Event()
            self.waits = self.closed = False

        async def prepare(self) -> None:
            await self.go.wait()
            self.waits = True

        async def close(self, patience: float = 0.0) -> None:
            self.closed = True

    async def scenario() -> None:
        made = list[Slow]()

        def make() -> Slow:
            made.append(Slow())
            return made[-1]

        spares = SpareWorker(make)
        await spares.prepare()
        assert await spares.take() is None
        [slow] = made
        assert not slow.closed
        slow.go.set()
        while not spares.waits:
            await asyncio.sleep(0)
        assert await spares.take() is slow
        await spares.close()
        assert not slow.closed

    asyncio.run(scenario())


def test_a_spare_that_died_is_not_used() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(FAKE))
            await spares.prepare()
            pid = await spare(spares)
            os.kill(pid, signal.SIGKILL)
            while spares.waits:  # until the event loop has been told of the death
                await asyncio.sleep(0.01)
            assert await spares.take() is None
            await spares.prepare()
            pid = await spare(spares)
            await spares.close()
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("command", [("/nonexistent",), ("/bin/false",)])
def test_a_spare_that_cannot_start_is_no_fault(command: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE):
            spares = SpareWorker(lambda: LocalWorker(command))
            await spares.prepare()
            assert await spares.take() is None
            await spares.close()

    asyncio.run(scenario())
