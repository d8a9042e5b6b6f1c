"""Pages to another process: the device's file descriptor over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Sequence

from ballast.core.errors import DeviceError
from ballast.memory.vm import Exported

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 20


def send_pages(connection: socket.socket, exported: Exported) -> None:
    """Send a description of the pages and the right to map them over a connected Unix socket.

    Whoever receives can map *every* page of the device: send to workers of the same user only.
    """
    if exported.fd is None:
        raise DeviceError("send_pages", "these pages come from a vm without memory")
    told = json.dumps(
        {
            "device": exported.device,
            "page_bytes": exported.page_bytes,
            "n_pages": exported.n_pages,
            "pages": exported.pages,
        }
    ).encode()
    try:
        # The descriptor travels with the length: a stream gives it with the first of these bytes.
        socket.send_fds(connection, [_LENGTH.pack(len(told))], [exported.fd])
        connection.sendall(told)
    except OSError as error:
        raise DeviceError("sendmsg", error.strerror or str(error)) from error


def receive_pages(connection: socket.socket) -> Exported:
    """The other end of `send_pages`. The descriptor is the caller's: give it to `Vm.attach`."""
    fds: list[int] = []
    try:
        head, fds = receive(connection, _LENGTH.size)
        head += _read(connection, _LENGTH.size - len(head))
        (size,) = _LENGTH.unpack(head)
        if len(fds) != 1 or size > _MOST_BYTES:
            raise DeviceError("recvmsg", "this is not a description of pages")
        return _decode(_read(connection, size), fds[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _close(fds)
        raise DeviceError("recvmsg", str(error)) from error
    except DeviceError:
        _close(fds)
        raise


def receive(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Up to `most` bytes, and the descriptor that came with them, if one did: no child process
    inherits it. Raises OSError.
    """
    # `socket.recv_fds` ignores its flags.
    told, ancillary, _, _ = connection.recvmsg(
        most, socket.CMSG_LEN(array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in array("i", data)
    ]
    return told, fds


def _decode(told: bytes, fd: int) -> Exported:
    fields = json.loads(told)
    n_pages, pages = int(fields["n_pages"]), tuple(int(page) for page in fields["pages"])
    if pages and not 0 <= min(pages) <= max(pages) < n_pages:
        raise ValueError("pages outside the device")
    number, inode = fields["device"]
    return Exported((int(number), int(inode)), int(fields["page_bytes"]), n_pages, pages, fd)


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    parts: list[bytes] = []
    while n_bytes > 0:
        part = connection.recv(min(n_bytes, 1 << 20))
        if not part:
            raise ValueError("the connection ended early")
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
