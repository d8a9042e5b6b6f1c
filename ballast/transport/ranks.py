"""What the first rank of a tensor-parallel group and the others say to each other.

Over Unix sockets, each message after its length, schema-checked on receipt, never pickled. On a
connection the first rank asks and the other answers, one by one, in order; `Landed` and `Quiet`
alone are told unasked, on a connection of their own. Addresses are those of the rank that is spoken
to.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgspec

from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.core.event import TransferDone
from ballast.core.job import SequenceWork
from ballast.core.link import LinkRates
from ballast.core.rotation import Rotation
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.transport.messages import MalformedMessage


class RankGone(BallastError):
    """The process at the other end has ended, or its connection has."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- to a rank ----------------------------------------------------------------------------------


class JoinGroup(_Message, frozen=True):
    """First message: what the rank has; `device` is its own."""

    rank: int
    device: DeviceSettings
    pace: LinkRates | None


class Meet(_Message, frozen=True):
    """Second message: the file at which the group meets; None: it meets in shared memory, whose
    descriptor follows. Answered when it has met."""

    meeting: str | None


class Reserve(_Message, frozen=True):
    n_bytes: int


class Release(_Message, frozen=True):
    base: int


class Map(_Message, frozen=True):
    base: int
    at: int
    pages: list[int]
    alias: bool
    prefault: bool


class Unmap(_Message, frozen=True):
    base: int
    at: int
    n: int


class Populate(_Message, frozen=True):
    pages: list[int]


class Discard(_Message, frozen=True):
    pages: list[int]


class Look(_Message, frozen=True):
    """Which pages are mapped in a range, and how many mappings the process has."""

    base: int | None


class CopyNow(_Message, frozen=True):
    """From one place of the rank's memory to another."""

    dst: int
    src: int
    n_bytes: int


class Carry(_Message, frozen=True):
    """Begin a transfer to the device: (target, source, bytes) of each copy."""

    transfer_id: int
    copies: list[tuple[int, int, int]]
    stream: str


class Load(_Message, frozen=True):
    """The rank's part of a checkpoint, with so many threads."""

    settings: ModelSettings
    threads: int


class Unload(_Message, frozen=True):
    model: str


class Serve(_Message, frozen=True):
    """A model that was loaded: where its segments are while it is resident, and its KV cache."""

    model: str
    segments: tuple[int, ...]
    kv_base: int


class Allow(_Message, frozen=True):
    """Bytes of activations that the rank may have between jobs, from the next job on."""

    n_bytes: int


class Compute(_Message, frozen=True):
    """The rank's part of a job."""

    model: str
    work: tuple[SequenceWork, ...]
    head: bool


class Turn(_Message, frozen=True):
    """As `weights.rotor.Rotor.turn`; pages are mapped."""

    model: str
    rotation: Rotation
    held: tuple[int, ...]
    missing: tuple[int, ...]


class Settle(_Message, frozen=True):
    """As `weights.rotor.Rotor.settle`; told as `Quiet`."""

    model: str


class Forget(_Message, frozen=True):
    """As `weights.rotor.Rotor.forget`."""

    model: str


ToRank = (
    JoinGroup
    | Meet
    | Reserve
    | Release
    | Map
    | Unmap
    | Populate
    | Discard
    | Look
    | CopyNow
    | Carry
    | Load
    | Unload
    | Serve
    | Allow
    | Compute
    | Turn
    | Settle
    | Forget
)

# -- from a rank --------------------------------------------------------------------------------


class Ok(_Message, frozen=True):
    pass


class Reserved(_Message, frozen=True):
    base: int


class Lacking(_Message, frozen=True):
    """Pages for which the machine has no memory."""

    pages: int


class Seen(_Message, frozen=True):
    mapped: dict[int, int]
    mappings: int


class Loaded(_Message, frozen=True):
    """Where each segment is in the rank's host tier."""

    addresses: tuple[int, ...]


class Refused(_Message, frozen=True):
    """It was not done: a system call failed (`call`), or by a promise that was broken (None)."""

    call: str | None
    reason: str


class Landed(_Message, frozen=True):
    """A transfer has ended."""

    done: TransferDone


class Quiet(_Message, frozen=True):
    """No load of a model's layers is on its way; by slot, the layer that is there, or -1."""

    model: str
    held: tuple[int, ...]


FromRank = Ok | Reserved | Lacking | Seen | Loaded | Refused | Landed | Quiet

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_LENGTH = struct.Struct("!I")
_DESCRIPTOR = b"f"
"""Travels with one."""


class RankConnection:
    """The first rank's end of a connection. `ask` is safe to use from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    def ask(self, message: ToRank) -> FromRank:
        """The answer. Raises what the other end met, and RankGone."""
        with self._asking:
            self.tell(message)
            return self.answer()

    def tell(self, message: ToRank) -> None:
        """Ask, for one who will wait for `answer` before anybody asks again."""
        _send(self._connection, _encoder.encode(message))

    def answer(self) -> FromRank:
        """The next message from there."""
        try:
            told = _from_rank.decode(_receive(self._connection))
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"malformed message of a rank: {error}") from error
        if isinstance(told, Refused):
            if told.call is None:
                raise BrokenPromise(told.reason)
            raise DeviceError(told.call, told.reason)
        return told

    def give(self, fd: int) -> None:
        """For `LeaderConnection.take`; it stays the caller's, too."""
        try:
            socket.send_fds(self._connection, [_DESCRIPTOR], [fd])
        except OSError as error:
            raise RankGone(error.strerror or str(error)) from error

    def close(self) -> None:
        """What waits at either end hears of it."""
        _close(self._connection)


class LeaderConnection:
    """Another rank's end."""

    def __init__(self, fd: int) -> None:
        """Takes `fd` over."""
        self._connection = socket.socket(fileno=fd)
        self._saying = threading.Lock()

    def next(self) -> ToRank:
        """What is asked. Raises RankGone where the first rank has ended."""
        try:
            return _to_rank.decode(_receive(self._connection))
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"malformed message to a rank: {error}") from error

    def take(self) -> int:
        """A descriptor, which is the caller's."""
        _, fds, _, _ = socket.recv_fds(self._connection, len(_DESCRIPTOR), 1)
        if len(fds) != 1:
            raise RankGone("it gave no descriptor")
        return fds[0]

    def say(self, message: FromRank) -> None:
        """From any thread."""
        with self._saying:
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
