"""Copy KV of migrating requests from another worker's pages to addresses of this process.

Used by CPU workers, whose memory is a file: `preadv` copies from the other's pages without mapping
them. From a worker on another host the bytes come through the agents of both (`transport.kv_door`).
Implements the byte side of `ballast.engine.migration`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from ballast.core.errors import DeviceError
from ballast.core.event import Event
from ballast.core.migration import KvReadEvent, Piece, is_elsewhere
from ballast.core.units import MiB
from ballast.memory.vm import Exported

PIECE_BYTES = 4 * MiB
"""Bytes of one read; `stop` waits for at most one."""
Fetch = Callable[[str], Exported]
"""Returns the exported memory of the process at an address; the caller owns the descriptor. Raises
DeviceError."""
FromOtherHost = Callable[[str, int, Callable[[], bool]], Generator[bytearray, None, None]]
"""Yields the bytes, so many in all, that an address on another host stands for, as long as they are
wanted. Raises DeviceError."""


class PeerReader:
    """Implements `ballast.engine.migration.KvBytes`; reads on a thread of its own."""

    def __init__(
        self,
        fetch: Fetch,
        post: Callable[[Event], None],
        from_host: FromOtherHost | None = None,
    ) -> None:
        self._fetch, self._from_host, self._post = fetch, from_host, post
        self._thread = ThreadPoolExecutor(1, "kv-reader")
        self._lock = threading.Lock()
        """Held while bytes are written."""
        self._attempts: dict[str, int] = {}
        """Attempt of the import in progress, by request; an import of another attempt is stale."""

    def start(
        self,
        request_id: str,
        source: str,
        pieces: Sequence[Piece],
        targets: Sequence[tuple[int, int]],
        attempt: int,
    ) -> None:
        with self._lock:
            self._attempts[request_id] = attempt
        self._thread.submit(self._read, request_id, attempt, source, pieces, targets)

    def stop(self, request_id: str) -> None:
        with self._lock:
            self._attempts.pop(request_id, None)

    def load(self, address: int, n_bytes: int) -> bytes:
        return ctypes.string_at(address, n_bytes)

    def store(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        """Stop all reads; nothing is written after this has returned."""
        with self._lock:
            self._attempts.clear()
        self._thread.shutdown(cancel_futures=True)

    def _read(
        self,
        request_id: str,
        attempt: int,
        source: str,
        pieces: Sequence[Piece],
        targets: Sequence[tuple[int, int]],
    ) -> None:
        error = None
        try:
            if is_elsewhere(source):
                come = self._receive(request_id, attempt, source, pieces, targets)
            else:
                come = self._map(request_id, attempt, source, pieces, targets)
            if not come:
                return
        except (DeviceError, OSError) as failed:
            error = str(failed)
        with self._lock:
            if self._attempts.get(request_id) != attempt:
                return
            del self._attempts[request_id]
        self._post(KvReadEvent(request_id, error, attempt))

    def _map(
        self,
        request_id: str,
        attempt: int,
        source: str,
        pieces: Sequence[Piece],
        targets: Sequence[tuple[int, int]],
    ) -> bool:
        """Copy from a process of this host; return False if the import was stopped. Raises OSError,
        DeviceError."""
        exported = self._fetch(source)
        try:
            if exported.fd is None:
                raise DeviceError("pread", "that device's memory is no file")
            return all(
                self._copy(request_id, attempt, exported.fd, offset, address, n_bytes)
                for offset, address, n_bytes in runs(pieces, targets)
            )
        finally:
            exported.discard()

    def _receive(
        self,
        request_id: str,
        attempt: int,
        source: str,
        pieces: Sequence[Piece],
        targets: Sequence[tuple[int, int]],
    ) -> bool:
        """Write what another host sends; return False if the import was stopped. Raises
        DeviceError."""
        if self._from_host is None:
            raise DeviceError("recv", "this device knows no other host")
        n_bytes = sum(n for _, n in pieces)
        # What comes is one piece after the other: as if they were one, from 0.
        left = runs([(0, n_bytes)], targets)
        _, address, room = next(left)
        with closing(
            self._from_host(source, n_bytes, lambda: self._attempts.get(request_id) == attempt)
        ) as chunks:
            for data in chunks:
                done = 0
                while done < len(data):
                    if not room:
                        _, address, room = next(left)
                    n = min(room, len(data) - done)
                    with self._lock:
                        if self._attempts.get(request_id) != attempt:
                            return False
                        ctypes.memmove(address, (ctypes.c_char * n).from_buffer(data, done), n)
                    done, address, room = done + n, address + n, room - n
                    n_bytes -= n
        return not n_bytes

    def _copy(
        self, request_id: str, attempt: int, fd: int, offset: int, address: int, n_bytes: int
    ) -> bool:
        """Copy one piece; return False if the import was stopped. Raises OSError, DeviceError."""
        while n_bytes:
            with self._lock:
                if self._attempts.get(request_id) != attempt:
                    return False
                buffer = (ctypes.c_char * min(n_bytes, PIECE_BYTES)).from_address(address)
                n = os.preadv(fd, [buffer], offset)
            if n <= 0:
                raise DeviceError("pread", f"no memory at {offset}")
            offset, address, n_bytes = offset + n, address + n, n_bytes - n
        return True


def runs(
    pieces: Sequence[Piece], targets: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Return (offset, address, bytes) of stretches that are contiguous on both sides. Raises
    DeviceError where the two are not of one size."""
    if sum(n for _, n in pieces) != sum(n for _, n in targets):
        raise DeviceError("pread", "the two sides are not of one size")
    left = iter(targets)
    address = room = 0
    for piece_offset, piece_bytes in pieces:
        offset, n_bytes = piece_offset, piece_bytes
        while n_bytes:
            if not room:
                address, room = next(left)
            n = min(n_bytes, room)
            yield offset, address, n
            offset, n_bytes = offset + n, n_bytes - n
            address, room = address + n, room - n
