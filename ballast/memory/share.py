"""Send pages to another process, and receive them, as file descriptors over a Unix socket.

Used by workers that lend pages or share host segments. Sends descriptors only; bytes are not
copied.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from ballast.core.errors import DeviceError
from ballast.memory.vm import Exported

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 20
_MOST_FDS = 128
"""Most descriptors in one message; Linux allows 253."""


def send_pages(connection: socket.socket, exported: Exported) -> None:
    """Send a description of the pages, and the descriptors to map them by, over a Unix socket.

    The receiver can map *every* page of the device (of a GPU: those exported): send to workers of
    the same user only. Descriptors stay the sender's.
    """
    fds = exported.page_fds if exported.fd is None else (exported.fd,)
    if fds is None:
        raise DeviceError("send_pages", "these pages come from a vm without memory")
    payload = json.dumps(
        {
            "device": exported.device,
            "page_bytes": exported.page_bytes,
            "n_pages": exported.n_pages,
            "pages": exported.pages,
            "fds": len(fds),
            "by_page": exported.page_fds is not None,
        }
    ).encode()
    try:
        # The descriptor travels with the length: a stream gives it with the first of these bytes.
        socket.send_fds(connection, [_LENGTH.pack(len(payload))], list(fds[:1]))
        connection.sendall(payload)
        for start in range(1, len(fds), _MOST_FDS):
            socket.send_fds(connection, [b"+"], list(fds[start : start + _MOST_FDS]))
    except OSError as error:
        raise DeviceError("sendmsg", error.strerror or str(error)) from error


def receive_pages(connection: socket.socket) -> Exported:
    """Receive what `send_pages` sent. The descriptor is the caller's, for `Vm.attach`."""
    fds: list[int] = []
    try:
        head, fds = receive(connection, _LENGTH.size)
        head += _read(connection, _LENGTH.size - len(head))
        (size,) = _LENGTH.unpack(head)
        if size > _MOST_BYTES:
            raise ValueError(f"{size} bytes of it")
        fields = json.loads(_read(connection, size))
        while len(fds) < int(fields["fds"]):
            more = receive(connection, 1, _MOST_FDS)[1]
            if not more:
                raise ValueError(f"{len(fds)} descriptors came")
            fds += more
        return _decode(fields, fds)
    except OSError as error:
        _close(fds)
        raise DeviceError("recvmsg", str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        _close(fds)
        raise DeviceError("recvmsg", f"this is not a description of pages: {error}") from error
    except DeviceError:
        _close(fds)
        raise


def receive(connection: socket.socket, most: int, fds: int = 1) -> tuple[bytes, list[int]]:
    """Receive up to `most` bytes, and the descriptors, up to `fds`, that came with them, if any.

    Child processes do not inherit the descriptors. Raises OSError.
    """
    # `socket.recv_fds` ignores its flags.
    data, ancillary, _, _ = connection.recvmsg(
        most, socket.CMSG_LEN(fds * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    found = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in array("i", data)
    ]
    return data, found


def _decode(fields: dict[str, Any], fds: list[int]) -> Exported:
    n_pages, pages = int(fields["n_pages"]), tuple(int(page) for page in fields["pages"])
    if pages and not 0 <= min(pages) <= max(pages) < n_pages:
        raise ValueError("pages outside the device")
    number, inode = fields["device"]
    device, page_bytes = (int(number), int(inode)), int(fields["page_bytes"])
    if len(fds) != fields["fds"] or len(fds) != (len(pages) if fields["by_page"] else 1):
        raise ValueError(f"{len(fds)} descriptors for {len(pages)} pages")
    if not fields["by_page"]:
        return Exported(device, page_bytes, n_pages, pages, fds[0])
    return Exported(device, page_bytes, n_pages, pages, None, tuple(fds))


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
