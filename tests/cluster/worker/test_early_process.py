"""A process that starts before its server knows what it is for."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing

from ballast.cluster.worker.early_process import EarlyProcess
from ballast.cluster.worker.local_process import LocalProcess

RECORDS = """
import sys
from ballast.cluster.worker.early_process import AHEAD, arguments_from
from ballast.cluster.worker.flight_recorder import FlightRecorder

assert sys.argv[1] == AHEAD
arguments = arguments_from(int(sys.argv[2]))
given = dict(zip(arguments[::2], arguments[1::2], strict=True))
FlightRecorder(int(given["--flight"])).record([given["--parent"], given["--dir"]])
sys.exit(3 if given["--parent"] == sys.argv[3] else 4)
"""
ENDS = [sys.executable, "-c", "pass"]


def test_it_becomes_the_first_worker_with_its_descriptors() -> None:
    async def scenario() -> None:
        with closing(EarlyProcess([sys.executable, "-c", RECORDS])) as early:
            first, second = LocalProcess(ENDS, early=early), LocalProcess(ENDS, early=early)
            for process in (first, second):
                await process.spawn("--dir", "here", ended=lambda: None)
            assert (first.pid == early.pid, second.pid == early.pid) == (True, False)
        for process in (first, second):
            assert process.exited is not None
            await process.exited
            await process.close(0.0)
        assert (first.exit_reason(), second.exit_reason()) == ("exit code 3", "exit code 0")
        assert "here" in first.in_flight()

    asyncio.run(scenario())


def test_one_that_has_ended_is_replaced() -> None:
    async def scenario() -> None:
        with closing(EarlyProcess(ENDS)) as early:
            await early.wait()
            process = LocalProcess(ENDS, early=early)
            await process.spawn(ended=lambda: None)
            assert process.pid != early.pid
            await process.close(60.0)

    asyncio.run(scenario())


def test_one_that_is_not_needed_ends() -> None:
    with closing(EarlyProcess()) as killed:
        pass
    assert killed.returncode == -9
    early = EarlyProcess()
    early._orders.close()  # as by the server's death
    assert early._process.wait(120) == 0
