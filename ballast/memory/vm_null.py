"""Implement `Vm` without memory, for the simulator, replay and tests.

Checks every call like a real vm, but maps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import ceil_div
from ballast.memory.mapping_table import MappingTable
from ballast.memory.vm import Exported, Latch, Range, check_attach, window_pages

_ORIGIN = 1 << 60
"""Above every address a process can have: touching one by mistake faults at once."""
_SPAN = 1 << 46
_devices = itertools.count()


class NullVm:
    """Implements `Vm`. Addresses are made up, unique among all NullVm of the process."""

    def __init__(self, page_bytes: int, n_pages: int) -> None:
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self._mappings = MappingTable(n_pages)
        number = next(_devices)
        self._device = (-1, number)
        self._next = _ORIGIN + number * _SPAN
        self._attached: dict[tuple[int, int], int] = {}
        self.window = Range(self._next, window_pages(n_pages), page_bytes)
        self._next = self.window.end + page_bytes

    def enter(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_enter(pages)
        self._mappings.uses.enter(pages)

    def leave(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_leave(pages)
        self._mappings.uses.leave(pages)

    def prefault(self, pages: Sequence[int]) -> None:
        """Do nothing: no page tables."""

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        range = Range(self._next, ceil_div(n_bytes, self.page_bytes), self.page_bytes)
        # One page of distance: running past the end of a range never lands in the next.
        self._next = range.end + self.page_bytes
        self._mappings.open(range)
        return range

    def release(self, range: Range) -> None:
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
        self._mappings.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._mappings.check_unmap(range, at, n)
        self._mappings.unmap(range, at, n)

    maps_host = True
    table_pages = 1

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_map_host(range, at, n)
        self._mappings.map_host(range, at, n)

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_unmap_host(range, at, n)
        self._mappings.unmap_host(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._mappings.uses.check(pages)
        return None

    def discard(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_unused(pages)

    def attach(self, exported: Exported) -> int:
        check_attach(exported, self.page_bytes, self._device)
        if exported.fd is not None:
            raise DeviceError("attach", "a vm without memory cannot map pages that have some")
        if exported.device not in self._attached:
            self._attached[exported.device] = self._mappings.uses.attach(exported.n_pages)
        return self._attached[exported.device]

    def detach(self, first: int) -> None:
        self._mappings.uses.detach(first)
        self._attached = {key: n for key, n in self._attached.items() if n != first}

    def forget(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_away(pages)

    def os_pages(self, range: Range) -> dict[int, int]:
        if range is self.window:
            return {
                page: page for page in (*_indices(self.n_pages), *self._mappings.uses.entered())
            }
        return self._mappings.pages(range)

    def export(self, pages: Sequence[int]) -> Exported:
        self._mappings.uses.check(pages)
        return Exported(self._device, self.page_bytes, self.n_pages, tuple(pages), None)

    def fence(self) -> Latch:
        return Latch(done=True)

    def close(self) -> None:
        self._attached.clear()
        self._mappings = MappingTable(self.n_pages)


def _indices(n: int) -> range:
    return range(n)
