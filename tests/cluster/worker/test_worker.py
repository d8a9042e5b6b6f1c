"""A worker process with a device that only echoes: the protocol, and how either side ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from ballast.cluster.controller import Controller
from ballast.cluster.device import RemoteDevice
from ballast.cluster.output_stream import OutputStream
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.core.errors import Unavailable
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.transport import sockets
from ballast.transport.sockets import UnixEndpoint, WorkerSocket
from ballast.transport.worker_messages.request_messages import OutputsMsg
from tests.cluster import fake_device
from tests.cluster.fake_device import BREAK, HOLD, LOSE, REFUSE

FAKE = (sys.executable, str(Path(fake_device.__file__)))
FLEET = FleetSettings(
    models=(
        ModelSettings(name="a", path="a"),
        ModelSettings(name="b", path="broken"),
    ),
    device=DeviceSettings(budget_bytes=2**20),
)
DEADLINE = 240.0
PATIENCE = 60.0
"""Seconds in which a worker without requests leaves in peace: it does so at once where it can."""


def submission(request_id: str, seed: int = 0, max_tokens: int = 4) -> Submission:
    return Submission(
        id=request_id,
        model="a",
        prompt=(10, 11, 12),
        max_tokens=max_tokens,
        sampling=Sampling(seed=seed),
    )


@contextlib.asynccontextmanager
async def running(fleet: FleetSettings = FLEET) -> AsyncIterator[tuple[Controller, LocalWorker]]:
    controller = Controller(LocalWorkers(lambda: LocalWorker(FAKE)))
    async with asyncio.timeout(DEADLINE):
        try:
            await controller.start(fleet)
            yield controller, present(controller)
        finally:
            await controller.close(PATIENCE)


def device(controller: Controller) -> RemoteDevice:
    """The first one, of many tests the only one."""
    return next(iter(controller.devices.values()))


def present(controller: Controller) -> LocalWorker:
    worker = device(controller).worker
    assert isinstance(worker, LocalWorker)
    return worker


async def all_of(stream: OutputStream) -> list[Output]:
    found: list[Output] = []
    while stream.more:
        found += await stream.take()
    return found


def tokens(outputs: list[Output]) -> list[int]:
    return [o.token for o in outputs if isinstance(o, TokenOutput)]


def test_requests_are_answered_and_the_worker_leaves_in_peace() -> None:
    async def scenario() -> None:
        async with running() as (controller, worker):
            assert list(controller.devices.specs) == ["a"]
            assert controller.devices.failed == {"b": "it is broken"}
            one = controller.router.submit([submission("1"), submission("2", max_tokens=2)])
            two = controller.router.submit([submission("3", max_tokens=5)])
            result = await all_of(one)
            assert {type(o) for o in result} == {TokenOutput, FinishedOutput}
            assert tokens([o for o in result if o.request_id == "1"]) == [10, 11, 12, 10]
            assert tokens([o for o in result if o.request_id == "2"]) == [10, 11]
            assert tokens(await all_of(two)) == [10, 11, 12, 10, 11]
            assert controller.devices.open_requests == 0
        assert worker.exit_reason() == "exit code 0"
        assert not worker.directory.exists()

    asyncio.run(scenario())


def test_failures_reach_their_request_only() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            refused = controller.router.submit([submission("1", REFUSE)])
            broken = controller.router.submit([submission("2", BREAK)])
            fine = controller.router.submit([submission("3")])
            assert await all_of(refused) == [FailedOutput("1", "queue_full", "too many wait")]
            assert isinstance((await all_of(broken))[-1], FailedOutput)
            assert isinstance((await all_of(fine))[-1], FinishedOutput)

    asyncio.run(scenario())


def test_a_device_that_is_lost_ends_its_worker_and_requests_go_on_in_the_next() -> None:
    async def scenario() -> None:
        async with running() as (controller, worker):
            answer = await all_of(controller.router.submit([submission("1", LOSE)]))
            assert tokens(answer) == [10, 11, 12, 10]
            assert isinstance(answer[-1], FinishedOutput)
            assert controller.devices.restarts == 1
        assert worker.exit_reason() == "exit code 1"

    asyncio.run(scenario())


def test_withdrawn_requests_leave_the_device() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            stream = controller.router.submit([submission("1", HOLD)])
            assert tokens(await stream.take()) == [10, 11]
            await reported(controller, running=1)
            stream.close()
            assert controller.devices.open_requests == 0
            await reported(controller, running=0)

    asyncio.run(scenario())


async def reported(controller: Controller, running: int) -> None:
    """Returns when the device reports so; the test's deadline bounds it."""
    while (
        controller.devices.report is None or controller.devices.report.models[0].running != running
    ):
        await asyncio.sleep(0.01)


