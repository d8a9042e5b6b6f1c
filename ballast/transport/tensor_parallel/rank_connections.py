"""Send and receive messages between the first rank of a tensor-parallel group and another rank.

Used by `RemoteRank`, `RemoteVm` and `GroupStream` in the first rank, by `rank_process` in the
others. Unix sockets; each message follows its length (4 bytes, big-endian). Ranks exchange tensors
elsewhere: by `kernels.meeting`, gloo or NCCL.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgspec

from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.transport.decoding import decode
from ballast.transport.tensor_parallel.rank_messages import (
    RankEvent,
    RankReply,
    RefusedReply,
    ToRank,
)

FromRank = RankReply | RankEvent

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_LENGTH = struct.Struct("!I")
_DESCRIPTOR = b"f"
"""Payload byte of a message that carries a descriptor."""


class RankGone(BallastError):
    """The process at the other end has ended, or the connection was closed."""


class RankConnection:
    """The first rank's end of a connection. `call` is safe to use from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calling = threading.Lock()

    def call(self, message: ToRank) -> FromRank:
        """Send a command and return the reply. Raises the other end's error, and RankGone."""
        with self._calling:
            self.send(message)
            return self.receive()

    def send(self, message: ToRank) -> None:
        """Send a command; the caller must `receive` its reply before another command is sent."""
        _send(self._connection, _encoder.encode(message))

    def receive(self) -> FromRank:
        """Return the next reply or event. Raises as `call`."""
        message = decode(_from_rank, _receive(self._connection), "message of a rank")
        if isinstance(message, RefusedReply):
            if message.call is None:
                raise BrokenPromise(message.reason)
            raise DeviceError(message.call, message.reason)
        return message

    def send_descriptor(self, fd: int) -> None:
        """Send a descriptor to `receive_descriptor`; the caller keeps `fd`, which stays open."""
        try:
            socket.send_fds(self._connection, [_DESCRIPTOR], [fd])
        except OSError as error:
            raise RankGone(error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the connection; threads that wait at either end get RankGone."""
        _close(self._connection)


class LeaderConnection:
    """A further rank's end of a connection to the first rank."""

    def __init__(self, fd: int) -> None:
        """Take ownership of `fd`."""
        self._connection = socket.socket(fileno=fd)
        self._sending = threading.Lock()

    def receive(self) -> ToRank:
        """Return the next command. Raises RankGone where the first rank has ended."""
        return decode(_to_rank, _receive(self._connection), "message to a rank")

    def receive_descriptor(self) -> int:
        """Return a descriptor, which the caller owns."""
        _, fds, _, _ = socket.recv_fds(self._connection, len(_DESCRIPTOR), 1)
        if len(fds) != 1:
            raise RankGone("it gave no descriptor")
        return fds[0]

    def send(self, message: FromRank) -> None:
        """Send a reply or an event, from any thread."""
        with self._sending:
            _send(self._connection, _encoder.encode(message))


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise RankGone(error.strerror or str(error)) from error


def _receive(connection: socket.socket) -> bytes:
    try:
        (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        return _exactly(connection, size)
    except OSError as error:
        raise RankGone(error.strerror or str(error)) from error


def _exactly(connection: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            raise RankGone("it has closed its connection")
        data += more
    return bytes(data)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
