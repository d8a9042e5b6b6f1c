"""Shared memory that says which requests a worker's lane was running when its process died."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable

_LENGTH = struct.Struct("<I")
_N_BYTES = 64 << 10


class FlightRecorder:
    """The ids of the requests of the job in flight, in a memfd that server and worker share.

    The server makes it and reads it once the worker is dead; the worker's lane writes. The length
    is zero while the rest changes, so that a record is whole or absent wherever its writer ended.
    """

    def __init__(self, fd: int) -> None:
        """Map `fd`, which the caller keeps."""
        self._map = mmap.mmap(fd, _N_BYTES)

    def record(self, request_ids: Iterable[str]) -> None:
        """Record the requests in flight; nothing if there are none, or too many to hold."""
        ids = "\n".join(request_ids).encode()
        _LENGTH.pack_into(self._map, 0, 0)
        if 0 < len(ids) <= _N_BYTES - _LENGTH.size:
            self._map[_LENGTH.size : _LENGTH.size + len(ids)] = ids
            _LENGTH.pack_into(self._map, 0, len(ids))

    def read(self) -> frozenset[str]:
        """Return the recorded ids; empty: none. The writer must have ended."""
        (length,) = _LENGTH.unpack_from(self._map, 0)
        ids = self._map[_LENGTH.size : _LENGTH.size + min(length, _N_BYTES)]
        return frozenset(ids.decode(errors="replace").split("\n")) if ids else frozenset()

    def close(self) -> None:
        self._map.close()


def flight_memory() -> int:
    """Create memory for a `FlightRecorder` on either side, and return its descriptor."""
    fd = os.memfd_create("ballast-flight", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _N_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd
