"""Numbers of pages of one's own and of attached devices, and what of them is in use."""

from __future__ import annotations

import pytest

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.page_uses import PageUses
from ballast.memory.vm import window_pages


def test_numbers_are_apart_and_used_again() -> None:
    made = PageUses(8)
    assert [made.attach(n) for n in (4, 6)] == [9, 14]
    made.check([0, 7, 9, 12, 14], attached=True)
    for none in ([13], [8], [20], [-1]):
        with pytest.raises(BrokenPromise):
            made.check(none, attached=True)
    with pytest.raises(BrokenPromise, match="outside"):
        made.check([9])
    made.detach(9)
    assert made.attach(4) == 9
    with pytest.raises(DeviceError, match="no room"):
        made.attach(window_pages(8))


def test_what_is_in_use_is_neither_detached_nor_forgotten() -> None:
    made = PageUses(8)
    first = made.attach(4)
    made.check_enter([first])
    made.enter([first])
    made.counts[first + 1] = 2
    assert [made.is_mapped(first + i) for i in range(3)] == [True, True, False]
    assert [made.is_shared(first + i) for i in range(2)] == [False, True]
    for page in (first, first + 1, 0):
        with pytest.raises(BrokenPromise):
            made.check_away([page])
    made.check_away([first + 2])
    made.counts[first + 1] = 0
    with pytest.raises(BrokenPromise, match="in the window already"):
        made.check_enter([first])
    with pytest.raises(BrokenPromise, match="with some mapped"):
        made.detach(first)
    made.check_leave([first])
    made.leave([first])
    made.detach(first)
