"""Record which page is mapped at which range index, and check each vm call against it.

Used by all implementations of `Vm`. Bookkeeping only; maps nothing itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.vm import Range, window_pages

UNBACKED = -1
HOST = -2
"""Index at which host memory is mapped, and no page."""
_UNKNOWN = -1


class MappingTable:
    """Mappings of a vm's pages. A call that raises has changed nothing.

    `_slots[base][at]` is the page at index `at` of the range at `base`, or UNBACKED;
    `_uses[page]` is the number of range indices that the page backs. Pages of attached devices
    come after one's own, with a number between any two devices that is no page (_UNKNOWN), so that
    no two pages that are neighbours in number lie on different devices.
    """

    def __init__(self, n_pages: int) -> None:
        self._slots: dict[int, tuple[Range, array[int]]] = {}
        self._uses = array("i", [0]) * n_pages
        self._own = n_pages
        self._attached: dict[int, int] = {}
        self._entered: set[int] = set()
        """Attached pages in the window."""

    def attach(self, n_pages: int) -> int:
        """Number `n_pages` pages of another device; return the first number. Numbers of detached
        pages are reused. Raises DeviceError if the window ends before the last."""
        first = self._own + 1
        for start, n in sorted(self._attached.items()):
            if first + n_pages < start:
                break
            first = start + n + 1
        if first + n_pages > window_pages(self._own):
            raise DeviceError("attach", f"the window has no room for {n_pages} pages at {first}")
        more = first + n_pages - len(self._uses)
        self._uses.extend(array("i", [_UNKNOWN]) * max(0, more))
        self._uses[first : first + n_pages] = array("i", [0]) * n_pages
        self._attached[first] = n_pages
        return first

    def check_detach(self, first: int) -> None:
        n = self._attached.get(first)
        if n is None:
            raise BrokenPromise(f"no device is attached at {first}")
        here = range(first, first + n)
        if any(self._uses[first : first + n]) or not self._entered.isdisjoint(here):
            raise BrokenPromise(f"detached a device of {n} pages with some mapped")

    def detach(self, first: int) -> None:
        self.check_detach(first)
        n = self._attached[first]
        self._uses[first : first + n] = array("i", [_UNKNOWN]) * n
        del self._attached[first]

    def check_enter(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise unless all pages are attached ones, each once and not in the window
        yet."""
        self.check_pages(pages, attached=True)
        if len(set(pages)) < len(pages) or not self._entered.isdisjoint(pages):
            raise BrokenPromise(f"one of {list(pages)} is in the window already")
        if pages and min(pages) < self._own:
            raise BrokenPromise(f"own pages among {list(pages)}, which are in the window anyway")

    def enter(self, pages: Iterable[int]) -> None:
        """Record pages that `check_enter` has allowed as in the window."""
        self._entered.update(pages)

    def check_leave(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise unless all these pages are attached ones in the window."""
        if not self._entered.issuperset(pages):
            raise BrokenPromise(f"not all of {list(pages)} are attached pages in the window")

    def leave(self, pages: Iterable[int]) -> None:
        self._entered.difference_update(pages)

    def entered(self) -> list[int]:
        """Return the attached pages in the window, ascending."""
        return sorted(self._entered)

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
        self.check_pages(pages, attached=True)
        if alias:
            return
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise BrokenPromise("a page occurs twice in one call without alias")
        for page in pages:
            if self._uses[page]:
                raise BrokenPromise(f"page {page} is mapped already; only an alias may share it")

    def map(self, range: Range, at: int, pages: Sequence[int]) -> None:
        """Record a mapping that `check_map` has allowed."""
        self._slots[range.base][1][at : at + len(pages)] = array("i", pages)
        for page in pages:
            self._uses[page] += 1

    def check_unmap(self, range: Range, at: int, n: int) -> array[int]:
        """Return the pages mapped at these indices. Raises BrokenPromise if one is unmapped."""
        pages = self._within(range, at, n)
        if pages and min(pages) < 0:
            raise BrokenPromise(f"unmapped what is not mapped within {at} .. {at + n}")
        return pages

    def unmap(self, range: Range, at: int, n: int) -> None:
        """Record an unmapping that `check_unmap` has allowed."""
        slots = self._slots[range.base][1]
        for page in slots[at : at + n]:
            self._uses[page] -= 1
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

    def check_pages(self, pages: Sequence[int], *, attached: bool = False) -> None:
        """Raises BrokenPromise unless all pages lie on the device, or, if `attached`, on attached
        ones too."""
        if not pages:
            return
        low, high = min(pages), max(pages)
        if low < 0 or high >= (len(self._uses) if attached else self._own):
            raise BrokenPromise(f"pages outside 0 .. {self._own}: {low}, {high}")
        if high >= self._own and any(self._uses[page] == _UNKNOWN for page in pages):
            raise BrokenPromise(f"pages of no device among {low} .. {high}")

    def check_unused(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise if one of the pages is mapped."""
        self.check_pages(pages)
        for page in pages:
            if self._uses[page]:
                raise BrokenPromise(f"page {page} is mapped")

    def check_away(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise unless all pages lie on attached devices and none is mapped."""
        self.check_pages(pages, attached=True)
        for page in pages:
            if page < self._own or self._uses[page] or page in self._entered:
                raise BrokenPromise(f"page {page} is mapped, or our own")

    def is_mapped(self, page: int) -> bool:
        """Return whether the page is mapped in a range, or, an attached one, in the window."""
        return self._uses[page] > 0 or page in self._entered

    def is_shared(self, page: int) -> bool:
        """Return whether the page is mapped more than once."""
        return self._uses[page] > 1

    def pages(self, range: Range) -> dict[int, int]:
        """Return the backed indices of a range with their pages."""
        return {at: page for at, page in enumerate(self._of(range)) if page >= 0}

    def ranges(self) -> list[Range]:
        return [range for range, _ in self._slots.values()]

    def runs(self) -> int:
        """Return the number of runs, over all ranges, that are unbacked or backed by adjacent
        pages."""
        total = 0
        for _, slots in self._slots.values():
            before = None
            for page in slots:
                follows = page == before if page < 0 else page - 1 == before
                total += not follows
                before = page
        return total

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
