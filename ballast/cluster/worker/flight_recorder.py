"""Record in shared memory which requests are in a worker's job in flight, for the server to read.

Written by the worker before each job; read by `LocalProcess` after a crash, so that the server can
find the request that kills workers (`suspicion`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable

_LENGTH = struct.Struct("<I")
_N_BYTES = 64 << 10


class FlightRecorder:
    """The ids of the requests of the job in flight, in a memfd that server and worker share.

    The server creates it and reads it once the worker is dead; the worker writes it. The length is
    zero while the rest changes, so that a record is complete or absent whenever its writer dies.
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
