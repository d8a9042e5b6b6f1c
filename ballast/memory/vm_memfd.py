"""A device made of one memfd: pages are offsets in it, mapping is `mmap` at a fixed address."""

from __future__ import annotations

import contextlib
import errno
import mmap as std_mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB, ceil_div
from ballast.memory import syscalls as sys
from ballast.memory.book import MapBook
from ballast.memory.memfd import DeviceFile, mapped_pages
from ballast.memory.vm import Exported, Latch, Range, check_attach

_T = TypeVar("_T")

_POPULATE_STEP = 256 * KiB
"""Most bytes populated by one call. While it runs (about 0.6 ms at the 0.4 GB/s of first touch) it
holds the process's memory map for reading, and every `mmap` of the loop waits for it."""

_RECOUNT_AFTER = 4096
"""Map calls after which mappings are counted anew even if the bound still looks good."""

_NO_MEMORY = {errno.ENOMEM, errno.EFAULT, errno.ENOSPC}


class MemfdVm:
    """Implements `Vm` on Linux 5.14 or later; before that, populating falls back to `fallocate`.

    The *window* maps the whole device once more, so that pages no owner has mapped can be
    populated. It is no owner's range: `os_mapped` never counts it. Its page tables are emptied
    after each use, so that RssShmem of the process counts a page once, where its owner maps it.
    """

    def __init__(self, page_bytes: int, n_pages: int) -> None:
        if page_bytes <= 0 or page_bytes % std_mmap.PAGESIZE or n_pages <= 0:
            raise DeviceError(
                "memfd", f"{n_pages} pages of {page_bytes} bytes: need multiples of the OS's page"
            )
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self._file = DeviceFile.create(n_pages, page_bytes)
        self._fd = self._file.fd
        self._attached: list[DeviceFile] = []
        self._book = MapBook(n_pages)
        self._open = True
        self._limit = sys.max_map_count() // 2
        # An upper bound of the process's mappings as far as calls of this object go.
        self._bound = self.mappings() + 1
        self._calls = 0
        self._window = _call("mmap", self._map_window)

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        n_pages = ceil_div(n_bytes, self.page_bytes)
        self._guard(2)
        base = _call("mmap", lambda: _reserve_aligned(n_pages * self.page_bytes, self.page_bytes))
        range = Range(base, n_pages, self.page_bytes)
        self._book.open(range)
        return range

    def release(self, range: Range) -> None:
        self._book.check_close(range)
        _call("munmap", lambda: sys.munmap(range.base, range.n_bytes))
        self._book.close(range)

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        self._book.check_map(range, at, pages, alias)
        runs = list(_runs(pages))
        self._guard(2 * len(runs))
        address = range.address(at)
        try:
            for first, n in runs:
                self._map_run(address, first, n, prefault)
                address += n * self.page_bytes
        except OSError as error:
            with contextlib.suppress(OSError):
                # All of it: a fixed map that fails may have removed what was there before.
                _unback(range.address(at), len(pages) * self.page_bytes)
            raise DeviceError("mmap", _reason(error)) from error
        self._book.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._book.check_unmap(range, at, n)
        if n == 0:
            return
        self._bound += 2
        _call("mmap", lambda: _unback(range.address(at), n * self.page_bytes))
        self._book.unmap(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._book.check_pages(pages)
        left = len(pages)
        for first, n in _runs(pages):
            try:
                self._populate_run(first * self.page_bytes, n * self.page_bytes)
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return Short(left)
                raise DeviceError("madvise(MADV_POPULATE_WRITE)", _reason(error)) from error
            left -= n
        return None

    def discard(self, pages: Sequence[int]) -> None:
        self._book.check_unused(pages)
        mode = sys.FALLOC_PUNCH_HOLE | sys.FALLOC_KEEP_SIZE
        size = self.page_bytes
        for first, n in _runs(pages):
            try:
                sys.fallocate(self._fd, mode, first * size, n * size)
            except OSError as error:
                raise DeviceError("fallocate(PUNCH_HOLE)", _reason(error)) from error

    def attach(self, exported: Exported) -> int:
        """Raises DeviceError, with `exported.fd` left open, if the file is not what was said."""
        check_attach(exported, self.page_bytes, self._file.device)
        file = DeviceFile.received(exported)
        for known in self._attached:
            if known.device == file.device:
                os.close(file.fd)
                return known.first
        first = self._book.attach(file.n_pages)
        self._attached.append(file.known_from(first))
        return first

    def detach(self, first: int) -> None:
        self._book.detach(first)
        for file in [file for file in self._attached if file.first == first]:
            os.close(file.fd)
            self._attached.remove(file)

    def forget(self, pages: Sequence[int]) -> None:
        self._book.check_away(pages)

    def os_mapped(self, range: Range) -> int:
        return len(self.os_pages(range))

    def os_pages(self, range: Range) -> dict[int, int]:
        return mapped_pages(range, (self._file, *self._attached))

    def mappings(self) -> int:
        return sys.maps().count(b"\n")

    def physical_bytes(self) -> int:
        """Memory the device occupies now, whoever maps it: what counts against the budget."""
        return os.fstat(self._fd).st_blocks * 512

    def export(self, pages: Sequence[int]) -> Exported:
        self._book.check_pages(pages)
        return Exported(self._file.device, self.page_bytes, self.n_pages, tuple(pages), self._fd)

    def fence(self) -> Latch:
        """Done at once: `mmap` has taken effect when it returns."""
        return Latch(done=True)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for range in self._book.ranges():
            sys.munmap(range.base, range.n_bytes)
        sys.munmap(self._window, self.n_pages * self.page_bytes)
        for file in (self._file, *self._attached):
            os.close(file.fd)
        self._attached.clear()

    def _map_window(self) -> int:
        size = self.n_pages * self.page_bytes
        window = sys.mmap(0, size, sys.PROT_READ | sys.PROT_WRITE, sys.MAP_SHARED, self._fd)
        with contextlib.suppress(OSError):
            sys.madvise(window, size, sys.MADV_DONTDUMP)
        return window

    def _map_run(self, address: int, first: int, n: int, prefault: bool) -> None:
        size = self.page_bytes
        flags = sys.MAP_SHARED | sys.MAP_FIXED | (sys.MAP_POPULATE if prefault else 0)
        prot = sys.PROT_READ | sys.PROT_WRITE
        file = self._file
        if first >= self.n_pages:
            file = next(file for file in self._attached if file.has(first))
        sys.mmap(address, n * size, prot, flags, file.fd, (first - file.first) * size)

    def _populate_run(self, offset: int, n_bytes: int) -> None:
        for start in range(offset, offset + n_bytes, _POPULATE_STEP):
            step = min(_POPULATE_STEP, offset + n_bytes - start)
            if sys.can_populate():
                sys.madvise(self._window + start, step, sys.MADV_POPULATE_WRITE)
            else:
                sys.fallocate(self._fd, 0, start, step)
            sys.madvise(self._window + start, step, sys.MADV_DONTNEED)

    def _guard(self, more: int) -> None:
        """Keep the process below half of the mappings Linux allows: a fixed map adds at most 2."""
        self._calls += 1
        self._bound += more
        if self._bound <= self._limit and self._calls < _RECOUNT_AFTER:
            return
        self._calls = 0
        self._bound = self.mappings() + more
        if self._bound > self._limit:
            raise DeviceError(
                "mmap",
                f"{self._bound} mappings would pass half of vm.max_map_count; raise it "
                f"(sysctl -w vm.max_map_count={8 * self._limit}) or use larger pages",
            )


def _reserve_aligned(n_bytes: int, alignment: int) -> int:
    flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE
    found = sys.mmap(0, n_bytes + alignment, sys.PROT_NONE, flags)
    base = ceil_div(found, alignment) * alignment
    if base > found:
        sys.munmap(found, base - found)
    if tail := found + alignment - base:
        sys.munmap(base + n_bytes, tail)
    return base


def _unback(address: int, n_bytes: int) -> None:
    """Replace what is mapped by nothing, in one step: the addresses are never up for grabs."""
    if n_bytes:
        flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE | sys.MAP_FIXED
        sys.mmap(address, n_bytes, sys.PROT_NONE, flags)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, length) of each stretch of consecutive pages, in order."""
    i = 0
    while i < len(pages):
        first = i
        i += 1
        while i < len(pages) and pages[i] == pages[i - 1] + 1:
            i += 1
        yield pages[first], i - first


def _call(name: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except OSError as error:
        raise DeviceError(name, _reason(error)) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
