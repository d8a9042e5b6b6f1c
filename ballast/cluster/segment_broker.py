"""Share host-memory segments of weights between the workers of a host, each distinct one once.

::

    worker ── origin of a segment ─> broker ── unknown, or: its digest and memfd ──────────> worker
    worker ── digest and memfd ────> broker ── keep yours, or: memfd of an equal segment ──> worker

`SegmentBroker` runs in the server's process, `SegmentClient` in each worker, for its host tier. The
broker maps no segment: it keeps a descriptor of each while a worker holds it. Segments are sealed,
so that no worker can change weights that others compute with; if some device is a GPU, they are
sealed against changes of size only (`HostTier.writable`). Workers query the broker for which of the
two applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass, field

from ballast.memory.share import receive

log = logging.getLogger(__name__)

_FIND, _SHARE, _RELEASE = b"f", b"s", b"r"
_SEALS = b"w"
"""Request: are segments writable once they are filled?"""
_KEEP, _TAKE = b"k", b"t"
_SEALED, _WRITABLE = b"s", b"w"
_DIGEST = 64
"""Characters of a digest in hex, and of an origin."""
_LONGEST = 256
"""Bound of a message, bytes."""


@dataclass(slots=True)
class _Held:
    fd: int
    holders: set[socket.socket] = field(default_factory=set)


class SegmentBroker:
    """Tracks which worker holds which segment, with a descriptor of each, on the event loop."""

    def __init__(self, writable: bool = False) -> None:
        """`writable`: whether workers leave segments writable, as `HostTier.writable`."""
        self._writable = writable
        self._held: dict[str, _Held] = {}
        self._digests: dict[str, str] = {}
        """Digest of each held segment, by origin."""

    def __len__(self) -> int:
        """Return the number of distinct segments that workers hold."""
        return len(self._held)

    def open(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection: the broker's, for `close`, and a worker's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours, theirs

    def close(self, connection: socket.socket) -> None:
        """Release all segments of a worker that has ended; a second call does nothing."""
        if connection.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        for digest in [d for d, held in self._held.items() if connection in held.holders]:
            self._release(digest, connection)

    def _read(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            message, fds = receive(connection, _LONGEST)
            kind, digest = message[:1], message[1 : 1 + _DIGEST].decode()
            origin = message[1 + _DIGEST :].decode()
            if not message:
                self.close(connection)
            elif kind == _SEALS:
                connection.send(_WRITABLE if self._writable else _SEALED)
            elif kind == _FIND:
                self._find(digest, connection)
            elif kind == _SHARE and fds:
                self._share(digest, connection, fds)
                if origin:
                    self._digests[origin] = digest
            else:
                self._release(digest, connection)
        except BlockingIOError:
            pass
        except OSError as error:
            log.warning("a worker's segments are not shared any more: %s", error)
            self.close(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _find(self, origin: str, connection: socket.socket) -> None:
        digest = self._digests.get(origin)
        if digest is None:
            connection.send(_KEEP)
        else:
            self._held[digest].holders.add(connection)
            socket.send_fds(connection, [_TAKE + digest.encode()], [self._held[digest].fd])

    def _share(self, digest: str, connection: socket.socket, fds: list[int]) -> None:
        held = self._held.get(digest)
        if held is None:
            held = self._held[digest] = _Held(fds.pop())
            held.holders.add(connection)
            connection.send(_KEEP)
        else:
            held.holders.add(connection)
            socket.send_fds(connection, [_TAKE], [held.fd])

    def _release(self, digest: str, connection: socket.socket) -> None:
        held = self._held.get(digest)
        if held is None:
            return
        held.holders.discard(connection)
        if not held.holders:
            os.close(held.fd)
            del self._held[digest]
            self._digests = {o: d for o, d in self._digests.items() if d != digest}


class SegmentClient:
    """A worker's end, an `Exchange` for its host tier; used by one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Own `fd`, the worker's end of the connection, from now on."""
        self._connection = socket.socket(fileno=fd)

    @property
    def writable(self) -> bool:
        """Whether segments are writable, the same for all workers; False if the broker is gone."""
        answer = b""
        with contextlib.suppress(OSError):
            self._connection.send(_SEALS)
            answer, _ = receive(self._connection, _LONGEST)
        return answer == _WRITABLE

    def find(self, origin: str) -> tuple[str, int] | None:
        """Return the digest of a segment with this origin, and a descriptor, which the caller owns.

        None if no other process holds one, or the broker is gone.
        """
        message, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            self._connection.send(_FIND + origin.encode())
            message, fds = receive(self._connection, _LONGEST)
        return (message[1:].decode(), fds[0]) if fds else None

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        """Offer the segment in `fd`, made of `origin`, to other workers.

        Returns a descriptor, which the caller owns, of an equal segment that another worker holds
        already; None if there is none, or the broker is gone.
        """
        fds: list[int] = []
        with contextlib.suppress(OSError):
            message = _SHARE + digest.encode() + (origin or "").encode()
            socket.send_fds(self._connection, [message], [fd])
            _, fds = receive(self._connection, _LONGEST)
        return fds[0] if fds else None

    def release(self, digest: str) -> None:
        """Report to the broker that this process does not hold the segment any more."""
        with contextlib.suppress(OSError):
            self._connection.send(_RELEASE + digest.encode())

    def close(self) -> None:
        """Close the connection, upon which the broker releases all segments of this worker."""
        self._connection.close()
