"""Encrypt and authenticate a connection between two hosts by CURVE, in both directions.

Used by `transport.sockets`. Each connection has keys of its own: the server knows the one public
key that may connect (`CurveServer.client`), the client knows the server's (`CurveLink.server`).
Heartbeats of ZeroMQ, which its own threads send, end a connection whose other end is gone within
`LOST_SECONDS`; a connection that has ended is not made again.
"""

from __future__ import annotations

import contextlib
import os

import msgspec
import zmq
import zmq.utils.z85

from ballast.core.errors import Unavailable
from ballast.transport.connection_watch import ConnectionWatch, fileno

BEAT_SECONDS, LOST_SECONDS = 0.5, 2.5
"""Interval of heartbeats, and the silence after which both ends take the connection for broken."""

HANDSHAKE_SECONDS = 5.0
"""Bound of a handshake; a stranger's connection is closed after it."""
_ZAP = "inproc://zeromq.zap.01"


class CurveKeys(msgspec.Struct, frozen=True):
    """A pair of keys, in Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> CurveKeys:
        """Make a pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"CurveKeys({self.public!r})"  # no log has the secret


class CurveLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client needs for its connection."""

    address: str
    server: str
    """Public key of the server."""
    own: CurveKeys


def pipe_of(keys: CurveLink) -> int:
    """Return a descriptor, which the caller owns, that a child reads `keys` from: neither its
    arguments nor its environment show them."""
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(msgspec.json.encode(keys))
    return reader


def read_keys(fd: int) -> CurveLink:
    """Read the keys of `pipe_of` and close `fd`."""
    with open(fd, "rb") as file:
        return msgspec.json.decode(file.read(), type=CurveLink)


def _set_up(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(BEAT_SECONDS * 1e3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(LOST_SECONDS * 1e3))
    socket.setsockopt(zmq.HEARTBEAT_TTL, round(LOST_SECONDS * 1e3))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_SECONDS * 1e3))
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


class CurveServer:
    """Endpoint that one client may connect to."""

    def __init__(
        self, ip: str, client: str, keys: CurveKeys | None = None, *, longest: int = -1
    ) -> None:
        """`ip`: address of this host that it listens at. `client`: public key of the client.
        `longest`: bytes of a message, encrypted, beyond which the connection ends before it is
        received; -1: any."""
        self._ip, self._client, self._longest = ip, client, longest
        self.keys = CurveKeys.new() if keys is None else keys
        self.address = ""
        """Address for the client, once attached."""
        self._zap: zmq.Socket[bytes] | None = None
        self._watch: ConnectionWatch | None = None

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        """Listen. Raises Unavailable where that is not possible."""
        self._zap = socket.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)  # before the socket is bound: else anybody may connect
        _set_up(socket, self.keys)
        socket.setsockopt(zmq.MAXMSGSIZE, self._longest)
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, b"ballast")
        self._watch = ConnectionWatch(socket)
        literal = f"[{self._ip}]" if ":" in self._ip else self._ip
        socket.setsockopt(zmq.IPV6, int(":" in self._ip))
        try:
            socket.bind(f"tcp://{literal}:*")
        except zmq.ZMQError as error:
            raise Unavailable(f"nothing can listen at {self._ip}: {error}") from None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def lost(self) -> bool:
        """Answer who may connect; return whether the client's connection has ended."""
        assert self._zap is not None
        assert self._watch is not None
        with contextlib.suppress(zmq.Again):
            while True:
                self._zap.send_multipart(self._judged(self._zap.recv_multipart(zmq.DONTWAIT)))
        return self._watch.read(connects=False)

    def connected(self) -> bool:
        return self._watch is not None and self._watch.connected

    def _judged(self, request: list[bytes]) -> list[bytes]:
        """Answer a request of ZAP 1.0 (RFC 27): version, id, domain, address, identity, mechanism,
        key."""
        known = len(request) == 7 and request[5] == b"CURVE"
        known = known and zmq.utils.z85.encode(request[6]) == self._client.encode()
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [b"1.0", request[1], code, text, b"", b""]

    def filenos(self) -> list[int]:
        assert self._zap is not None
        assert self._watch is not None
        return [fileno(self._zap), self._watch.fileno()]

    def close(self) -> None:
        if self._zap is not None and self._watch is not None:
            self._watch.close()
            self._zap.close()


class CurveClient:
    """Endpoint that connects to a `CurveServer`."""

    def __init__(self, keys: CurveLink, *, longest: int = -1) -> None:
        """`longest`: as of `CurveServer`."""
        self._keys, self._longest = keys, longest
        self._watch: ConnectionWatch | None = None

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        """Connect. Raises Unavailable for what is no address."""
        _set_up(socket, self._keys.own)
        socket.setsockopt(zmq.MAXMSGSIZE, self._longest)
        socket.curve_serverkey = self._keys.server.encode()
        self._watch = ConnectionWatch(socket)
        socket.setsockopt(zmq.IPV6, int("[" in self._keys.address))
        try:
            socket.connect(self._keys.address)
        except zmq.ZMQError as error:
            raise Unavailable(f"{self._keys.address!r} cannot be reached: {error}") from None

    def lost(self) -> bool:
        assert self._watch is not None
        return self._watch.read(connects=True)

    def connected(self) -> bool:
        return self._watch is not None and self._watch.connected

    def filenos(self) -> list[int]:
        assert self._watch is not None
        return [self._watch.fileno()]

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
