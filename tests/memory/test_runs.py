"""Runs of free pages: the same set as a plain one, with neighbours together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.memory.runs import Runs


def test_neighbours_merge_from_both_sides() -> None:
    runs = Runs([3, 5, 4])
    assert runs.runs() == [(3, 3)]
    assert len(runs) == 3


def test_a_fitting_run_is_preferred_to_breaking_a_longer_one() -> None:
    runs = Runs([0, 1, 2, 3, 4, 5, 6, 7, 20, 21])
    assert runs.pop(2) == [20, 21]
    assert runs.pop(8) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_when_none_fits_the_longest_come_first() -> None:
    runs = Runs([0, 1, 10, 11, 12, 13, 20])
    assert runs.pop(6) == [10, 11, 12, 13, 0, 1]


def test_near_continues_a_growing_range() -> None:
    runs = Runs(range(16))
    assert runs.pop(2) == [0, 1]
    assert Runs([4, 5, 9, 10]).pop(1, near=8) == [9]
    assert runs.pop(3, near=1) == [2, 3, 4]


def test_take_gives_what_there_is() -> None:
    assert sorted(Runs([1, 5]).pop(9)) == [1, 5]
    assert Runs().pop(1) == []


def test_mask_finds_an_overlap() -> None:
    runs = Runs([0, 1, 2])
    runs.add([1])
    with pytest.raises(BrokenPromise):
        runs.mask(8)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(-1, 40)), max_size=60))
def test_like_a_plain_set(steps: list[tuple[bool, int, int]]) -> None:
    runs, plain = Runs(), set[int]()
    for add, n, near in steps:
        if add:
            if n not in plain:
                runs.add([n])
                plain.add(n)
        else:
            got = runs.pop(n, near if near >= 0 else None)
            assert len(got) == len(set(got)) == min(n, len(plain))
            assert set(got) <= plain
            plain -= set(got)
        assert len(runs) == len(plain)
        assert [p for p, there in enumerate(runs.mask(41)) if there] == sorted(plain)
        ends = [(first, first + length) for first, length in sorted(runs.runs())]
        assert all(a[1] < b[0] for a, b in pairwise(ends))
