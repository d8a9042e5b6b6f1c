"""Implement `Vm` on CPU by one memfd: pages are offsets in the file, mapped by moving page tables.

Used by the pool and ranges of a live CPU device, through the `Vm` protocol.
"""

from __future__ import annotations

import contextlib
import errno
import mmap as std_mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB, ceil_div
from ballast.memory import huge_pages
from ballast.memory import syscalls as sys
from ballast.memory.address_space import (
    TABLE_BYTES,
    end_share,
    reserve_aligned,
    share,
    unback,
)
from ballast.memory.mapping_table import MappingTable
from ballast.memory.memfd import DeviceFile, mapped_pages
from ballast.memory.runs import runs_of
from ballast.memory.vm import Exported, Latch, Range, check_attach, window_pages

_T = TypeVar("_T")

_POPULATE_STEP = 256 * KiB
"""Most bytes populated by one call. While it runs (about 0.6 ms at the 0.4 GB/s of first touch) it
holds the process's memory map for reading, and every `mmap` of the loop waits for it."""

"""Addresses that one table of the lowest level covers, where pages of the system have 4 KiB."""

_RECOUNT_AFTER = 4096
"""Map calls after which mappings are counted anew even if the bound still looks good."""

_NO_MEMORY = {errno.ENOMEM, errno.EFAULT, errno.ENOSPC}


