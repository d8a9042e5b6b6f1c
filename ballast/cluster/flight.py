"""What a worker's lane was doing when its process died, in memory that outlives the process."""

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
        """Maps `fd`, which stays the caller's."""
        self._map = mmap.mmap(fd, _N_BYTES)

    def record(self, request_ids: Iterable[str]) -> None:
        """These are in flight now; of none, or of too many to hold, nothing is recorded."""
        told = "\n".join(request_ids).encode()
        _LENGTH.pack_into(self._map, 0, 0)
        if 0 < len(told) <= _N_BYTES - _LENGTH.size:
            self._map[_LENGTH.size : _LENGTH.size + len(told)] = told
            _LENGTH.pack_into(self._map, 0, len(told))

    def read(self) -> frozenset[str]:
        """What is recorded; empty: nothing. The writer must have ended."""
        (length,) = _LENGTH.unpack_from(self._map, 0)
        told = self._map[_LENGTH.size : _LENGTH.size + min(length, _N_BYTES)]
        return frozenset(told.decode(errors="replace").split("\n")) if told else frozenset()

    def close(self) -> None:
        self._map.close()


def flight_memory() -> int:
    """A descriptor of memory for one `FlightRecorder` on either side. Raises OSError."""
    fd = os.memfd_create("ballast-flight", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _N_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd
