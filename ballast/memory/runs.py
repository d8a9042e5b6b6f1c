"""Keep a set of page numbers as runs of neighbours, so that adjacent pages are taken together.

Used by `Pool` for its free pages, by `Borrower` for its unused ones, and by vms, whose calls take
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ballast.core.errors import BrokenPromise


def runs_of(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, length) of each stretch of consecutive pages, in order."""
    i = 0
    while i < len(pages):
        first = i
        i += 1
        while i < len(pages) and pages[i] == pages[i - 1] + 1:
            i += 1
        yield pages[first], i - first


class Runs:
    """A set of pages. Adding neighbours at once and popping a run cost O(1) for any number of
    pages.

    A run is known by its first and by its last page. `_classes[k]` holds the first pages of runs of
    length 2**k .. 2**(k+1) - 1, in the order they came: what comes out depends on the calls alone.
    """

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self._length: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._classes: list[dict[int, None]] = []
        self._n = 0
        self.add(pages)

    def __len__(self) -> int:
        return self._n

    def add(self, pages: Iterable[int]) -> None:
        """`pages` are not in the set; the caller has checked (the ledger knows)."""
        first = length = 0
        for page in pages:
            if length and page == first + length:
                length += 1
                continue
            if length:
                self._add(first, length)
            first, length = page, 1
        if length:
            self._add(first, length)

    def _add(self, first: int, length: int) -> None:
        """Add a run of `length` pages from `first`."""
        after = first + length
        before = self._first.get(first - 1)
        if before is not None:
            length += self._drop(before)
            first = before
        if after in self._length:
            length += self._drop(after)
        self._put(first, length)

    def pop(self, n: int, near: int | None = None) -> list[int]:
        """Remove and return `n` pages, or all if fewer; in as few runs as is cheap to find.

        `near`: a run that starts right after this page is preferred, so that a range growing page
        by page stays one mapping.
        """
        found: list[int] = []
        if near is not None and n and near + 1 in self._length:
            found += self._cut(near + 1, n)
        while len(found) < n and self._n:
            found += self._cut(self._best(n - len(found)), n - len(found))
        return found

    def runs(self) -> list[tuple[int, int]]:
        """(first page, length), in no particular order."""
        return list(self._length.items())

    def mask(self, total: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(total,) bool: which pages are in the set. Raises BrokenPromise if runs overlap."""
        edges = np.zeros(total + 1, dtype=np.int64)
        if self._length:
            first = np.fromiter(self._length.keys(), dtype=np.int64)
            length = np.fromiter(self._length.values(), dtype=np.int64)
            np.add.at(edges, first, 1)
            np.add.at(edges, first + length, -1)
        depth = np.cumsum(edges)[:total]
        if depth.max(initial=0) > 1 or int(depth.sum()) != self._n:
            raise BrokenPromise("runs of free pages overlap or miscount")
        return np.equal(depth, 1)

    def _best(self, n: int) -> int:
        """First page of the smallest class of runs that holds `n`, else of the longest class."""
        least = (n - 1).bit_length()
        for k in range(least, len(self._classes)):
            if self._classes[k]:
                return next(iter(self._classes[k]))
        for k in range(min(least, len(self._classes)) - 1, -1, -1):
            if self._classes[k]:
                return next(iter(self._classes[k]))
        raise BrokenPromise("took from an empty set of pages")

    def _cut(self, first: int, most: int) -> list[int]:
        length = self._drop(first)
        n = min(length, most)
        if n < length:
            self._put(first + n, length - n)
        return list(range(first, first + n))

    def _put(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        k = length.bit_length() - 1
        while len(self._classes) <= k:
            self._classes.append({})
        self._classes[k][first] = None
        self._n += length

    def _drop(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        del self._classes[length.bit_length() - 1][first]
        self._n -= length
        return length
