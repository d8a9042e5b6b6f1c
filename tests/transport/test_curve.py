"""Connections between hosts: the one client that is known, strangers, and a connection's end."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from ballast.transport import curve, sockets
from ballast.transport.curve import (
    CurveClient,
    CurveKeys,
    CurveLink,
    CurveServer,
    pipe_of,
    read_keys,
)
from ballast.transport.sockets import ServerSocket, WorkerSocket
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lifecycle_messages import DrainedMsg, DrainMsg, HelloMsg

DEADLINE = 240


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without time for it is no broken connection: an end that is closed is noticed."""
    for seconds in ("LOST_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(curve, seconds, float(DEADLINE))


def worker(link: CurveLink, leave: threading.Event | None, heard: list[ToWorker]) -> bool:
    """Greet the server; stay until `leave`, or until the connection is lost; returns whether it
    was."""
    with WorkerSocket(CurveClient(link)) as socket:
        socket.send(HelloMsg(os.getpid()))
        while not socket.lost and not (leave is not None and leave.is_set() and heard):
            socket.wait(0.02)
            socket.receive_all(heard.append)
        if not socket.lost:
            socket.send(DrainedMsg())
            return False
        return True


def test_the_known_client_is_heard_and_its_end_is_noticed() -> None:
    async def scenario() -> None:
        own, leave, heard = CurveKeys.new(), threading.Event(), list[ToWorker]()
        end = CurveServer("127.0.0.1", own.public)
        socket = ServerSocket(end)
        link = CurveLink(end.address, end.keys.public, own)
        socket.send(DrainMsg())  # before anybody has connected
        there = asyncio.create_task(asyncio.to_thread(worker, link, leave, heard))
        while not socket.has_message:
            await socket.change()
        assert isinstance(socket.take(), HelloMsg)
        assert not socket.lost
        leave.set()
        assert not await there
        assert heard == [DrainMsg()]
        while not socket.lost:
            await socket.change()
        assert isinstance(socket.take(), DrainedMsg)
        socket.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


@pytest.mark.parametrize("stranger", ["another key", "another server"])
def test_a_stranger_is_not_heard_and_disturbs_nobody(
    stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        own = CurveKeys.new()
        end = CurveServer("127.0.0.1", own.public)
        socket = ServerSocket(end)
        keys = own if stranger == "another server" else CurveKeys.new()
        server = CurveKeys.new() if stranger == "another server" else end.keys
        link = CurveLink(end.address, server.public, keys)
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "LINGER_SECONDS", 0.0)  # its greeting cannot be sent
            assert await asyncio.to_thread(worker, link, None, [])
        await asyncio.sleep(0)
        assert (socket.lost, socket.has_message) == (False, False)
        leave = threading.Event()
        leave.set()
        good = CurveLink(end.address, end.keys.public, own)
        socket.send(DrainMsg())
        there = asyncio.create_task(asyncio.to_thread(worker, good, leave, []))
        while not socket.has_message:
            await socket.change()
        await there
        socket.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_worker_notices_that_its_server_is_gone() -> None:
    async def scenario() -> None:
        own = CurveKeys.new()
        end = CurveServer("127.0.0.1", own.public)
        socket = ServerSocket(end)
        link = CurveLink(end.address, end.keys.public, own)
        there = asyncio.create_task(asyncio.to_thread(worker, link, None, []))
        while not socket.has_message:
            await socket.change()
        socket.close()
        assert await there

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_keys_go_to_a_child_through_a_pipe_and_into_no_log() -> None:
    link = CurveLink("tcp://127.0.0.1:1", "s" * 40, CurveKeys("p" * 40, "q" * 40))
    assert read_keys(pipe_of(link)) == link
    assert "q" * 40 not in repr(link)
