"""What is at each index of a range: pages, marks, and what may be backed."""

from __future__ import annotations

import pytest

from ballast.core.errors import BrokenPromise
from ballast.memory.range_indices import EMPTY, HOST, LEAVING, RangeIndices


def test_pages_and_marks() -> None:
    made = RangeIndices("a", 8)
    made.put(1, (5, 6))
    made.put(4, (9,))
    made.mark(5, 1, LEAVING)
    made.mark(6, 1, HOST)
    assert made.all_pages() == [5, 6, 9]
    assert made.stretches() == [(1, 2), (4, 1)]
    assert (made.count(EMPTY), made.count(LEAVING), made.count(HOST)) == (3, 1, 1)
    assert [made.page_before(at) for at in (0, 2, 6)] == [None, 5, None]
    assert made.pages(1, 2) == (5, 6)
    with pytest.raises(BrokenPromise, match="not all of 1"):
        made.pages(1, 3)


def test_only_empty_indices_may_be_backed() -> None:
    made = RangeIndices("a", 6)
    made.put(0, (5,))
    made.mark(2, 2, LEAVING)
    made.mark(5, 1, HOST)
    assert made.leaving(((1, 2), (3, 2))) == 2
    made.check_empty(4, 1)
    with pytest.raises(BrokenPromise, match="still leaving"):
        made.check_empty(1, 2)
    for at in (0, 5):
        with pytest.raises(BrokenPromise, match="backed already"):
            made.check_empty(at, 1)
    with pytest.raises(BrokenPromise, match="index 2 is named twice"):
        made.leaving(((2, 2), (1, 2)))
    with pytest.raises(BrokenPromise, match="outside 6 pages"):
        made.within(5, 2)
    made.closed = True
    with pytest.raises(BrokenPromise, match="closed"):
        made.within(0, 1)
