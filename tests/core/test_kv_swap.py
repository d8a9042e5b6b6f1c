"""Layers whose KV is swapped: how they are spread, and what a pass takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.kv_swap import spread, swapped_seconds
from ballast.core.link import LinkRates
from ballast.core.rotation import WHOLE, Rotation

RATES = LinkRates(100.0, 100.0, 50.0, 50.0)


@given(st.integers(1, 80))
def test_each_spread_holds_the_smaller_ones(n: int) -> None:
    before: set[int] = set()
    for m in range(n + 1):
        layers = spread(n, m)
        assert list(layers) == sorted(set(layers))
        assert len(layers) == m
        assert before <= set(layers) <= set(range(n))
        before = set(layers)


def test_spreads_that_can_be_even_are() -> None:
    assert spread(40, 3) == (10, 20, 30)
    assert spread(32, 7) == (4, 8, 12, 16, 20, 24, 28)


def test_what_does_not_rotate_does_not_wait() -> None:
    assert swapped_seconds(8, WHOLE, 3.0, 1000, 1000, RATES) == 3.0


def test_one_slot_loads_when_it_is_stored() -> None:
    # Layers of 1 s; 0 is loaded from 0 to 2, done at 3, stored until 5; 2 is loaded until 7 and,
    # as the layer before it was done long ago, done at 8, stored until 10.
    seconds = swapped_seconds(4, Rotation((0, 2), 1), 4.0, 200, 200, RATES)
    assert seconds == pytest.approx(10.0)


def test_loads_and_stores_that_overlap_slow_each_other() -> None:
    # Of three layers of 1 s, 0 and 1 have slots of their own and 2 that of 0. Loads of 0 and 1
    # end at 1 and 2. 0 is done at 2 and stored until 3, alone; 1 is done at 3 and stored beside
    # the load of 2, both until 5; that runs until 6, and is stored until 7.
    seconds = swapped_seconds(3, Rotation((0, 1, 2), 2), 3.0, 100, 100, RATES)
    assert seconds == pytest.approx(7.0)


def test_short_copies_hide() -> None:
    rotation = Rotation(spread(40, 7), 2)
    assert swapped_seconds(40, rotation, 40.0, 100, 100, RATES) == pytest.approx(40.0)


@given(
    n=st.integers(2, 40),
    data=st.data(),
    seconds=st.floats(0.1, 100.0),
    loaded=st.integers(0, 2000),
    stored=st.integers(0, 2000),
)
def test_a_pass_takes_no_less_than_any_one_resource(
    n: int, data: st.DataObject, seconds: float, loaded: int, stored: int
) -> None:
    m = data.draw(st.integers(2, n))
    slots = data.draw(st.integers(1, m - 1))
    rotation = Rotation(spread(n, m), slots)
    taken = swapped_seconds(n, rotation, seconds, loaded, stored, RATES)
    assert taken >= max(seconds, m * loaded / 100.0, m * stored / 100.0) * (1 - 1e-9)
    assert taken >= m * (loaded + stored) / 100.0 * (1 - 1e-9)  # both at once carry no more
    # One after the other is the worst.
    assert taken <= (seconds + m * (loaded + stored) / 100.0) * (1 + 1e-9)
    assert swapped_seconds(n, rotation, seconds, loaded + 1, stored, RATES) >= taken * (1 - 1e-9)
