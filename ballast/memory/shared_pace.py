"""Pace one host link for several processes, by a table in memory that they share.

Used by `HostLink` where devices and slices of a host have one link. Each process charges its
batches to its own entry, and waits until these are due; together they never pass the link's rate.

::

    entry    | in use | due     | reserved |       rate 1
      0      |  yes   | 12.31 s |   0.50   |  ->   0.50 of it
      1      |  yes   | 12.30 s |   0      |  ->   0.25
      2      |  no    | 12.02 s |   0.25   |  ->   0        until it carries something
      3      |  yes   | 12.33 s |   0      |  ->   0.25
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from ballast.core.errors import DeviceError

_ENTRIES = 63
_ENTRY = struct.Struct("ddd")
"""Of one process: whether it carries bytes (0 or 1), when these are due, its reservation."""
_BYTES = _ENTRIES * _ENTRY.size
LAPSE = 0.25
"""Seconds after its last batch was due from which a process counts for nothing: it died or stands
still, and its reservation is for the others."""
_CATCH_UP = 0.02
"""Most seconds of sleeping too long that are made good."""
_LEAST = 0.01
"""Least part of the link for a process without reservation, where all of it is reserved."""
_LOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux on 64 bits."""


class HostLinkMemory:
    """Memory of the table of one link, kept by the server for as long as it runs."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ballast-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, _BYTES)
        self.close = weakref.finalize(self, os.close, self._fd)
        """Free it; processes that have opened it keep it."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    @property
    def path(self) -> str:
        """Path at which other processes of the same user open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


@dataclass(frozen=True, slots=True)
class _Charge:
    in_use: bool
    due: float
    reserved: float

    def counts(self, now: float) -> bool:
        return self.in_use and now < self.due + LAPSE


class SharedPace:
    """One process's entry in the table. A lock of its own, which ends with the process, keeps it.

    Used by one thread at a time, but for `reserve`.
    """

    def __init__(self, path: str, reserves: bool = True, origin: float = 0.0) -> None:
        """`path`: of the memory, opened anew by each process (locks belong to what was opened).
        `reserves`: whether reservations count; else its part is always an equal one. `origin`: 0 of
        the process's clock, on one that all processes have: the table is in times of that. Raises
        DeviceError if it cannot be used, or all entries are taken."""
        self._reserves, self._origin = reserves, origin
        self._parts: dict[str, float] = {}
        """Reserved parts of the link, by what they are for."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._table = mmap.mmap(self._fd, _BYTES)
                self._at = self._take_entry()
            except BaseException:
                os.close(self._fd)
                raise
        except (OSError, ValueError) as error:
            raise DeviceError("link", f"it cannot be shared by {path}: {error}") from error

    def charge(self, seconds: float, now: float) -> float:
        """Charge bytes for which the whole link needs `seconds`; return when this process's share
        of the link has carried them."""
        now += self._origin
        with self._exclusive():
            entries = [self._read(i) for i in range(_ENTRIES)]
            mine = entries[self._at]
            begins = max(mine.due, now - _CATCH_UP if mine.in_use else now)
            entries[self._at] = mine = _Charge(True, max(begins, now), self._reserved)
            due = begins + seconds / self._share([e for e in entries if e.counts(now)], mine)
            self._write(_Charge(True, due, mine.reserved))
        return due - self._origin

    def rest(self) -> None:
        """Count for nothing until the next charge: nothing is to be carried."""
        self._write(_Charge(False, self._read(self._at).due, self._reserved))

    def reserve(self, part: float, of: str = "") -> None:
        """Have at least this part of the link, 0 to 1, from the next charge on; `of`: what it is
        for, each in place of its last one. From any thread."""
        self._parts = {**self._parts, of: max(0.0, part)}

    @property
    def _reserved(self) -> float:
        return min(1.0, sum(self._parts.values())) if self._reserves else 0.0

    def close(self) -> None:
        """Give the entry to others."""
        self._write(_Charge(False, 0.0, 0.0))
        self._table.close()
        os.close(self._fd)

    @staticmethod
    def _share(active: list[_Charge], mine: _Charge) -> float:
        """Return this process's part of the link: reservations are kept, and those without one
        divide the rest. Where more is reserved than there is, each of those without has a mean
        part. Nothing of the link is left over."""
        reserved = sum(e.reserved for e in active)
        without = sum(not e.reserved for e in active)
        equal = max(_LEAST, 1 - reserved) / max(1, without)
        if reserved > 1:
            equal = reserved / (len(active) - without)
        return (mine.reserved or equal) / (reserved + equal * without)

    def _take_entry(self) -> int:
        for i in range(_ENTRIES):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._lock(fcntl.F_WRLCK, 1 + i))
                self._at = i
                self._write(_Charge(False, 0.0, 0.0))
                return i
        raise ValueError(f"{_ENTRIES} processes have it already")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other processes from charging; a process that dies meanwhile keeps nobody."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, self._lock(fcntl.F_WRLCK, 0))
        try:
            yield
        finally:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._lock(fcntl.F_UNLCK, 0))

    @staticmethod
    def _lock(kind: int, at: int) -> bytes:
        """Return the lock of one byte, which need not exist: 0 of the table, 1 + i of entry i."""
        return _LOCK.pack(kind, os.SEEK_SET, at, 1, 0)

    def _read(self, i: int) -> _Charge:
        in_use, due, reserved = _ENTRY.unpack_from(self._table, i * _ENTRY.size)
        return _Charge(bool(in_use), due, reserved)

    def _write(self, charge: _Charge) -> None:
        values = float(charge.in_use), charge.due, charge.reserved
        _ENTRY.pack_into(self._table, self._at * _ENTRY.size, *values)
