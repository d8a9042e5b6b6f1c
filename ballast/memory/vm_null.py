"""A vm without memory, for virtual time and for tests: it checks every call and touches nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.units import ceil_div
from ballast.memory.book import MapBook
from ballast.memory.vm import Exported, Latch, Range

_ORIGIN = 1 << 60
"""Above every address a process can have: touching one by mistake faults at once."""
_SPAN = 1 << 46
_devices = itertools.count()


class NullVm:
    """Implements `Vm`. Addresses are made up, unique among all NullVm of the process."""

    def __init__(self, page_bytes: int, n_pages: int) -> None:
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self._book = MapBook(n_pages)
        self._next = _ORIGIN + next(_devices) * _SPAN

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        range = Range(self._next, ceil_div(n_bytes, self.page_bytes), self.page_bytes)
        # One page of distance: running past the end of a range never lands in the next.
        self._next = range.end + self.page_bytes
        self._book.open(range)
        return range

    def release(self, range: Range) -> None:
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
        self._book.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._book.check_unmap(range, at, n)
        self._book.unmap(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._book.check_pages(pages)
        return None

    def discard(self, pages: Sequence[int]) -> None:
        self._book.check_unused(pages)

    def os_mapped(self, range: Range) -> int:
        return self._book.mapped(range)

    def mappings(self) -> int:
        return self._book.runs()

    def export(self, pages: Sequence[int]) -> Exported:
        self._book.check_pages(pages)
        return Exported(self.page_bytes, self.n_pages, tuple(pages), None)

    def fence(self) -> Latch:
        return Latch(done=True)

    def close(self) -> None:
        self._book = MapBook(self.n_pages)
