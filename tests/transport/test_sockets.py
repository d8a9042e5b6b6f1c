"""Messages between server and worker: none lost, none out of order, whoever comes first."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.core.event import TokenOutput
from ballast.transport.sockets import PrivateDirectory, ServerSocket, WorkerSocket
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.request_messages import OutputsMsg, WithdrawMsg


@pytest.fixture
def directory() -> Iterator[Path]:
    made = PrivateDirectory()
    yield made.path
    made.close()


def token(n: int) -> OutputsMsg:
    return OutputsMsg.of([TokenOutput(f"r{n}", n, n)])


async def next_of(socket: ServerSocket) -> str:
    """Id of the request in the next message."""
    while not socket.has_message:
        await socket.change()
    message = socket.take()
    assert isinstance(message, OutputsMsg)
    (output,) = message.unwrap()
    return output.request_id


def echo(directory: Path, n: int, seed: int) -> None:
    """A worker that answers `n` messages, and waits before some of them."""
    rng, got = random.Random(seed), list[ToWorker]()
    with WorkerSocket(directory) as socket:
        while len(got) < n:
            socket.wait(rng.choice((0.0, 0.0, 0.001, None)))
            before = len(got)
            socket.receive_all(got.append)
            for message in got[before:]:
                assert isinstance(message, WithdrawMsg)
                socket.send(token(int(message.request_ids[0])))


@pytest.mark.parametrize("seed", range(4))
def test_every_message_arrives_in_order(directory: Path, seed: int) -> None:
    """Some are sent before the worker has connected, the others while answers come in."""
    n, rng = 400, random.Random(seed)

    async def serve() -> list[str]:
        socket = ServerSocket(directory)
        worker = threading.Thread(target=echo, args=(directory, n, seed), daemon=True)
        found: list[str] = []
        sent = 0
        try:
            while sent < 50:
                socket.send(WithdrawMsg((f"{sent}",)))
                sent += 1
            worker.start()
            while len(found) < n:
                for _ in range(rng.randrange(8)):
                    if sent < n:
                        socket.send(WithdrawMsg((f"{sent}",)))
                        sent += 1
                if len(found) < sent:
                    found.append(await next_of(socket))
            await asyncio.to_thread(worker.join)
        finally:
            socket.close()
        return found

    assert asyncio.run(asyncio.wait_for(serve(), 240)) == [f"r{i}" for i in range(n)]


def test_a_wait_ends_when_it_is_told_to(directory: Path) -> None:
    async def wait() -> bool:
        socket = ServerSocket(directory)
        socket.wake()  # nobody waits
        waiting = asyncio.ensure_future(socket.change())
        await asyncio.sleep(0)
        socket.wake()
        await waiting
        message = socket.has_message
        socket.close()
        return message

    assert not asyncio.run(asyncio.wait_for(wait(), 240))
