"""How the right to map a device's memory gets from its process to another.

Messages go the way all others do; a descriptor cannot go there, and goes once per pair of processes
over a Unix socket that only this user is served at (`PagesSocket`, `fetch_pages`). Its address is
abstract: there is no file to be left behind. The right is passed along (SCM_RIGHTS): `pidfd_getfd`
needs the permission to trace, which many systems deny between two children of one parent, and
/proc/PID/fd finds whoever has that number now.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from ballast.core.errors import DeviceError
from ballast.memory.share import receive_pages, send_pages
from ballast.memory.vm import Exported

PATIENCE_SECONDS = 2.0
"""For the other end of a connection."""


class PagesSocket:
    """Where a lender's process is asked for its device; on its own thread, when `fileno` is
    readable."""

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


def fetch_pages(address: str) -> Exported:
    """The device of the process that serves `address`: for `Borrower.meet`. Raises DeviceError.

    Waits until it is served, PATIENCE_SECONDS at most: on a thread of its own where the caller has
    jobs to run meanwhile. A lender that is amid a long job may have to be asked again.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        try:
            connection.connect(f"\0{address}")
        except OSError as error:
            raise DeviceError("connect", str(error)) from error
        if not _same_user(connection):
            raise DeviceError("connect", "another user serves that address")
        return receive_pages(connection)


def _same_user(connection: socket.socket) -> bool:
    """Whoever gets the memfd can write on every page of the device."""
    size = struct.calcsize("3i")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.getuid())
