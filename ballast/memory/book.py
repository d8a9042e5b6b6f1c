"""Which page is mapped where: the book that every vm keeps and every call is checked against."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ballast.core.errors import BrokenPromise
from ballast.memory.vm import Range

UNBACKED = -1


class MapBook:
    """Checks first, writes after: a call that raises has changed nothing.

    `_slots[base][at]` is the page at index `at` of the range at `base`, or UNBACKED;
    `_uses[page]` is the number of range indices that the page backs.
    """

    def __init__(self, n_pages: int) -> None:
        self._slots: dict[int, tuple[Range, array[int]]] = {}
        self._uses = array("i", [0]) * n_pages

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
        self.check_pages(pages)
        if alias:
            return
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise BrokenPromise("a page occurs twice in one call without alias")
        for page in pages:
            if self._uses[page]:
                raise BrokenPromise(f"page {page} is mapped already; only an alias may share it")

    def map(self, range: Range, at: int, pages: Sequence[int]) -> None:
        """The caller has checked."""
        self._slots[range.base][1][at : at + len(pages)] = array("i", pages)
        for page in pages:
            self._uses[page] += 1

    def check_unmap(self, range: Range, at: int, n: int) -> None:
        if UNBACKED in self._within(range, at, n):
            raise BrokenPromise(f"unmapped what is not mapped within {at} .. {at + n}")

    def unmap(self, range: Range, at: int, n: int) -> None:
        """The caller has checked."""
        slots = self._slots[range.base][1]
        for page in slots[at : at + n]:
            self._uses[page] -= 1
        slots[at : at + n] = array("i", [UNBACKED]) * n

    def check_pages(self, pages: Sequence[int]) -> None:
        """All lie on the device."""
        if pages and (min(pages) < 0 or max(pages) >= len(self._uses)):
            raise BrokenPromise(f"pages outside 0 .. {len(self._uses)}: {min(pages)}, {max(pages)}")

    def check_unused(self, pages: Sequence[int]) -> None:
        """None is mapped."""
        self.check_pages(pages)
        for page in pages:
            if self._uses[page]:
                raise BrokenPromise(f"page {page} is mapped")

    def mapped(self, range: Range) -> int:
        slots = self._of(range)
        return len(slots) - slots.count(UNBACKED)

    def ranges(self) -> list[Range]:
        return [range for range, _ in self._slots.values()]

    def runs(self) -> int:
        """Stretches of one kind (backed by adjacent pages, or unbacked) over all ranges."""
        total = 0
        for _, slots in self._slots.values():
            before = None
            for page in slots:
                follows = page == before if page == UNBACKED else page - 1 == before
                total += not follows
                before = page
        return total

    def _of(self, range: Range) -> array[int]:
        found = self._slots.get(range.base)
        if found is None or found[0] != range:
            raise BrokenPromise(f"no such range: {range}")
        return found[1]

    def _within(self, range: Range, at: int, n: int) -> array[int]:
        slots = self._of(range)
        if not 0 <= at <= at + n <= len(slots):
            raise BrokenPromise(f"{at} .. {at + n} is outside a range of {len(slots)} pages")
        return slots[at : at + n]
