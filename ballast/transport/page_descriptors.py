"""Send file descriptors of a device's memory to another worker, so that it can map lent pages.

Used by `LendingPeers` on both ends, and to read KV for migrations. Messages pass through the
server, which cannot carry descriptors, so these go from worker to worker over a Unix socket that
serves only this user (`PagesSocket`): a CPU's once per pair of processes (`fetch_pages`), those of
a GPU's pages with each lease (`fetch_lease`). The socket's address is abstract, so that no file is
left behind. Descriptors are sent by SCM_RIGHTS: `pidfd_getfd` needs the permission to trace, which
many systems deny between two children of one parent, and /proc/PID/fd may find another process that
has reused the number.

::

    borrower ──── request: [] (a CPU) or [borrower, epoch, lease] ─────> lender
             <─ descriptors: all of a CPU; the first ones of a lease ───
             ────────── lease: these are imported ─────────────────────>
             <───────── lease: the next descriptors ─ ...
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
"""Time for the other end of a connection to send or receive."""
PAGES_AT_ONCE = 32
"""Bound of the descriptors of a lease that each side has open at a time."""
_LONGEST_REQUEST = 4096

Export = Callable[[tuple[int, ...]], Exported]
"""Function from pages to their descriptors. Raises DeviceError."""
Offered = Callable[[str, int, int], tuple[int, ...]]
"""Function from (borrower, epoch, lease id) to the pages of that lease; empty: no such lease."""


class PagesSocket:
    """Listening socket at which other processes request a lender's pages."""

    def __init__(self) -> None:
        """Listen at a new address. Raises DeviceError."""
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
        """Return the descriptor, which is readable while connections wait."""
        return self._socket.fileno()

    def accept(self) -> Iterator[socket.socket]:
        """Yield the waiting connections, each for `serve_pages` on a thread of its own."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            connection.settimeout(PATIENCE_SECONDS)
            yield connection

    def close(self) -> None:
        self._socket.close()


def serve_pages(connection: socket.socket, export: Export, offered: Offered) -> bool:
    """Send the requested descriptors and close the connection; return whether all arrived."""
    with connection:
        try:
            if not same_user(connection):
                return False
            wanted = _receive_request(connection)
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
            return False  # a lease may have ended meanwhile, and its pages have no memory any more


def fetch_pages(address: str) -> Exported:
    """Fetch descriptors of the memory of the device whose process serves `address`.

    Each step blocks for PATIENCE_SECONDS at most. Raises DeviceError; callers retry, since the
    lender may be in a long job.
    """
    with _request_pages(address, []) as connection:
        return receive_pages(connection)


def fetch_lease(address: str, lease: Lease, use: Callable[[Exported], None]) -> None:
    """Fetch the pages of a GPU's lease, in order, and call `use` with each part of them.

    `use` closes the descriptors, unless it raises. Raises DeviceError as `fetch_pages`, and the
    errors of `use`; some parts may have been used by then.
    """
    with _request_pages(address, [lease.borrower, lease.epoch, lease.id]) as connection:
        got = 0
        while got < len(lease.pages):
            exported = receive_pages(connection)
            if not exported.pages or exported.pages != lease.pages[got:][: len(exported.pages)]:
                exported.close()
                raise DeviceError("recvmsg", f"these are not the pages of lease {lease.id}")
            try:
                use(exported)
            except BaseException:
                exported.close()
                raise
            got += len(exported.pages)
            try:
                connection.sendall(b"+")
            except OSError as error:
                if got < len(lease.pages):
                    raise DeviceError("sendmsg", str(error)) from error


def _request_pages(address: str, wanted: list[object]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(f"\0{address}")
        if not same_user(connection):
            raise DeviceError("connect", "another user serves that address")
        connection.sendall(json.dumps(wanted).encode() + b"\n")
    except OSError as error:
        connection.close()
        raise DeviceError("connect", str(error)) from error
    except DeviceError:
        connection.close()
        raise
    return connection


def _receive_request(connection: socket.socket) -> tuple[str, int, int] | None:
    """Return (borrower, epoch, lease); None: the whole device is requested. Raises OSError and
    DeviceError."""
    request = b""
    while not request.endswith(b"\n") and len(request) < _LONGEST_REQUEST:
        part = connection.recv(_LONGEST_REQUEST)
        if not part:
            break
        request += part
    try:
        fields = json.loads(request)
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


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end runs as this user: a memfd gives write access to the device."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
