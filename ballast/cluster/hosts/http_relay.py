"""Accept HTTP clients on a host whose server is elsewhere, and carry their bytes to it.

Run by `relay_process`, on an event loop. Keys, quotas and answers are the server's. While no server
is connected, each request is refused with 503 and `Retry-After`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import cast

from ballast.transport.curve import CurveClient, CurveLink
from ballast.transport.dead_peers import notice_death
from ballast.transport.relay_messages import (
    WINDOW_BYTES,
    BytesTakenMsg,
    ClientBytesMsg,
    ClientCameMsg,
    ClientLeftMsg,
    CloseClientMsg,
    RelayHelloMsg,
    ToRelay,
    WelcomeRelayMsg,
    decode_to_relay,
)
from ballast.transport.sockets import LoopSocket

WELCOME_SECONDS = 10.0
"""Time for a server to answer."""
RETRY_SECONDS = 5
"""Seconds after which refused clients are to try again."""
HEAD_SECONDS, HEAD_BYTES = 5.0, 64 << 10
"""Bounds of the head of a request that is refused."""
LINGER_SECONDS = 1.0
"""Time for a refused client to stop sending; one whose bytes nobody reads may miss its answer."""
OTHER_FILES = 64
"""Open files other than clients' connections, and those of clients that are refused."""
LOOK_SECONDS = 1.0
"""Interval of looks for what a client has read that reads slowly."""

_WHY = "the server of this fleet is away; retry later"
_BODY = json.dumps(
    {"error": {"message": _WHY, "type": "server_error", "param": None, "code": "unavailable"}}
).encode()
_HEAD = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    f"content-length: {len(_BODY)}\r\nretry-after: {RETRY_SECONDS}\r\nconnection: close\r\n\r\n"
).encode()


class HttpRelay:
    """Listens for clients; `serve` connects them with a server."""

    def __init__(self, files: int) -> None:
        """`files`: how many the process may open."""
        self._most_clients = max(1, files - OTHER_FILES)
        self._listener: asyncio.Server | None = None
        self._socket: LoopSocket[ToRelay] | None = None
        """The connection to a server that takes clients; None: there is none."""
        self._clients: dict[int, RelayedClient] = {}
        self._numbers = itertools.count(1)

    async def listen(self, host: str, port: int) -> None:
        """Accept clients from now on. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, host, port, reuse_address=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def serve(self, keys: CurveLink) -> None:
        """Carry clients' bytes to a server, until the connection to it is lost; their connections
        are closed then. Raises MalformedMessage."""
        socket = LoopSocket(CurveClient(keys), decode_to_relay)
        give_up = asyncio.get_running_loop().call_later(WELCOME_SECONDS, socket.wake)
        try:
            while not socket.lost:
                while socket.has_message:
                    self._handle(socket, socket.take())
                if not socket.lost:
                    await socket.change()
                if self._socket is None and not socket.has_message:
                    break  # it has not answered in time
        finally:
            give_up.cancel()
            self._socket = None
            for client in list(self._clients.values()):
                client.close()
            socket.close()

    def close(self) -> None:
        """Accept no more clients."""
        assert self._listener is not None
        self._listener.close()

    def send(self, message: ClientBytesMsg | BytesTakenMsg) -> None:
        """Send a message of a client to the server, if there is one."""
        if self._socket is not None:
            self._socket.send(message)

    def came(self, client: RelayedClient, host: str, port: int) -> int:
        """Note that a client has come; returns its number."""
        id = next(self._numbers)
        self._clients[id] = client
        if self._socket is None:  # lost since it was accepted
            client.close()
        else:
            self._socket.send(ClientCameMsg(id, host, port))
        return id

    def left(self, id: int) -> None:
        """Note that a client's connection is closed."""
        del self._clients[id]
        if self._socket is not None:
            self._socket.send(ClientLeftMsg(id))

    def _accept(self) -> asyncio.Protocol:
        return RefusedClient() if self._socket is None else RelayedClient(self)

    def _handle(self, socket: LoopSocket[ToRelay], message: ToRelay) -> None:
        if isinstance(message, WelcomeRelayMsg):
            self._socket = socket
            socket.send(RelayHelloMsg(*self.address, self._most_clients))
            return
        client = self._clients.get(message.id)
        match message:
            case _ if client is None:
                pass  # it has left
            case ClientBytesMsg():
                client.write(message.data)
            case BytesTakenMsg():
                client.taken(message.count)
            case CloseClientMsg():
                client.close(at_once=message.at_once)


class RelayedClient(asyncio.Protocol):
    """The connection of a client that a server answers."""

    def __init__(self, relay: HttpRelay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self._id = 0
        self._ahead = 0
        """Bytes that were sent to the server and wait there."""
        self._waiting = 0
        """Bytes that came from the server and may wait here."""
        self._full = False
        self._looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_death(transport.get_extra_info("socket"))
        peer = transport.get_extra_info("peername") or ("", 0)
        self._id = self._relay.came(self, str(peer[0]), int(peer[1]))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._ahead += len(data)
        self._relay.send(ClientBytesMsg(self._id, data))
        if self._ahead > WINDOW_BYTES:
            self._transport.pause_reading()

    def taken(self, count: int) -> None:
        """Note that the server has taken bytes."""
        assert self._transport is not None
        self._ahead -= count
        if self._ahead <= WINDOW_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Send bytes of the server to the client."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)
            self._waiting += len(data)
            self._report()

    def pause_writing(self) -> None:
        self._full = True
        self._look_again()

    def resume_writing(self) -> None:
        self._look_no_more()
        self._report()

    def _look_again(self) -> None:
        """Report what a slow client has read meanwhile: the server judges clients by it."""
        if self._full:
            self._report()
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(LOOK_SECONDS, self._look_again)

    def _look_no_more(self) -> None:
        self._full = False
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _report(self) -> None:
        assert self._transport is not None
        left = self._transport.get_write_buffer_size() if self._full else 0
        if (taken := self._waiting - left) > 0:
            self._relay.send(BytesTakenMsg(self._id, taken))
            self._waiting = left

    def close(self, *, at_once: bool = False) -> None:
        """Close the connection, once all has been sent or `at_once`."""
        assert self._transport is not None
        if at_once:
            self._transport.abort()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._look_no_more()
        self._relay.left(self._id)


class RefusedClient(asyncio.Protocol):
    """The connection of a client while there is no server."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._over: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._over = asyncio.get_running_loop().call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        assert self._over is not None
        if b"\r\n\r\n" in self._head or len(self._head) > HEAD_BYTES:
            return  # answered
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > HEAD_BYTES:
            self._transport.write(_HEAD if self._head.startswith(b"HEAD ") else _HEAD + _BODY)
            self._transport.write_eof()
            self._over.cancel()
            loop = asyncio.get_running_loop()
            self._over = loop.call_later(LINGER_SECONDS, self._transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        assert self._over is not None
        self._over.cancel()
