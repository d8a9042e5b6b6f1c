"""Number the pages of a vm and of the devices attached to it, and count where they are mapped.

Used by `MappingTable` and the implementations of `Vm`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.vm import window_pages

_UNKNOWN = -1


class PageUses:
    """Uses of a device's own pages and of attached ones. A call that raises has changed nothing.

    Pages of attached devices come after one's own, with a number between any two devices that is no
    page (_UNKNOWN), so that no two pages that are neighbours in number lie on different devices.
    """

    def __init__(self, n_pages: int) -> None:
        self.counts = array("i", [0]) * n_pages
        """By page, the range indices that it backs, kept by `MappingTable`."""
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
        more = first + n_pages - len(self.counts)
        self.counts.extend(array("i", [_UNKNOWN]) * max(0, more))
        self.counts[first : first + n_pages] = array("i", [0]) * n_pages
        self._attached[first] = n_pages
        return first

    def check_detach(self, first: int) -> None:
        n = self._attached.get(first)
        if n is None:
            raise BrokenPromise(f"no device is attached at {first}")
        here = range(first, first + n)
        if any(self.counts[first : first + n]) or not self._entered.isdisjoint(here):
            raise BrokenPromise(f"detached a device of {n} pages with some mapped")

    def detach(self, first: int) -> None:
        self.check_detach(first)
        n = self._attached[first]
        self.counts[first : first + n] = array("i", [_UNKNOWN]) * n
        del self._attached[first]

    def check_enter(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise unless all pages are attached ones, each once and not in the window
        yet."""
        self.check(pages, attached=True)
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

    def check(self, pages: Sequence[int], *, attached: bool = False) -> None:
        """Raises BrokenPromise unless all pages lie on the device, or, if `attached`, on attached
        ones too."""
        if not pages:
            return
        low, high = min(pages), max(pages)
        if low < 0 or high >= (len(self.counts) if attached else self._own):
            raise BrokenPromise(f"pages outside 0 .. {self._own}: {low}, {high}")
        if high >= self._own and any(self.counts[page] == _UNKNOWN for page in pages):
            raise BrokenPromise(f"pages of no device among {low} .. {high}")

    def check_unused(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise if one of the pages is mapped."""
        self.check(pages)
        for page in pages:
            if self.counts[page]:
                raise BrokenPromise(f"page {page} is mapped")

    def check_away(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise unless all pages lie on attached devices and none is mapped."""
        self.check(pages, attached=True)
        for page in pages:
            if page < self._own or self.counts[page] or page in self._entered:
                raise BrokenPromise(f"page {page} is mapped, or our own")

    def is_mapped(self, page: int) -> bool:
        """Return whether the page is mapped in a range, or, an attached one, in the window."""
        return self.counts[page] > 0 or page in self._entered

    def is_shared(self, page: int) -> bool:
        """Return whether the page is mapped more than once."""
        return self.counts[page] > 1
