"""The server's end of an HTTP relay: each client is a connection of the server's HTTP protocol.

Used by `HttpRelays`, on the event loop. The protocol gets the client's own address; limits and logs
are those of clients that connect directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ballast import __version__
from ballast.core.errors import BallastError, Unavailable
from ballast.transport.curve import CurveServer
from ballast.transport.decoding import MalformedMessage
from ballast.transport.relay_messages import (
    WINDOW_BYTES,
    BytesTakenMsg,
    ClientBytesMsg,
    ClientCameMsg,
    ClientLeftMsg,
    CloseClientMsg,
    FromRelay,
    RelayHelloMsg,
    ToRelay,
    WelcomeRelayMsg,
    decode_from_relay,
)
from ballast.transport.sockets import LoopSocket

log = logging.getLogger(__name__)

TURN_MESSAGES = 64
"""Messages of a relay after which all else on the event loop has its turn: clients may send faster
than their bytes are read."""
PIECE_BYTES = 64 << 10
"""Most bytes of a message: those of other clients go between two."""


class OtherVersion(Unavailable):
    """The relay was started by another version."""


class RelayConnection:
    """The connection to the relay of one host."""

    def __init__(self, ip: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        """Listen at `ip` for a relay, by its public key. `accept`: returns the protocol of a new
        client's connection."""
        self._end = CurveServer(ip, relay_key)
        self._socket: LoopSocket[FromRelay] = LoopSocket(self._end, decode_from_relay)
        self._accept = accept
        self._clients: dict[int, RelayedTransport] = {}
        self._closed = self._crowded = False
        self.hello: RelayHelloMsg | None = None
        """Where the relay listens; None: it has not connected."""

    @property
    def address(self) -> str:
        """Address that the relay connects to."""
        return self._end.address

    @property
    def key(self) -> str:
        """The server's public key."""
        return self._end.keys.public

    async def meet(self, seconds: float) -> None:
        """Wait until the relay has connected. Raises Unavailable, and OtherVersion."""
        self.send(WelcomeRelayMsg())
        try:
            async with asyncio.timeout(seconds):
                while self.hello is None and not self._socket.lost:
                    if not self._socket.has_message:
                        await self._socket.change()
                    if self._socket.has_message:
                        self._handle(self._socket.take())
        except TimeoutError:
            pass
        except MalformedMessage as error:
            raise OtherVersion(f"it cannot be understood: {error}") from None
        if self.hello is None:
            raise Unavailable(f"it did not connect within {seconds:g} s")
        if self.hello.version != __version__:
            raise OtherVersion(f"it has ballast {self.hello.version}, not {__version__}")

    async def run(self) -> None:
        """Carry clients' bytes until the connection is lost; their connections are lost with it.
        Raises Unavailable if its messages cannot be understood."""
        try:
            while not self._socket.lost:
                for _ in range(TURN_MESSAGES):
                    if not self._socket.has_message:
                        break
                    self._handle(self._socket.take())
                if self._socket.has_message:
                    await asyncio.sleep(0)
                elif not self._socket.lost:
                    await self._socket.change()
        except BallastError as error:
            raise Unavailable(f"it cannot be understood: {error}") from None

    def close(self) -> None:
        """Close the connection; clients that are still connected are lost."""
        self._closed = True
        self._socket.close()
        for client in list(self._clients.values()):
            client.lose()

    def send(self, message: ToRelay) -> None:
        """Queue a message; lost once the connection is closed."""
        if not self._closed:
            self._socket.send(message)

    def forget(self, id: int) -> None:
        """Take nothing more of a client."""
        self._clients.pop(id, None)

    def _handle(self, message: FromRelay) -> None:
        if isinstance(message, RelayHelloMsg):
            self.hello = message
            return
        if isinstance(message, ClientCameMsg):
            assert self.hello is not None
            if len(self._clients) >= self.hello.most_clients:
                if not self._crowded:
                    log.warning("the relay at %s has no files for more clients", self.hello.host)
                self._crowded = True
                self.send(CloseClientMsg(message.id, at_once=True))
                return
            here, peer = (self.hello.host, self.hello.port), (message.host, message.port)
            came = self._clients[message.id] = RelayedTransport(self, message.id, peer, here)
            came.begin(self._accept())
            return
        if (client := self._clients.get(message.id)) is None:
            return  # it was aborted here
        match message:
            case ClientBytesMsg():
                client.receive(message.data)
            case BytesTakenMsg():
                client.taken(message.count)
            case ClientLeftMsg():
                client.lose()


class RelayedTransport(asyncio.Transport):
    """The transport of a client whose socket is a relay's."""

    def __init__(
        self, relay: RelayConnection, id: int, peer: tuple[str, int], here: tuple[str, int]
    ) -> None:
        super().__init__({"peername": peer, "sockname": here})
        self._relay, self._id = relay, id
        self._protocol: asyncio.Protocol | None = None
        self._closing = self._lost = False
        self._unsent = 0
        """Bytes written that the relay has not passed on."""
        self._full = self._paused = False
        self._received: list[bytes] = []
        """What came while reading was paused."""

    def begin(self, protocol: asyncio.Protocol) -> None:
        """Give the connection to its protocol."""
        self._protocol = protocol
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        """Give the protocol what the client has sent, unless it has paused."""
        self._received.append(data)
        self._deliver()

    def taken(self, count: int) -> None:
        """Note that the relay has passed bytes on."""
        self._unsent -= count
        if self._full and self._unsent <= WINDOW_BYTES // 4 and self._protocol is not None:
            self._full = False
            self._protocol.resume_writing()

    def lose(self) -> None:
        """End the connection: the client's is closed."""
        self._closing = True
        self._relay.forget(self._id)
        if not self._lost and self._protocol is not None:
            self._lost = True
            self._protocol.connection_lost(None)

    def _deliver(self) -> None:
        while self._received and not self._paused:
            data = self._received.pop(0)
            self._relay.send(BytesTakenMsg(self._id, len(data)))
            if not self._closing and self._protocol is not None:
                try:
                    self._protocol.data_received(data)
                except Exception:
                    log.exception("a client's connection is closed")
                    self.abort()

    # -- asyncio.Transport ------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Close the client's connection once it has what was written."""
        if not self._closing:
            self._closing = True
            self._relay.send(CloseClientMsg(self._id, at_once=False))

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._relay.send(CloseClientMsg(self._id, at_once=True))
            self._relay.forget(self._id)
            asyncio.get_running_loop().call_soon(self.lose)

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._deliver)

    def write(self, data: Any) -> None:
        if self._closing:
            return
        for at in range(0, len(data), PIECE_BYTES):
            self._relay.send(ClientBytesMsg(self._id, bytes(data[at : at + PIECE_BYTES])))
        self._unsent += len(data)
        if self._unsent > WINDOW_BYTES and not self._full and self._protocol is not None:
            self._full = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return WINDOW_BYTES // 4, WINDOW_BYTES

    def can_write_eof(self) -> bool:
        return False
