"""A kept worker's connection, carried by its agent to a server on another host."""

from __future__ import annotations

import asyncio

import pytest

from ballast.cluster.hosts.worker_forwarder import WorkerForwarder
from tests.cluster.worker.test_worker import DEADLINE

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def test_bytes_go_both_ways_until_one_end_closes() -> None:
    async def scenario() -> None:
        met: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        listening = await asyncio.start_server(lambda *s: met.set_result(s), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with asyncio.timeout(DEADLINE), listening:
            forwarder = WorkerForwarder(f"tcp://127.0.0.1:{port}")
            await forwarder.listen()
            running = asyncio.ensure_future(forwarder.run())
            path = forwarder.address.removeprefix("ipc://")
            from_server, to_server = await asyncio.open_unix_connection(path)
            from_worker, to_worker = await met
            long = bytes(range(256)) * 4096
            to_server.write(long)
            assert await from_worker.readexactly(len(long)) == long
            to_worker.write(long)
            assert await from_server.readexactly(len(long)) == long
            with pytest.raises(FileNotFoundError):  # another process finds no socket
                await asyncio.open_unix_connection(path)
            to_worker.close()
            assert await from_server.read() == b""
            await running
            to_server.close()

    asyncio.run(scenario())


def test_a_server_that_cannot_be_reached_is_a_connection_that_ends() -> None:
    async def scenario() -> None:
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        listening.close()
        await listening.wait_closed()
        async with asyncio.timeout(DEADLINE):
            forwarder = WorkerForwarder(f"tcp://127.0.0.1:{port}")
            await forwarder.listen()
            running = asyncio.ensure_future(forwarder.run())
            path = forwarder.address.removeprefix("ipc://")
            reader, writer = await asyncio.open_unix_connection(path)
            assert await reader.read() == b""
            await running
            writer.close()

    asyncio.run(scenario())
