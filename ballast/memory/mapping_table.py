"""Record which page is mapped at which range index, and check each vm call against it.

Used by all implementations of `Vm`. Bookkeeping only; maps nothing itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ballast.core.errors import BrokenPromise
from ballast.memory.page_uses import PageUses
from ballast.memory.vm import Range

UNBACKED = -1
HOST = -2
"""Index at which host memory is mapped, and no page."""


class MappingTable:
    """Mappings of a vm's pages. A call that raises has changed nothing.

    `_slots[base][at]` is the page at index `at` of the range at `base`, or UNBACKED, or HOST;
    `uses` counts by how many indices each page is mapped.
    """

    def __init__(self, n_pages: int) -> None:
        self._slots: dict[int, tuple[Range, array[int]]] = {}
        self.uses = PageUses(n_pages)

    def open(self, range: Range) -> None:
        self._slots[range.base] = (range, array("i", [UNBACKED]) * range.n_pages)

    def check_close(self, range: Range) -> None:
        slots = self._of(range)
        still = len(slots) - slots.count(UNBACKED)
        if still:
            raise BrokenPromise(f"released a range of {range.n_pages} pages with {still} mapped")

    def close(self, range: Range) -> None:
        self.check_close(range)
        del self._slots[range.base]

    def check_map(self, range: Range, at: int, pages: Sequence[int], alias: bool) -> None:
        slots = self._within(range, at, len(pages))
        if slots.count(UNBACKED) != len(slots):
            raise BrokenPromise(f"mapped over backed pages at {at} .. {at + len(pages)}")
        self.uses.check(pages, attached=True)
        if alias:
            return
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise BrokenPromise("a page occurs twice in one call without alias")
        uses = self.uses.counts
        for page in pages:
            if uses[page]:
                raise BrokenPromise(f"page {page} is mapped already; only an alias may share it")

    def map(self, range: Range, at: int, pages: Sequence[int]) -> None:
        """Record a mapping that `check_map` has allowed."""
        self._slots[range.base][1][at : at + len(pages)] = array("i", pages)
        uses = self.uses.counts
        for page in pages:
            uses[page] += 1

    def check_unmap(self, range: Range, at: int, n: int) -> array[int]:
        """Return the pages mapped at these indices. Raises BrokenPromise if one is unmapped."""
        pages = self._within(range, at, n)
        if pages and min(pages) < 0:
            raise BrokenPromise(f"unmapped what is not mapped within {at} .. {at + n}")
        return pages

    def unmap(self, range: Range, at: int, n: int) -> None:
        """Record an unmapping that `check_unmap` has allowed."""
        slots, uses = self._slots[range.base][1], self.uses.counts
        for page in slots[at : at + n]:
            uses[page] -= 1
        slots[at : at + n] = array("i", [UNBACKED]) * n

    def check_map_host(self, range: Range, at: int, n: int) -> None:
        """Raises BrokenPromise if any of these indices is backed."""
        slots = self._within(range, at, n)
        if slots.count(UNBACKED) != n:
            raise BrokenPromise(f"mapped host memory over backed pages at {at} .. {at + n}")

    def map_host(self, range: Range, at: int, n: int) -> None:
        """Record host memory that `check_map_host` has allowed."""
        self._slots[range.base][1][at : at + n] = array("i", [HOST]) * n

    def check_unmap_host(self, range: Range, at: int, n: int) -> None:
        """Raises BrokenPromise unless host memory is mapped at all of these indices."""
        if self._within(range, at, n).count(HOST) != n:
            raise BrokenPromise(f"unmapped host memory that is not mapped at {at} .. {at + n}")

    def unmap_host(self, range: Range, at: int, n: int) -> None:
        """Record an unmapping that `check_unmap_host` has allowed."""
        self._slots[range.base][1][at : at + n] = array("i", [UNBACKED]) * n

    def pages(self, range: Range) -> dict[int, int]:
        """Return the backed indices of a range with their pages."""
        return {at: page for at, page in enumerate(self._of(range)) if page >= 0}

    def ranges(self) -> list[Range]:
        return [range for range, _ in self._slots.values()]

    def _of(self, range: Range) -> array[int]:
        found = self._slots.get(range.base)
        # Identity first: comparing two ranges costs as much as all else here.
        if found is None or (found[0] is not range and found[0] != range):
            raise BrokenPromise(f"no such range: {range}")
        return found[1]

    def _within(self, range: Range, at: int, n: int) -> array[int]:
        slots = self._of(range)
        if not 0 <= at <= at + n <= len(slots):
            raise BrokenPromise(f"{at} .. {at + n} is outside a range of {len(slots)} pages")
        return slots[at : at + n]
