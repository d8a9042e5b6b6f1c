"""Implement `Vm` on CPU by one memfd: pages are offsets in the file, mapped by moving page tables.

Used by the pool and ranges of a live CPU device, through the `Vm` protocol.
"""

from __future__ import annotations

import contextlib
import errno
import mmap as std_mmap
import os
from collections.abc import Sequence
from functools import partial

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import ceil_div
from ballast.memory import syscalls as sys
from ballast.memory.address_space import (
    MappingLimit,
    end_share,
    reserve_aligned,
    share,
    unback,
)
from ballast.memory.mapping_table import MappingTable
from ballast.memory.memfd import DeviceFile, mapped_pages
from ballast.memory.memfd_pages import MemfdPages
from ballast.memory.runs import runs_of
from ballast.memory.vm import Exported, Latch, Range, check_attach

_NO_MEMORY = {errno.ENOMEM, errno.EFAULT, errno.ENOSPC}


class MemfdVm:
    """Implements `Vm` on Linux 5.14 or later; before that, populating falls back to `fallocate`.

    Pages are used in the window, or mapped in ranges (`MemfdPages`).
    """

    maps_host = True

    def __init__(
        self,
        page_bytes: int,
        n_pages: int,
        *,
        moves: bool | None = None,
        huge: bool | None = None,
    ) -> None:
        """`moves`: whether page tables are moved (None: where Linux can); `huge`: whether Linux is
        asked for huge pages (None: where it gives them and pages are large enough)."""
        if page_bytes <= 0 or page_bytes % std_mmap.PAGESIZE or n_pages <= 0:
            raise DeviceError(
                "memfd", f"{n_pages} pages of {page_bytes} bytes: need multiples of the OS's page"
            )
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self._open = True
        self._mappings = MappingTable(n_pages)
        self._limit = MappingLimit()
        self._memory = MemfdPages(page_bytes, self._mappings.uses, n_pages, moves, huge)
        self.window = self._memory.window

    def enter(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_enter(pages)
        runs = list(runs_of(pages))
        self._limit.check(2 * len(runs))
        try:
            for first, n in runs:
                self._memory.map_window(first, n)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._memory.clear_window(pages)
            raise sys.failed("mmap", error) from error
        self._mappings.uses.enter(pages)

    def leave(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_leave(pages)
        self._limit.add(2 * len(pages))
        sys.checked("mmap", lambda: self._memory.clear_window(pages))
        self._mappings.uses.leave(pages)

    def prefault(self, pages: Sequence[int]) -> None:
        self._memory.prefault(pages)

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        n_pages = ceil_div(n_bytes, self.page_bytes)
        self._limit.check(2)
        base = sys.checked(
            "mmap", lambda: reserve_aligned(n_pages * self.page_bytes, self._memory.alignment)
        )
        range = Range(base, n_pages, self.page_bytes)
        self._mappings.open(range)
        return range

    def release(self, range: Range) -> None:
        self._mappings.check_close(range)
        sys.checked("munmap", lambda: sys.munmap(range.base, range.n_bytes))
        self._mappings.close(range)

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        self._mappings.check_map(range, at, pages, alias)
        runs = list(runs_of(pages))
        self._limit.check(2 * len(runs))
        address = range.address(at)
        try:
            for first, n in runs:
                self._memory.map(address, first, n, prefault)
                address += n * self.page_bytes
        except OSError as error:
            with contextlib.suppress(OSError):
                # All of it: a fixed map that fails may have removed what was there before.
                unback(range.address(at), len(pages) * self.page_bytes)
            raise sys.failed("mmap", error) from error
        self._mappings.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        pages = self._mappings.check_unmap(range, at, n)
        if n == 0:
            return
        self._limit.add(2)
        self._memory.put_back(range.address(at), pages)
        sys.checked("mmap", lambda: unback(range.address(at), n * self.page_bytes))
        self._mappings.unmap(range, at, n)

    @property
    def table_pages(self) -> int:
        return self._memory.alignment // self.page_bytes if self._memory.moves else 1

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_map_host(range, at, n)
        self._limit.check(4)
        address = range.address(at)
        try:
            share(source, address, n_bytes, moves=self._memory.moves)
        except OSError as error:
            with contextlib.suppress(OSError):
                unback(address, n * self.page_bytes)
            raise sys.failed("mremap", error) from error
        self._mappings.map_host(range, at, n)

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_unmap_host(range, at, n)
        address = range.address(at)
        self._limit.add(2)
        sys.checked("mremap", lambda: end_share(source, address, n_bytes, moves=self._memory.moves))
        sys.checked("mmap", lambda: unback(address, n * self.page_bytes))
        self._mappings.unmap_host(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._mappings.uses.check(pages)
        left = len(pages)
        for first, n in runs_of(pages):
            try:
                self._memory.populate(first, n)
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return Short(left)
                raise sys.failed("madvise(MADV_POPULATE_WRITE)", error) from error
            left -= n
        return None

    def discard(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_unused(pages)
        for first, n in runs_of(pages):
            sys.checked("fallocate(PUNCH_HOLE)", partial(self._memory.discard, first, n))

    def attach(self, exported: Exported) -> int:
        """Raises DeviceError, with `exported.fd` left open, if the file is not as described."""
        check_attach(exported, self.page_bytes, self._memory.file.device)
        file = DeviceFile.received(exported)
        for known in self._memory.attached:
            if known.device == file.device:
                os.close(file.fd)
                return known.first
        first = self._mappings.uses.attach(file.n_pages)
        self._memory.attached.append(file.known_from(first))
        return first

    def detach(self, first: int) -> None:
        self._mappings.uses.detach(first)
        for file in [file for file in self._memory.attached if file.first == first]:
            os.close(file.fd)
            self._memory.attached.remove(file)

    def forget(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_away(pages)

    def os_pages(self, range: Range) -> dict[int, int]:
        return mapped_pages(range, (self._memory.file, *self._memory.attached))

    def physical_bytes(self) -> int:
        """Return the bytes of memory that the device occupies now, as counted against the budget,
        whichever processes map them."""
        return os.fstat(self._memory.file.fd).st_blocks * 512

    def export(self, pages: Sequence[int]) -> Exported:
        self._mappings.uses.check(pages)
        file = self._memory.file
        return Exported(file.device, self.page_bytes, self.n_pages, tuple(pages), file.fd)

    def fence(self) -> Latch:
        """Return a fence that is done already: `mmap` takes effect before it returns."""
        return Latch(done=True)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for range in self._mappings.ranges():
            sys.munmap(range.base, range.n_bytes)
        self._memory.close()
