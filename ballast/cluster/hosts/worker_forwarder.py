"""Carry a kept worker's connection to its next server, on another host.

A worker that runs models may open Unix sockets and no others (`confine_worker`): it cannot connect
to a further server by TCP. The agent of its host can, and copies the bytes of that one connection,
which are encrypted from the worker to the server. A worker that is started anew connects by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from ballast.transport.sockets import PrivateDirectory, address

CONNECT_SECONDS = 30.0
"""Time for the worker to connect."""
_CHUNK = 1 << 16

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WorkerForwarder:
    """A Unix socket whose first connection goes on to a server's address."""

    def __init__(self, server: str) -> None:
        """`server`: its address, `tcp://HOST:PORT`, as ZeroMQ writes it."""
        self._to = urlsplit(server)
        self._directory = PrivateDirectory()
        self.address = address(self._directory.path)
        """Where the worker connects, once this listens; as ZeroMQ writes it."""
        self._met: asyncio.Future[_Stream] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Server | None = None

    async def listen(self) -> None:
        """Wait for the worker from now on. Raises OSError."""
        path = self.address.removeprefix("ipc://")
        self._listening = await asyncio.start_unix_server(self._accept, path)

    async def run(self) -> None:
        """Copy bytes until one end closes the connection, or the server cannot be reached; then
        close the other end."""
        streams: list[_Stream] = []
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams.append(await self._met)
                streams.append(await asyncio.open_connection(self._to.hostname, self._to.port))
            self._hide()
            (worker, to_worker), (server, to_server) = streams
            copies = [
                asyncio.create_task(_copy(worker, to_server)),
                asyncio.create_task(_copy(server, to_worker)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
        except (OSError, TimeoutError):
            pass  # the server takes the worker for dead
        finally:
            self._hide()
            for _, writer in streams:
                writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._met.done():
            writer.close()
        else:
            self._met.set_result((reader, writer))

    def _hide(self) -> None:
        """Take no other connection."""
        if self._listening is not None:
            self._listening.close()
        self._directory.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end, or until the other side is gone."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
