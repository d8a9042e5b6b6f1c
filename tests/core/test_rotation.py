"""Plans of rotating layers: evenness by brute force, stalls by an event-driven simulation."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.core.rotation import WHOLE, Rotation, best, double, most, single, spread, stall

LAYERS = 12


def gaps(n: int, layers: tuple[int, ...]) -> list[int]:
    return [
        (after - layer) % n or n
        for layer, after in zip(layers, layers[1:] + layers[:1], strict=True)
    ]


def simulated(
    n: int, rotation: Rotation, transfer: Fraction, compute: Fraction, outside: Fraction
) -> Fraction:
    """The mean stall of a pass, run in exact numbers until a state comes back.

    Every slot knows which layer it holds, and a layer is run only from its own slot.
    """
    turns = [list(rotation.of_slot(slot)) for slot in range(rotation.slots)]
    held = [turn[0] for turn in turns]
    there = [Fraction(0)] * rotation.slots
    free = now = Fraction(0)
    seen: dict[object, tuple[int, Fraction]] = {}
    for n_passes in range(10_000):
        state = tuple(max(at - now, Fraction(0)) for at in (free, *there))
        if state in seen:
            before, began = seen[state]
            return (now - began) / (n_passes - before) - (n * compute + outside)
        seen[state] = n_passes, now
        for layer in range(n):
            slot = next((s for s, turn in enumerate(turns) if layer in turn), None)
            if slot is None:
                now += compute
                continue
            assert held[slot] == layer
            now = max(now, there[slot]) + compute
            turn = turns[slot]
            if len(turn) > 1:
                held[slot] = turn[(turn.index(layer) + 1) % len(turn)]
                there[slot] = free = max(now, free) + transfer
        now += outside
    raise AssertionError("no state came back")


@st.composite
def rotations(draw: st.DrawFn) -> tuple[int, Rotation]:
    n = draw(st.integers(2, 16))
    layers = draw(st.sets(st.integers(0, n - 1), min_size=2))
    return n, Rotation(tuple(sorted(layers)), draw(st.integers(1, min(4, len(layers) - 1))))


RATIOS = st.fractions(0, 20, max_denominator=8)


@pytest.mark.parametrize("n", range(1, LAYERS + 1))
def test_even_spacing_has_the_largest_smallest_gap(n: int) -> None:
    for m in range(1, n + 1):
        largest = max(min(gaps(n, choice)) for choice in combinations(range(n), m))
        assert min(gaps(n, spread(n, range(n), m))) == largest == n // m


@given(st.integers(1, LAYERS), st.data())
def test_it_does_where_only_some_can_rotate(n: int, data: st.DataObject) -> None:
    rotatable = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    m = data.draw(st.integers(1, len(rotatable)))
    largest = max(min(gaps(n, choice)) for choice in combinations(rotatable, m))
    chosen = spread(n, rotatable, m)
    assert set(chosen) <= set(rotatable)
    assert min(gaps(n, chosen)) == largest


def test_of_choices_as_even_the_nearest_is_taken() -> None:
    assert spread(8, range(8), 2) == (0, 4)
    assert spread(8, range(8), 2, near=(3,)) == (3, 7)
    assert spread(12, range(12), 3, near=(1, 5, 6)) == (1, 5, 9)
    with pytest.raises(BrokenPromise):
        spread(8, (1, 2), 3)


@given(rotations(), RATIOS, RATIOS)
def test_the_stall_is_that_of_a_simulation(
    made: tuple[int, Rotation], transfer: Fraction, outside: Fraction
) -> None:
    n, rotation = made
    waits = simulated(n, rotation, transfer, Fraction(1), outside)
    assert stall(n, rotation, float(transfer), 1.0, float(outside)) == pytest.approx(
        float(waits), abs=1e-6
    )


def test_layers_that_are_close_on_the_circle_wait() -> None:
    """The paper's example (5.4), counted from 0: layers 1 and 5 of 8, against 1 and 8."""
    assert stall(8, Rotation((0, 4), 1), 3.0, 1.0) == 0.0
    assert stall(8, Rotation((0, 7), 1), 3.0, 1.0) == 3.0


def test_nothing_waits_where_nothing_rotates() -> None:
    assert stall(40, WHOLE, 5.0, 1.0) == 0.0
    assert best(40, tuple(range(40)), 0, 5.0, 1.0) == WHOLE
    assert best(4, (1, 2), 2, 1.0, 1.0) is None


def test_equation_5_is_looser_from_five_layers_of_forty() -> None:
    n = 40
    for alpha in range(1, n - 2):
        ratios = [Fraction(n - alpha - 1, alpha + 1), Fraction(n, alpha + 2)]
        assert (ratios[1] > ratios[0]) == ((alpha + 1) * (alpha + 2) > n) == (alpha >= 5)
        for ratio in ratios:
            assert single(n, alpha, ratio, 1) == (ratio <= ratios[0])
            assert double(n, alpha, ratio, 1) == (ratio <= ratios[1])


def test_no_more_is_lent_than_a_pass_can_bring() -> None:
    assert most(40, range(40), 4.0, 40.0) == 8  # ten loads, two slots
    assert most(40, range(40), 8.0, 40.0) == 3  # one slot: of five loads it would not hide each
    assert most(40, range(40), 8.0, 40.0, slots=1) == 4
    assert most(40, range(40), 41.0, 40.0) == 0
    assert most(40, range(3), 1.0, 40.0) == 2