def test_closing_fails_what_does_not_end() -> None:
    async def scenario() -> None:
        controller = Controller(LocalWorkers(lambda: LocalWorker(FAKE)))
        await controller.start(FLEET)
        held = controller.router.submit([submission("1", HOLD)])
        await held.take()
        await controller.close(0.3)
        result = await all_of(held)
        assert [type(o) for o in result] == [FailedOutput]
        assert not present(controller).directory.exists()

    asyncio.run(scenario())


def test_a_device_that_cannot_be_built_says_why() -> None:
    async def scenario() -> None:
        fleet = FleetSettings(models=(), device=FLEET.device, options={"unbuildable": 1})
        with pytest.raises(Unavailable, match="no room for the pool"):
            async with running(fleet):
                pass

    asyncio.run(scenario())


def pass_on_late(directory: Path) -> None:
    """Between a worker and its server: what comes once the worker has its settings is passed on
    when the worker has ended, and a while after."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "worker.sock"))
        listener.listen()
        worker, _ = listener.accept()
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(directory / "server.sock"))
    with worker, server:
        data = b"-"
        while data and b"ConfigureMsg" not in data:
            (ready, *_), _, _ = select.select([server, worker], [], [])
            data = ready.recv(1 << 20)
            (server if ready is worker else worker).sendall(data)
        late = b"".join(iter(lambda: worker.recv(1 << 20), b""))
        time.sleep(0.5)
        server.sendall(late)


def test_the_last_words_of_a_worker_are_heard_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Behind(UnixEndpoint):
        def attach(self, socket: zmq.Socket[bytes]) -> None:
            self._address = self._address.replace("worker.sock", "server.sock")
            super().attach(socket)

    async def scenario() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sockets, "UnixEndpoint", Behind)
            worker = LocalWorker(FAKE)
        passing = asyncio.create_task(asyncio.to_thread(pass_on_late, worker.directory))
        fleet = FleetSettings(models=(), device=FLEET.device, options={"unbuildable": 1})
        with pytest.raises(Unavailable, match="cannot start: no room for the pool"):
            await worker.start(fleet)
        await passing
        await worker.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_start_can_be_given_up() -> None:
    async def scenario() -> None:
        fleet = FleetSettings(models=(), device=FLEET.device, options={"mute": 1})
        controller = Controller(LocalWorkers(lambda: LocalWorker(FAKE)))
        starting = asyncio.ensure_future(controller.start(fleet))
        while not controller.devices or not present(controller).started:
            await asyncio.sleep(0.01)
        worker = present(controller)
        starting.cancel()
        await asyncio.wait({starting})
        await controller.close(10.0)
        assert worker.exit_reason() == "killed by signal 9"
        assert not worker.directory.exists()

    asyncio.run(scenario())


ORPHANING = """
import asyncio, sys
from ballast.cluster.device import RemoteDevice
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.cluster.output_stream import OutputStream
from tests.cluster.worker.test_worker import FAKE, FLEET

async def main():
    worker = LocalWorker(FAKE)
    await worker.start(FLEET)
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_server(tmp_path: Path) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", ORPHANING),
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        watch = os.pidfd_open(pid)
        try:
            server.send_signal(signal.SIGKILL)
            server.wait(DEADLINE)
            assert ended(watch), "the worker runs on"
            assert list(tmp_path.iterdir()) == []
        finally:
            os.close(watch)


def ended(pidfd: int) -> bool:
    """Whether the process has ended, at the latest by the deadline."""
    return bool(select.select([pidfd], [], [], DEADLINE)[0])


def test_the_socket_is_for_this_user_alone() -> None:
    async def scenario() -> None:
        worker = LocalWorker(FAKE)
        try:
            assert worker.directory.stat().st_mode & 0o777 == 0o700
        finally:
            await worker.close()

    asyncio.run(scenario())


def test_a_worker_ignores_the_signals_of_its_group() -> None:
    async def scenario() -> None:
        async with running() as (controller, worker):
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
            assert isinstance(
                (await all_of(controller.router.submit([submission("1")])))[-1], FinishedOutput
            )

    asyncio.run(scenario())


def test_other_work_of_the_loop_goes_between_the_messages_of_a_backlog() -> None:
    """Thousands of short answers come faster than they are read: probes do not wait for them."""

    async def scenario() -> None:
        worker = LocalWorker(FAKE)
        handle = worker._handle
        handle.exited = asyncio.create_task(asyncio.sleep(DEADLINE))
        n, turns = 300, 0

        def send() -> None:
            with WorkerSocket(worker.directory) as socket:
                for i in range(n):
                    socket.send(OutputsMsg.of([TokenOutput(f"r{i}", 0, i)]))

        await asyncio.to_thread(send)
        while len(worker._socket._received) < n:
            await asyncio.sleep(0.01)

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        for i in range(n):
            message = await worker.receive()
            assert isinstance(message, OutputsMsg)
            assert [o.request_id for o in message.unwrap()] == [f"r{i}"]
        assert turns >= n - 1
        for task in (turning, handle.exited):
            task.cancel()
        handle.exited = None
        await worker.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
