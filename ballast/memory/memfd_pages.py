"""Map pages of a memfd, and keep their page tables where they are needed next.

Used by `MemfdVm`, which checks and records what is mapped; on a GPU, `cuda.pages` does so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial

from ballast.core.errors import DeviceError
from ballast.core.units import KiB
from ballast.memory import huge_pages
from ballast.memory import syscalls as sys
from ballast.memory.address_space import TABLE_BYTES, reserve_aligned, unback
from ballast.memory.memfd import DeviceFile
from ballast.memory.page_uses import PageUses
from ballast.memory.runs import runs_of
from ballast.memory.vm import Range, window_pages

_POPULATE_STEP = 256 * KiB
"""Most bytes populated by one call. While it runs (about 0.6 ms at the 0.4 GB/s of first touch) it
holds the process's memory map for reading, and every `mmap` of the loop waits for it."""


class MemfdPages:
    """Pages of one's own file and of attached ones, in a window and in ranges.

    ::

        window  [ 0 ][ 1 ][ . ][ . ][ 4 ]     the whole device; . : page tables are elsewhere
        range   [ - ][ 2 ][ 3 ][ - ]          taken from the window by map, put back by unmap

    The window is one mapping of the file, and pages of KV are used there. Making page tables for a
    GiB takes 160 to 210 ms, moving them 1 to 3. So the page tables of a page that no range maps are
    kept in the window: it is populated there, `map` moves them into the range (`mremap`), and
    `put_back` back. They are a cache: what is not in them is found by faults, wherever the page is
    mapped. Aliases and pages of attached devices are mapped by `mmap`, as is everything where Linux
    cannot move page tables.
    """

    def __init__(
        self, page_bytes: int, uses: PageUses, n_pages: int, moves: bool | None, huge: bool | None
    ) -> None:
        """Arguments as of `MemfdVm`; `uses`: where each page is mapped. Raises DeviceError."""
        if huge and not huge_pages.fits(page_bytes):
            raise DeviceError("memfd", f"pages of {page_bytes} bytes are not whole huge pages")
        self.file = DeviceFile.create(n_pages, page_bytes)
        self.attached: list[DeviceFile] = []
        self.moves = sys.can_move_page_tables() if moves is None else moves
        """Whether page tables are moved."""
        self.alignment = max(page_bytes, TABLE_BYTES)
        """Alignment of addresses, at which page tables move by whole tables."""
        self._uses = uses
        self._has_tables = bytearray(n_pages)
        """Whether a page is known to be in the page tables, in the window or where it is mapped
        otherwise than as an alias."""
        fits = huge_pages.fits(page_bytes) and huge_pages.are_allowed()
        self._huge = fits if huge is None else huge
        self._populate_step = huge_pages.huge_page_bytes() if self._huge else _POPULATE_STEP
        most = window_pages(n_pages)
        base = sys.checked("mmap", lambda: reserve_aligned(most * page_bytes, self.alignment))
        self.window = Range(base, most, page_bytes)
        sys.checked("mmap", lambda: self.map_window(0, n_pages))

    def close(self) -> None:
        """Unmap the window, and close the files."""
        sys.munmap(self.window.base, self.window.n_bytes)
        for file in (self.file, *self.attached):
            os.close(file.fd)
        self.attached.clear()

    def map_window(self, first: int, n: int) -> None:
        """Map adjacent pages at their place in the window. Raises OSError."""
        self._map_run(self.window.address(first), first, n, prefault=False)

    def clear_window(self, pages: Sequence[int]) -> None:
        """Unmap pages from the window. Raises OSError."""
        for first, n in runs_of(pages):
            unback(self.window.address(first), n * self.file.page_bytes)

    def map(self, address: int, first: int, n: int, prefault: bool) -> None:
        """Map adjacent pages, with their page tables if the window has them. Raises OSError."""
        size = self.file.page_bytes
        is_mapped = self._uses.is_mapped
        alone = first < self.file.n_pages and not any(map(is_mapped, range(first, first + n)))
        if alone and self.moves:
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

    def put_back(self, address: int, pages: Sequence[int]) -> None:
        """Move the page tables of pages mapped at `address ..` to the window, if they can move, but
        of pages that are mapped elsewhere, too. The mappings in the range stay. Raises DeviceError
        if part of the window is lost by that."""
        for first, n in runs_of(pages) if self.moves else ():
            if first < self.file.n_pages:
                self._put_run(address, first, n)
            address += n * self.file.page_bytes

    def prefault(self, pages: Sequence[int]) -> None:
        """Enter pages into the window's page tables, where they are missing."""
        if not sys.can_populate():
            return
        has_tables, own = self._has_tables, self.file.n_pages
        for first, n in runs_of([p for p in pages if p >= own or not has_tables[p]]):
            with contextlib.suppress(OSError):  # then at first touch
                address = self.window.address(first)
                sys.madvise(address, n * self.file.page_bytes, sys.MADV_POPULATE_WRITE)
                if first < own:
                    has_tables[first : first + n] = b"\1" * n

    def populate(self, first: int, n: int) -> None:
        """Give adjacent pages memory. Raises OSError."""
        size = self.file.page_bytes
        for start in range(first * size, (first + n) * size, self._populate_step):
            step = min(self._populate_step, (first + n) * size - start)
            if sys.can_populate():
                sys.madvise(self.window.base + start, step, sys.MADV_POPULATE_WRITE)
            else:
                sys.fallocate(self.file.fd, 0, start, step)
        for page in range(first, first + n):
            if self._uses.is_mapped(page):
                self._drop_tables(page, 1)
            elif sys.can_populate():
                self._has_tables[page] = 1

    def discard(self, first: int, n: int) -> None:
        """Give the memory of adjacent pages back to the machine. Raises OSError."""
        mode = sys.FALLOC_PUNCH_HOLE | sys.FALLOC_KEEP_SIZE
        size = self.file.page_bytes
        sys.fallocate(self.file.fd, mode, first * size, n * size)
        self._has_tables[first : first + n] = bytes(n)

    def _map_run(self, address: int, first: int, n: int, prefault: bool) -> None:
        """Map adjacent pages by `mmap`. Raises OSError."""
        file, size = self.file, self.file.page_bytes
        flags = sys.MAP_SHARED | sys.MAP_FIXED | (sys.MAP_POPULATE if prefault else 0)
        prot = sys.PROT_READ | sys.PROT_WRITE
        if first >= file.n_pages:
            file = next(file for file in self.attached if file.has(first))
        sys.mmap(address, n * size, prot, flags, file.fd, (first - file.first) * size)
        if file is self.file:
            # Everywhere or nowhere: neighbours that differ in it are not merged into one mapping.
            with contextlib.suppress(OSError):
                sys.madvise(address, n * size, sys.MADV_DONTDUMP)
            if self._huge:
                huge_pages.advise(address, n * size)

    def _drop_tables(self, first: int, n: int) -> None:
        """Drop the window's page tables of pages that are mapped elsewhere: they count twice."""
        sys.madvise(self.window.address(first), n * self.file.page_bytes, sys.MADV_DONTNEED)

    def _put_run(self, address: int, first: int, n: int) -> None:
        size = self.file.page_bytes
        shared = [page for page in range(first, first + n) if self._uses.is_shared(page)]
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
                sys.checked("mmap", partial(self.map_window, start, many))
