"""Record what is mapped at each index of a range: a page, host memory, or nothing.

Used by `BackedRange`, which maps it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from ballast.core.errors import BrokenPromise

EMPTY = -1
LEAVING = -2
"""Index that is still mapped while its page is reclaiming: new work must not use it, and it cannot
be backed again yet."""
HOST = -3
"""Index at which host memory is mapped."""


class RangeIndices:
    """Indices `0 .. n - 1` of one owner's range, each with its page or one of the marks above."""

    def __init__(self, owner: str, n: int) -> None:
        self.closed = False
        """Whether the range is closed: no index may be used any more."""
        self._owner = owner
        self._slots = array("i", [EMPTY]) * n

    def within(self, at: int, n: int) -> array[int]:
        """Return pages and marks of `n` indices from `at`. Raises BrokenPromise beyond the end."""
        if self.closed:
            raise BrokenPromise(f"{self._owner}: the range is closed")
        if not 0 <= at <= at + n <= len(self._slots):
            raise BrokenPromise(
                f"{self._owner}: {at} .. {at + n} is outside {len(self._slots)} pages"
            )
        return self._slots[at : at + n]

    def pages(self, at: int, n: int) -> tuple[int, ...]:
        """Return the pages of `n` indices from `at`. Raises BrokenPromise if one has none."""
        pages = tuple(self.within(at, n))
        if pages and min(pages) < 0:
            raise BrokenPromise(f"{self._owner}: not all of {at} .. {at + n} is backed")
        return pages

    def page_before(self, at: int) -> int | None:
        """Return the page of the index before `at`, if it has one."""
        page = self._slots[at - 1] if at else EMPTY
        return page if page >= 0 else None

    def put(self, at: int, pages: Sequence[int]) -> None:
        """Record pages at indices `at ..`."""
        self._slots[at : at + len(pages)] = array("i", pages)

    def mark(self, at: int, n: int, mark: int) -> None:
        """Record that `n` indices from `at` have no page: EMPTY, LEAVING or HOST."""
        self._slots[at : at + n] = array("i", [mark]) * n

    def leaving(self, where: Sequence[tuple[int, int]]) -> int:
        """Count the leaving indices of several `(at, n)`. Raises BrokenPromise if one is backed, or
        named twice."""
        leaving = 0
        for at, n in where:
            slots = self.within(at, n)
            here = slots.count(LEAVING)
            leaving += here
            if slots.count(EMPTY) + here != n:
                raise BrokenPromise(f"{self._owner}: part of {at} .. {at + n} is backed already")
        for (at, n), (after, _) in pairwise(sorted(where)):
            if at + n > after:
                raise BrokenPromise(f"{self._owner}: index {after} is named twice")
        return leaving

    def check_empty(self, at: int, n: int) -> None:
        """Raises BrokenPromise unless all of `n` indices from `at` are empty."""
        if self.leaving(((at, n),)):
            raise BrokenPromise(f"{self._owner}: pages at {at} .. are still leaving")

    def all_pages(self) -> list[int]:
        """Return the pages of all indices that have one, in their order."""
        return [page for page in self._slots if page >= 0]

    def count(self, mark: int) -> int:
        """Count the indices that are EMPTY, LEAVING or HOST."""
        return self._slots.count(mark)

    def stretches(self) -> list[tuple[int, int]]:
        """Return maximal `(at, n)` of indices that have pages."""
        found: list[tuple[int, int]] = []
        for at, page in enumerate(self._slots):
            if page < 0:
                continue
            if found and found[-1][0] + found[-1][1] == at:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((at, 1))
        return found