class MemfdVm:
    """Implements `Vm` on Linux 5.14 or later; before that, populating falls back to `fallocate`.

    ::

        window  [ 0 ][ 1 ][ . ][ . ][ 4 ]     the whole device; . : page tables are elsewhere
        range   [ - ][ 2 ][ 3 ][ - ]          taken from the window by map, put back by unmap

    The window is one mapping of the file, and pages of KV are used there. Making page tables for a
    GiB takes 160 to 210 ms, moving them 1 to 3. So the page tables of a page that no range maps are
    kept in the window: it is populated there, `map` moves them into the range (`mremap`), and
    `unmap` back. They are a cache: what is not in them is found by faults, wherever the page is
    mapped. Aliases and pages of attached devices are mapped by `mmap`, as is everything where Linux
    cannot move page tables.
    """

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
        self._file = DeviceFile.create(n_pages, page_bytes)
        self._fd = self._file.fd
        self._attached: list[DeviceFile] = []
        self._mappings = MappingTable(n_pages)
        self._open = True
        self._limit = sys.max_map_count() // 2
        # An upper bound of the process's mappings as far as calls of this object go.
        self._bound = count_mappings() + 1
        self._calls = 0
        self._has_tables = bytearray(n_pages)
        """Whether a page is known to be in the page tables, in the window or where it is mapped
        otherwise than as an alias."""
        self._moves = sys.can_move_page_tables() if moves is None else moves
        if huge and not huge_pages.fits(page_bytes):
            raise DeviceError("memfd", f"pages of {page_bytes} bytes are not whole huge pages")
        fits = huge_pages.fits(page_bytes) and huge_pages.are_allowed()
        self._huge = fits if huge is None else huge
        self._populate_step = huge_pages.huge_page_bytes() if self._huge else _POPULATE_STEP
        most = window_pages(n_pages)
        base = _call("mmap", lambda: reserve_aligned(most * page_bytes, self._alignment))
        self.window = Range(base, most, page_bytes)
        _call("mmap", lambda: self._map_window(0, n_pages))

    def enter(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_enter(pages)
        runs = list(runs_of(pages))
        self._guard(2 * len(runs))
        try:
            for first, n in runs:
                self._map_window(first, n)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._clear_window(pages)
            raise DeviceError("mmap", _reason(error)) from error
        self._mappings.uses.enter(pages)

    def leave(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_leave(pages)
        self._bound += 2 * len(pages)
        _call("mmap", lambda: self._clear_window(pages))
        self._mappings.uses.leave(pages)

    def prefault(self, pages: Sequence[int]) -> None:
        if not sys.can_populate():
            return
        has_tables, own = self._has_tables, self.n_pages
        for first, n in runs_of([p for p in pages if p >= own or not has_tables[p]]):
            with contextlib.suppress(OSError):  # then at first touch
                address = self.window.address(first)
                sys.madvise(address, n * self.page_bytes, sys.MADV_POPULATE_WRITE)
                if first < own:
                    has_tables[first : first + n] = b"\1" * n

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        n_pages = ceil_div(n_bytes, self.page_bytes)
        self._guard(2)
        base = _call("mmap", lambda: reserve_aligned(n_pages * self.page_bytes, self._alignment))
        range = Range(base, n_pages, self.page_bytes)
        self._mappings.open(range)
        return range

    def release(self, range: Range) -> None:
        self._mappings.check_close(range)
        _call("munmap", lambda: sys.munmap(range.base, range.n_bytes))
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
        self._guard(2 * len(runs))
        address = range.address(at)
        try:
            for first, n in runs:
                self._map_pages(address, first, n, prefault)
                address += n * self.page_bytes
        except OSError as error:
            with contextlib.suppress(OSError):
                # All of it: a fixed map that fails may have removed what was there before.
                unback(range.address(at), len(pages) * self.page_bytes)
            raise DeviceError("mmap", _reason(error)) from error
        self._mappings.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        pages = self._mappings.check_unmap(range, at, n)
        if n == 0:
            return
        self._bound += 2
        if self._moves:
            self._put_into_window(range, at, pages)
        _call("mmap", lambda: unback(range.address(at), n * self.page_bytes))
        self._mappings.unmap(range, at, n)

    maps_host = True

    @property
    def table_pages(self) -> int:
        return self._alignment // self.page_bytes if self._moves else 1

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_map_host(range, at, n)
        self._guard(4)
        address = range.address(at)
        try:
            share(source, address, n_bytes, moves=self._moves)
        except OSError as error:
            with contextlib.suppress(OSError):
                unback(address, n * self.page_bytes)
            raise DeviceError("mremap", _reason(error)) from error
        self._mappings.map_host(range, at, n)

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_unmap_host(range, at, n)
        address = range.address(at)
        self._bound += 2
        _call("mremap", lambda: end_share(source, address, n_bytes, moves=self._moves))
        _call("mmap", lambda: unback(address, n * self.page_bytes))
        self._mappings.unmap_host(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._mappings.uses.check(pages)
        left = len(pages)
        for first, n in runs_of(pages):
            try:
                self._populate_run(first, n)
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return Short(left)
                raise DeviceError("madvise(MADV_POPULATE_WRITE)", _reason(error)) from error
            left -= n
        return None

    def discard(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_unused(pages)
        mode = sys.FALLOC_PUNCH_HOLE | sys.FALLOC_KEEP_SIZE
        size = self.page_bytes
        for first, n in runs_of(pages):
            try:
                sys.fallocate(self._fd, mode, first * size, n * size)
            except OSError as error:
                raise DeviceError("fallocate(PUNCH_HOLE)", _reason(error)) from error
            self._has_tables[first : first + n] = bytes(n)

    def attach(self, exported: Exported) -> int:
        """Raises DeviceError, with `exported.fd` left open, if the file is not as described."""
        check_attach(exported, self.page_bytes, self._file.device)
        file = DeviceFile.received(exported)
        for known in self._attached:
            if known.device == file.device:
                os.close(file.fd)
                return known.first
        first = self._mappings.uses.attach(file.n_pages)
        self._attached.append(file.known_from(first))
        return first

    def detach(self, first: int) -> None:
        self._mappings.uses.detach(first)
        for file in [file for file in self._attached if file.first == first]:
            os.close(file.fd)
            self._attached.remove(file)

    def forget(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_away(pages)

    def os_pages(self, range: Range) -> dict[int, int]:
        return mapped_pages(range, (self._file, *self._attached))

    def physical_bytes(self) -> int:
        """Return the bytes of memory that the device occupies now, as counted against the budget,
        whichever processes map them."""
        return os.fstat(self._fd).st_blocks * 512

    def export(self, pages: Sequence[int]) -> Exported:
        self._mappings.uses.check(pages)
        return Exported(self._file.device, self.page_bytes, self.n_pages, tuple(pages), self._fd)

    def fence(self) -> Latch:
        """Return a fence that is done already: `mmap` takes effect before it returns."""
        return Latch(done=True)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for range in self._mappings.ranges():
            sys.munmap(range.base, range.n_bytes)
        sys.munmap(self.window.base, self.window.n_bytes)
        for file in (self._file, *self._attached):
            os.close(file.fd)
        self._attached.clear()

    @property
    def _alignment(self) -> int:
        """Alignment of addresses, at which page tables move by whole tables."""
        return max(self.page_bytes, TABLE_BYTES)

    def _map_window(self, first: int, n: int) -> None:
        self._map_run(self.window.address(first), first, n, prefault=False)

    def _clear_window(self, pages: Sequence[int]) -> None:
        for first, n in runs_of(pages):
            unback(self.window.address(first), n * self.page_bytes)

    def _map_run(self, address: int, first: int, n: int, prefault: bool) -> None:
        """Map adjacent pages by `mmap`. Raises OSError."""
        size = self.page_bytes
        flags = sys.MAP_SHARED | sys.MAP_FIXED | (sys.MAP_POPULATE if prefault else 0)
        prot = sys.PROT_READ | sys.PROT_WRITE
        file = self._file
        if first >= self.n_pages:
            file = next(file for file in self._attached if file.has(first))
        sys.mmap(address, n * size, prot, flags, file.fd, (first - file.first) * size)
        if file is self._file:
            # Everywhere or nowhere: neighbours that differ in it are not merged into one mapping.
            with contextlib.suppress(OSError):
                sys.madvise(address, n * size, sys.MADV_DONTDUMP)
            if self._huge:
                huge_pages.advise(address, n * size)

    def _map_pages(self, address: int, first: int, n: int, prefault: bool) -> None:
        """Map adjacent pages, with their page tables if the window has them. Raises OSError."""
        size = self.page_bytes
        alone = first < self.n_pages and not any(
            map(self._mappings.uses.is_mapped, range(first, first + n))
        )
        if alone and self._moves:
            if not prefault or all(self._has_tables[first : first + n]):
                with contextlib.suppress(OSError):
                    sys.move_page_tables(self.window.address(first), address, n * size)
                    return
            # From now on they are in the range.
            self._has_tables[first : first + n] = (b"\1" if prefault else b"\0") * n
        elif alone:
            self._drop_tables(first, n)
            self._has_tables[first : first + n] = bytes(n)
        self._map_run(address, first, n, prefault)

    def _drop_tables(self, first: int, n: int) -> None:
        """Drop the window's page tables of pages that are mapped elsewhere: they count twice."""
        sys.madvise(self.window.address(first), n * self.page_bytes, sys.MADV_DONTNEED)

    def _put_into_window(self, range: Range, at: int, pages: Sequence[int]) -> None:
        """Move page tables back, but of pages that are mapped elsewhere, too. The mappings in the
        range stay. Raises DeviceError if part of the window is lost by that."""
        address = range.address(at)
        for first, n in runs_of(pages):
            if first < self.n_pages:
                self._put_run(address, first, n)
            address += n * self.page_bytes

    def _put_run(self, address: int, first: int, n: int) -> None:
        size = self.page_bytes
        shared = [page for page in range(first, first + n) if self._mappings.uses.is_shared(page)]
        for page in shared:
            self._has_tables[page] = 0
        alone: Sequence[int] = range(first, first + n)
        if shared:
            alone = sorted(set(alone) - set(shared))
        for start, many in runs_of(alone):
            source, target = address + (start - first) * size, self.window.address(start)
            try:
                sys.move_page_tables(source, target, many * size)
            except OSError:
                self._has_tables[start : start + many] = bytes(many)
                _call("mmap", partial(self._map_window, start, many))

    def _populate_run(self, first: int, n: int) -> None:
        size = self.page_bytes
        for start in range(first * size, (first + n) * size, self._populate_step):
            step = min(self._populate_step, (first + n) * size - start)
            if sys.can_populate():
                sys.madvise(self.window.base + start, step, sys.MADV_POPULATE_WRITE)
            else:
                sys.fallocate(self._fd, 0, start, step)
        for page in range(first, first + n):
            if self._mappings.uses.is_mapped(page):
                self._drop_tables(page, 1)
            elif sys.can_populate():
                self._has_tables[page] = 1

    def _guard(self, more: int) -> None:
        """Keep the process below half of the mappings Linux allows: a fixed map adds at most 2."""
        self._calls += 1
        self._bound += more
        if self._bound <= self._limit and self._calls < _RECOUNT_AFTER:
            return
        self._calls = 0
        self._bound = count_mappings() + more
        if self._bound > self._limit:
            raise DeviceError(
                "mmap",
                f"{self._bound} mappings would pass half of vm.max_map_count; raise it "
                f"(sysctl -w vm.max_map_count={8 * self._limit}) or use larger pages",
            )


def count_mappings() -> int:
    """Return the number of mappings that this process has; Linux limits it."""
    return sys.maps().count(b"\n")


def _call(name: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except OSError as error:
        raise DeviceError(name, _reason(error)) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
