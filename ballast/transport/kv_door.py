"""Read KV of another host's device through this host's agent, over a Unix socket.

A worker that runs models may open no network socket (`isolation.confinement`): the agent receives
the bytes from the other host's agent, and passes them on. `read_kv` is the worker's end, `KvDoor`
the agent's.

::

    worker ── request: host, ticket, bytes (a line of JSON) ──> agent
           <─ size, CRC-32, bytes; size, CRC-32, bytes; ... ──
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator

from ballast.core.errors import BallastError, DeviceError
from ballast.core.migration import elsewhere
from ballast.transport.kv_messages import CHUNK_BYTES
from ballast.transport.page_descriptors import same_user

log = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""Silence of the agent after which a worker gives a read up, and of a worker that asks nothing."""
_POLL_SECONDS = 0.1
"""Interval at which a worker that waits looks whether the bytes are still wanted."""
_HEAD = struct.Struct("!II")
"""Size of a chunk, and its checksum."""

Chunks = AsyncGenerator[tuple[bytes, int], None]
"""Chunks with their checksums."""
Receive = Callable[[str, str, int], Chunks]
"""Function from (host, ticket, bytes) to chunks. Raises BallastError and OSError."""


def read_kv(
    door: str, source: str, n_bytes: int, wanted: Callable[[], bool]
) -> Generator[bytearray, None, None]:
    """Yield the bytes that a device of another host offers, in order, `n_bytes` in all.

    `door`: address of the agent's `KvDoor`; `source`: as of `ImportKvEvent`. `wanted`: asked again
    and again; once it is False, no more is yielded. Raises DeviceError for what does not come, or
    not as it was sent.
    """
    host, ticket = elsewhere(source)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(SILENT_SECONDS)
            connection.connect(f"\0{door}")
            if not same_user(connection):
                raise DeviceError("connect", "another user serves that address")
            asked = {"host": host, "ticket": ticket, "bytes": n_bytes}
            connection.sendall(json.dumps(asked).encode() + b"\n")
            connection.settimeout(_POLL_SECONDS)
            while n_bytes:
                head = _exactly(connection, _HEAD.size, wanted)
                if head is None:
                    return
                size, checksum = _HEAD.unpack(head)
                if size != min(n_bytes, CHUNK_BYTES):
                    raise DeviceError("recv", f"{size} bytes, and {n_bytes} are missing")
                data = _exactly(connection, size, wanted)
                if data is None:
                    return
                if zlib.crc32(data) != checksum:
                    raise DeviceError("recv", "the bytes are not those that were sent")
                n_bytes -= size
                yield data
        except OSError as error:
            raise DeviceError("recv", str(error)) from error


def _exactly(
    connection: socket.socket, n_bytes: int, wanted: Callable[[], bool]
) -> bytearray | None:
    """Return so many bytes; None once they are not wanted. Raises DeviceError and OSError."""
    data = bytearray(n_bytes)
    view, silent_since = memoryview(data), time.monotonic()
    while view:
        if not wanted():
            return None
        try:
            n = connection.recv_into(view)
        except TimeoutError:
            if time.monotonic() - silent_since > SILENT_SECONDS:
                raise DeviceError("recv", "nothing comes from the other host") from None
            continue
        if not n:
            raise DeviceError("recv", "it does not come from the other host")
        view, silent_since = view[n:], time.monotonic()
    return data


class KvDoor:
    """Where workers of this host, of this user, read KV of other hosts; on the event loop."""

    def __init__(self, receive: Receive) -> None:
        """Listen. `receive`: receives from other hosts. Raises DeviceError."""
        self._receive = receive
        self.address = f"ballast-kv-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(f"\0{self.address}")
            listening.listen()
        except OSError as error:
            listening.close()
            raise DeviceError("bind", str(error)) from error
        self._reads = set[asyncio.Task[None]]()
        self._server = asyncio.ensure_future(
            asyncio.start_unix_server(self._accept, sock=listening)
        )

    async def close(self) -> None:
        """End all reads."""
        server = await self._server
        server.close()
        reads = [*self._reads]
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = asyncio.ensure_future(self._answer(reader, writer))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what a worker asks for; a connection that ends early says that it does not
        come."""
        try:
            if not same_user(writer.get_extra_info("socket")):
                return
            async with asyncio.timeout(SILENT_SECONDS):
                asked = json.loads(await reader.readline())
            host, ticket, n_bytes = str(asked["host"]), str(asked["ticket"]), int(asked["bytes"])
            async with contextlib.aclosing(self._receive(host, ticket, n_bytes)) as chunks:
                async for data, checksum in chunks:
                    writer.write(_HEAD.pack(len(data), checksum))
                    writer.write(data)
                    await writer.drain()  # raises where the worker has closed its end
        except (BallastError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("KV does not come from another host: %s", error or type(error).__name__)
        finally:
            writer.close()
