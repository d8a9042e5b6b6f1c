"""Create and seal the memfd that is a CPU device's memory, or check one received from a peer.

Used by `MemfdVm`. Pages are offsets in the file; other processes map them by its descriptor.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory import syscalls
from ballast.memory.vm import Exported, Range

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """A memfd in one process: page `i` of the file has number `first + i` there."""

    fd: int
    first: int
    n_pages: int
    page_bytes: int
    device: tuple[int, int]
    """(file system, inode) numbers of the file, the same in every process."""

    @classmethod
    def create(cls, n_pages: int, page_bytes: int) -> DeviceFile:
        """Create and seal a memfd for `n_pages` pages. Raises DeviceError."""
        try:
            fd = os.memfd_create("ballast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise syscalls.failed("memfd_create", error) from error
        try:
            os.ftruncate(fd, n_pages * page_bytes)
            # Nobody who gets hold of the file can shrink it under our mappings (a fatal signal).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise syscalls.failed("ftruncate", error) from error
        return cls(fd, 0, n_pages, page_bytes, _device(fd))

    @classmethod
    def received(cls, exported: Exported) -> DeviceFile:
        """Raises DeviceError if the file is not as described, or could still be shrunk."""
        fd = exported.fd
        if fd is None:
            raise DeviceError("attach", "these pages come from a vm without memory")
        size = os.fstat(fd).st_size
        if size != exported.page_bytes * exported.n_pages or _device(fd) != exported.device:
            raise DeviceError("attach", f"the memfd of {size} bytes is not what was said")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise DeviceError("attach", "the memfd is not sealed against a change of size")
        return cls(fd, 0, exported.n_pages, exported.page_bytes, exported.device)

    def known_from(self, first: int) -> DeviceFile:
        return replace(self, first=first)

    def has(self, page: int) -> bool:
        return self.first <= page < self.first + self.n_pages

    @property
    def shown(self) -> tuple[bytes, bytes]:
        """Device and inode as /proc/self/maps writes them."""
        number, inode = self.device
        shown = f"{os.major(number):02x}:{os.minor(number):02x}"
        return shown.encode(), str(inode).encode()


def mapped_pages(where: Range, files: Iterable[DeviceFile]) -> dict[int, int]:
    """Index -> page of what /proc/self/maps shows in `where`: O(mappings), a microsecond each."""
    known = {file.shown: file for file in files}
    size = where.page_bytes
    found: dict[int, int] = {}
    for line in syscalls.maps().splitlines():
        # low-high permissions offset device inode [path]
        fields = line.split(None, 5)
        file = known.get((fields[3], fields[4]))
        if file is None:
            continue
        low, high = (int(end, 16) for end in fields[0].split(b"-"))
        start, end = max(low, where.base), min(high, where.end)
        if start >= end:
            continue
        offset = int(fields[2], 16) + start - low
        at, n = (start - where.base) // size, (end - start) // size
        if (start - where.base) % size or (end - start) % size or offset % size:
            raise BrokenPromise(f"part of a page is mapped in {where}")
        page = file.first + offset // size
        found |= {at + i: page + i for i in range(n)}
    return found


def _device(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino
