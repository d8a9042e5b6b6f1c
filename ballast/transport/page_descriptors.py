"""How the right to map a device's memory gets from its process to another.

Messages go the way all others do; descriptors cannot go there, and go over a Unix socket that only
this user is served at (`PagesSocket`): a CPU's once per pair of processes (`fetch_pages`), those of
a GPU's pages with each lease (`fetch_lease`). Its address is abstract: there is no file to be left
behind. The right is passed along (SCM_RIGHTS): `pidfd_getfd` needs the permission to trace, which
many systems deny between two children of one parent, and /proc/PID/fd finds whoever has that
number now.

::

    borrower ─────── which pages: [] or [borrower, epoch, lease] ──────> lender
             <─ all of a CPU; of a lease the first, with descriptors ───
             ─────────── of a lease: these are imported ───────────────>
             <──────────────────── the next ─ ...
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.lease import Lease
from ballast.memory.share import receive_pages, send_pages
from ballast.memory.vm import Exported

PATIENCE_SECONDS = 2.0
"""For the other end of a connection."""
PAGES_AT_ONCE = 32
"""Of a lease: so many descriptors each side has open at most, whatever is lent."""
_LONGEST_REQUEST = 4096

Export = Callable[[tuple[int, ...]], Exported]
"""Of these pages. Raises DeviceError."""
Offered = Callable[[str, int, int], tuple[int, ...]]
"""The pages of borrower, epoch and lease; none where there is no such lease."""


class PagesSocket:
    """Where a lender's process is asked for its pages, when `fileno` is readable."""

    def __init__(self) -> None:
        """Raises DeviceError."""
        self.address = f"ballast-pages-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.address}")
            self._socket.listen()
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise DeviceError("bind", str(error)) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Iterator[socket.socket]:
        """All who wait, each to be given to `serve`, on a thread of its own: they may be slow."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            connection.settimeout(PATIENCE_SECONDS)
            yield connection

    def close(self) -> None:
        self._socket.close()


def serve(connection: socket.socket, export: Export, offered: Offered) -> bool:
    """Give what is asked for, and close the connection. Whether all of it was taken."""
    with connection:
        try:
            if not _same_user(connection):
                return False
            wanted = _wanted(connection)
            if not wanted:
                _send(connection, export(()))
                return True
            pages = offered(*wanted)
            for start in range(0, len(pages), PAGES_AT_ONCE):
                _send(connection, export(pages[start : start + PAGES_AT_ONCE]))
                if not connection.recv(1):
                    return False
            return bool(pages)
        except (DeviceError, BrokenPromise, OSError):
            return False  # a lease may end meanwhile, and its pages be without memory


def fetch_pages(address: str) -> Exported:
    """The device of the process that serves `address`: for `Borrower.meet`. Raises DeviceError.

    Waits until it is served, PATIENCE_SECONDS at most: on a thread of its own where the caller has
    jobs to run meanwhile. A lender that is amid a long job may have to be asked again.
    """
    with _connected(address, []) as connection:
        return receive_pages(connection)


def fetch_lease(address: str, lease: Lease, take: Callable[[Exported], None]) -> None:
    """Of a GPU, the pages of a lease, in their order: `take` is given each part, and closes its
    descriptors if it returns. Raises DeviceError, as `fetch_pages`, and what `take` raises; then
    it may have been given a part of them.
    """
    with _connected(address, [lease.borrower, lease.epoch, lease.id]) as connection:
        got = 0
        while got < len(lease.pages):
            exported = receive_pages(connection)
            if not exported.pages or exported.pages != lease.pages[got:][: len(exported.pages)]:
                exported.close()
                raise DeviceError("recvmsg", f"these are not the pages of lease {lease.id}")
            try:
                take(exported)
            except BaseException:
                exported.close()
                raise
            got += len(exported.pages)
            try:
                connection.sendall(b"+")
            except OSError as error:
                if got < len(lease.pages):
                    raise DeviceError("sendmsg", str(error)) from error


def _connected(address: str, wanted: list[object]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(f"\0{address}")
        if not _same_user(connection):
            raise DeviceError("connect", "another user serves that address")
        connection.sendall(json.dumps(wanted).encode() + b"\n")
    except OSError as error:
        connection.close()
        raise DeviceError("connect", str(error)) from error
    except DeviceError:
        connection.close()
        raise
    return connection


def _wanted(connection: socket.socket) -> tuple[str, int, int] | None:
    """None: the device. Raises OSError and DeviceError."""
    told = b""
    while not told.endswith(b"\n") and len(told) < _LONGEST_REQUEST:
        part = connection.recv(_LONGEST_REQUEST)
        if not part:
            break
        told += part
    try:
        fields = json.loads(told)
        if not fields:
            return None
        borrower, epoch, lease = fields
        return str(borrower), int(epoch), int(lease)
    except (ValueError, TypeError) as error:
        raise DeviceError("recvmsg", f"this is no request for pages: {error}") from error


def _send(connection: socket.socket, exported: Exported) -> None:
    try:
        send_pages(connection, exported)
    finally:
        exported.close()


def _same_user(connection: socket.socket) -> bool:
    """Whoever gets the memfd can write on every page of the device."""
    size = struct.calcsize("3i")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.getuid())
