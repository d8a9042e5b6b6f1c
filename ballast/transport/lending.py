"""What lender, borrower and supervisor say to each other, and how the memory changes hands.

Messages go the way all others do; whoever passes them on keeps their order. A descriptor cannot go
there, and goes once per pair of processes over a Unix socket in a directory that only this user can
enter (`PagesSocket`, `fetch_pages`). Its right is passed along (SCM_RIGHTS): `pidfd_getfd` needs
the permission to trace, which many systems deny between two children of one parent, and
/proc/PID/fd finds whoever has that number now.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import msgspec

from ballast.core.errors import DeviceError
from ballast.core.lease import Lease
from ballast.memory.share import receive_pages, send_pages
from ballast.memory.vm import Exported
from ballast.transport.messages import MalformedMessage


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    lease: Lease


class Lent(_Message, frozen=True):
    """Lender to borrower: these pages are yours to use."""


class AskedBack(_Message, frozen=True):
    """Lender to borrower: these are to be returned."""


class Returned(_Message, frozen=True):
    """Borrower to lender: these are unmapped."""


LendingMessage = Lent | AskedBack | Returned
"""Of one epoch; whoever receives one of another does nothing, and says so."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LendingMessage] = msgspec.msgpack.Decoder(LendingMessage)

SOCKET = "pages.sock"
PATIENCE_SECONDS = 2.0
"""For the other end of a connection."""


def encode(message: LendingMessage) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes) -> LendingMessage:
    """Raises MalformedMessage where `data` is no such message."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"malformed message: {error}") from error


class PagesSocket:
    """Where a lender's process is asked for its device; on its own thread, when `fileno` is
    readable."""

    def __init__(self, directory: Path) -> None:
        """`directory` is entered by this user only. Raises DeviceError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(directory / SOCKET))
            self._socket.listen()
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise DeviceError("bind", str(error)) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def serve(self, exported: Exported) -> int:
        """Give the device to all who wait; how many got it. Whoever hangs up gets nothing."""
        served = 0
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return served
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                try:
                    if _same_user(connection):
                        send_pages(connection, exported)
                        served += 1
                except DeviceError:
                    continue

    def close(self) -> None:
        self._socket.close()


def fetch_pages(directory: Path) -> Exported:
    """The device of the process that serves `directory`: for `Borrower.meet`. Raises DeviceError.

    Waits until it is served, PATIENCE_SECONDS at most: on a thread of its own where the caller has
    jobs to run meanwhile. A lender that is amid a long job may have to be asked again.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        try:
            connection.connect(str(directory / SOCKET))
        except OSError as error:
            raise DeviceError("connect", str(error)) from error
        return receive_pages(connection)


def _same_user(connection: socket.socket) -> bool:
    """Whoever gets the memfd can write on every page of the device."""
    size = struct.calcsize("3i")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.getuid())
