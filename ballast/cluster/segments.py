"""The host tier of a host: each distinct segment of weights once, however many workers map it.

::

    worker ── what it is made of ──> broker ── unknown, or: its digest, its memfd ──> worker
    worker ── digest, its memfd ──> broker ── keep yours, or: one that is there already ──> worker

The broker, in the server's process, maps nothing: it has a descriptor of each segment for as long
as a worker holds it. The files are sealed, so that no worker can change what others compute with;
where some device is a GPU, against a change of size alone (`HostTier.writable`), and all workers
agree on that by asking the broker.
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
"""A worker's question whether segments may be written once they are filled."""
_KEEP, _TAKE = b"k", b"t"
_SEALED, _WRITABLE = b"s", b"w"
_DIGEST = 64
"""Characters of a digest, in hex; of what a segment is made of as many."""
_LONGEST = 256
"""Bytes of a message."""


@dataclass(slots=True)
class _Held:
    fd: int
    holders: set[socket.socket] = field(default_factory=set)


class SegmentBroker:
    """Knows which worker holds which segment; on the running event loop."""

    def __init__(self, writable: bool = False) -> None:
        """`writable`: of all segments that these workers share, as `HostTier.writable`."""
        self._writable = writable
        self._held: dict[str, _Held] = {}
        self._digests: dict[str, str] = {}
        """By what segments that are held were made of."""

    def __len__(self) -> int:
        """Distinct segments that workers hold."""
        return len(self._held)

    def open(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection: the broker's, to be given to `close`, and a worker's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours, theirs

    def close(self, connection: socket.socket) -> None:
        """The worker is gone, and what it held with it; a second call does nothing."""
        if connection.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        for digest in [d for d, held in self._held.items() if connection in held.holders]:
            self._release(digest, connection)

    def _read(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            told, fds = receive(connection, _LONGEST)
            digest, origin = told[1 : 1 + _DIGEST].decode(), told[1 + _DIGEST :].decode()
            if not told:
                self.close(connection)
            elif told[:1] == _SEALS:
                connection.send(_WRITABLE if self._writable else _SEALED)
            elif told[:1] == _FIND:
                self._find(digest, connection)
            elif told[:1] == _SHARE and fds:
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
    """A worker's end: an `Exchange` of its host tier, used by one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Takes `fd` over, of the connection."""
        self._connection = socket.socket(fileno=fd)

    @property
    def writable(self) -> bool:
        """Whether segments are to be writable, the same for all workers of the broker. False where
        the broker is gone."""
        answer = b""
        with contextlib.suppress(OSError):
            self._connection.send(_SEALS)
            answer, _ = receive(self._connection, _LONGEST)
        return answer == _WRITABLE

    def find(self, origin: str) -> tuple[str, int] | None:
        """The digest of a segment that was made of this, and a descriptor, which is the caller's,
        where another process holds it. None as well if nobody is there to ask."""
        told, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            self._connection.send(_FIND + origin.encode())
            told, fds = receive(self._connection, _LONGEST)
        return (told[1:].decode(), fds[0]) if fds else None

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        """Let others map the segment in `fd`, made of `origin`; where one of them has an equal one
        already, a descriptor of that, which is the caller's. None as well if nobody is there to
        ask."""
        fds: list[int] = []
        with contextlib.suppress(OSError):
            message = _SHARE + digest.encode() + (origin or "").encode()
            socket.send_fds(self._connection, [message], [fd])
            _, fds = receive(self._connection, _LONGEST)
        return fds[0] if fds else None

    def release(self, digest: str) -> None:
        """This process does not hold the segment any more."""
        with contextlib.suppress(OSError):
            self._connection.send(_RELEASE + digest.encode())

    def close(self) -> None:
        """Hold nothing any more, as far as others know."""
        self._connection.close()
