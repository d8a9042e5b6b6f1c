"""Holders of pages: each use counts, and ends by itself."""

from __future__ import annotations

import pytest

from ballast.core.errors import BrokenPromise
from ballast.memory.page_holders import PageHolders


def test_each_use_of_a_page_ends_by_itself() -> None:
    made = PageHolders()
    made.add([1, 2], "x")
    made.add([1], "x")
    assert (made.of(1), made.of(3), made.held("x")) == (("x", "x"), (), 3)
    with pytest.raises(BrokenPromise, match="page 3 is not held by x"):
        made.remove([1, 3], "x")
    assert made.held("x") == 3, "a refused call changes nothing"
    made.remove([1], "x")
    with pytest.raises(BrokenPromise, match="page 1 is held by x"):
        made.check_none([3, 1])
    made.remove([1, 2], "x")
    made.check_none([1, 2])
    assert not made.by_page


def test_a_held_page_has_another_owner() -> None:
    made = PageHolders()
    made.add([1], "x")
    made.validate(lambda page: "a")
    for owner in (None, "x"):
        with pytest.raises(BrokenPromise, match="its owner is gone"):
            made.validate(lambda page, owner=owner: owner)
