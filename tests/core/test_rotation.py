"""Plans of rotating layers: evenness by brute force, stalls by an event-driven simulation."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.core.rotation import (
    REMAPPED,
    WHOLE,
    Rotation,
    best,
    double,
    most,
    single,
    spread,
    stall,
)
from tests.effort import tries

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


def test_a_slot_holds_its_layers_in_a_circle() -> None:
    rotation = Rotation((1, 2, 4, 5, 7), 3)
    assert rotation.slot_of == {1: 0, 2: 1, 4: 2, 5: 0, 7: 1}
    assert rotation.next_of == {1: 5, 5: 1, 2: 7, 7: 2, 4: 4}
    assert WHOLE.slot_of == WHOLE.next_of == {}


def test_slots_are_as_stated() -> None:
    rotation = Rotation((1, 2, 4, 5, 7), 2, (1, 0, 0, 1, 0))
    assert rotation.slot_of == {1: 1, 2: 0, 4: 0, 5: 1, 7: 0}
    assert rotation.next_of == {2: 4, 4: 7, 7: 2, 1: 5, 5: 1}
    assert rotation.of_slot(0) == (2, 4, 7)
    assert rotation.first == (2, 1)
    assert (rotation.n_freed, rotation.loads) == (3, 5)
    assert Rotation.of(rotation.slot_of) == rotation
    assert Rotation((0, 3, 5), 2, (0, 1, 0)) == Rotation((0, 3, 5), 2), "in turn"
    assert rotation.remapped(rotation) == 0
    assert rotation.remapped(WHOLE) == WHOLE.remapped(rotation) == 5
    assert rotation.remapped(Rotation((1, 2, 3, 5, 7), 2, (1, 0, 1, 0, 0))) == 3


def test_a_rotation_that_cannot_be_is_refused() -> None:
    assert WHOLE.refusal(()) is Rotation((0, 2), 1).refusal(range(3)) is None
    for slots in (0, 2, 3):
        assert "2 layers cannot rotate" in (Rotation((0, 2), slots).refusal(range(3)) or "")
    for layers in ((2, 0), (0, 0)):
        assert "once each, in order" in (Rotation(layers, 1).refusal(range(3)) or "")
    for layers in ((0, 3), (-1, 0)):
        assert "not all can rotate" in (Rotation(layers, 1).refusal(range(3)) or "")
    for assigned in ((0, 0, 0), (0, 1, 2), (1, 0, -1)):
        wrong = Rotation((0, 1, 2), 2, assigned)
        assert "each of 2 slots has layers" in (wrong.refusal(range(3)) or "")
    assert "for 2 of 3 layers" in (Rotation((0, 1, 2), 2, (0, 1)).refusal(range(3)) or "")


@st.composite
def rotations(draw: st.DrawFn) -> tuple[int, Rotation]:
    n = draw(st.integers(2, 16))
    layers = draw(st.sets(st.integers(0, n - 1), min_size=2))
    slots = draw(st.integers(1, min(4, len(layers) - 1)))
    # Each slot has a layer; the others are anywhere.
    rest = len(layers) - slots
    assigned = [*range(slots), *(draw(st.integers(0, slots - 1)) for _ in range(rest))]
    return n, Rotation(tuple(sorted(layers)), slots, tuple(draw(st.permutations(assigned))))


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


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, float, float]:
    """Layers, those that can rotate, how many are lent; a copy and what is outside, in layers."""
    n = draw(st.integers(3, 8))
    rotatable = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2))))
    alpha = draw(st.integers(1, len(rotatable) - 1))
    return n, rotatable, alpha, float(draw(RATIOS)), draw(st.integers(0, 16)) / 4


@settings(max_examples=tries(25, all=60))
@given(worlds())
def test_no_plan_waits_less_or_brings_less_as_brute_force_finds(
    world: tuple[int, tuple[int, ...], int, float, float],
) -> None:
    n, rotatable, alpha, transfer, outside = world
    plan = best(n, rotatable, alpha, transfer, 1.0, outside)
    assert plan is not None
    assert plan.n_freed == alpha
    assert set(plan.layers) <= set(rotatable)
    every = [
        Rotation(layers, slots)
        for slots in range(1, min(3, len(rotatable) - alpha) + 1)
        for layers in combinations(rotatable, alpha + slots)
    ]
    wait, loads = min((stall(n, one, transfer, 1.0, outside), one.loads) for one in every)
    assert stall(n, plan, transfer, 1.0, outside) == pytest.approx(wait, abs=1e-6)
    if wait == 0.0:
        assert plan.loads == loads


BELOW, ABOVE = 1 - 1e-7, 1 + 1e-5
"""Just short of a bound on the copy, and just beyond."""


def hidden(n: int, rotation: Rotation, transfer: float) -> bool:
    return stall(n, rotation, transfer, 1.0) == 0.0


@pytest.mark.parametrize("n", range(2, 49))
def test_one_slot_hides_what_the_smallest_gap_hides(n: int) -> None:
    """Equation 4 speaks of the mean gap, n / m; what counts is the smallest, its floor."""
    for alpha in range(1, n):
        m = alpha + 1
        bound = n // m - 1
        plan = Rotation(spread(n, range(n), m), 1)
        assert hidden(n, plan, bound * BELOW)
        assert not hidden(n, plan, bound * ABOVE + 1e-5)
        assert single(n, alpha, bound, 1.0)
        assert single(n, alpha, bound * ABOVE + 1e-5, 1.0) == (n % m > 0)


@pytest.mark.parametrize("n", range(4, 49))
def test_two_slots_used_in_turn_hide_what_equation_5_says(n: int) -> None:
    """Where two slots are used in turn (even m) and gaps are of two layers and more, it is exact.

    Below, what counts are runs of loads: of any L in a row, the first begins after one layer has
    run, and the last ends before L + 1 gaps have.
    """
    for m in range(4, n + 1, 2):
        plan = Rotation(spread(n, range(n), m), 2)
        runs = min(((run + 1) * n // m - 1) / run for run in range(1, m + 1))
        bound = min(n / m, runs)
        assert hidden(n, plan, bound * BELOW)
        assert not hidden(n, plan, bound * ABOVE + 1e-5)
        assert double(n, plan.n_freed, bound * BELOW, 1.0)
        if n >= 2 * m or n % m == 0:
            assert bound == n / m


@pytest.mark.parametrize("n", range(10, 49))
def test_an_odd_wrap_costs_one_layer(n: int) -> None:
    """With odd m the last and the first share a slot: all m loads lie between one layer's use and
    its next, in n - 1 layers. The even spacing does worse than that; other layers reach it.
    """
    for m in range(5, n // 2 + 1, 2):
        bound = (n - 1) / m
        plan = best(n, tuple(range(n)), m - 2, bound * BELOW, 1.0, slots=2)
        assert plan is not None
        assert hidden(n, plan, bound * BELOW)
        assert not hidden(n, plan, bound * ABOVE)
        # A layer's time beside the layers makes up for it.
        plan = best(n, tuple(range(n)), m - 2, n / m * BELOW, 1.0, 1.0, slots=2)
        assert plan is not None
        assert stall(n, plan, n / m * BELOW, 1.0, 1.0) == 0.0


def test_loading_the_next_but_one_overwrites_where_the_circle_closes() -> None:
    """Three layers, two slots: after the second, the next but one is the first, whose slot holds
    the third, not run yet. A slot's next layer is never asked for before its last is done.
    """
    rotation = Rotation((0, 4, 8), 2)
    held, wrong = {0: 0, 1: 1}, []
    for i in (0, 1, 2, 0, 1, 2):
        if held[i % 2] != i:
            wrong.append(i)
        after = (i + 2) % 3
        held[after % 2] = after
    assert wrong == [2, 2]
    for n in range(9, 13):
        assert simulated(n, rotation, Fraction(3), Fraction(1), Fraction(0)) == stall(
            n, rotation, 3.0, 1.0
        )


@given(st.integers(4, 32), st.floats(0.1, 8), st.lists(st.integers(1, 31), min_size=2, max_size=8))
def test_a_plan_in_force_changes_only_what_saves_more_stall_than_that_costs(
    n: int, transfer: float, alphas: list[int]
) -> None:
    every = tuple(range(n))
    now = WHOLE
    for alpha in alphas:
        fresh = best(n, every, alpha, transfer, 1.0)
        if fresh is None:
            continue
        plan = best(n, every, alpha, transfer, 1.0, now=now)
        assert plan is not None
        assert best(n, every, alpha, transfer, 1.0, now=fresh) == fresh
        assert cost(n, now, plan, transfer) <= cost(n, now, fresh, transfer) + 1e-6
        now = plan


def cost(n: int, now: Rotation, after: Rotation, transfer: float) -> float:
    needless = now.remapped(after) - abs(len(after.layers) - len(now.layers))
    return stall(n, after, transfer, 1.0) + REMAPPED * n * needless


@pytest.mark.parametrize("n", [32, 40, 80])
@pytest.mark.parametrize("transfer", [1.0, 1.3, 2.0, 4.0])
def test_a_layer_more_or_less_leaves_the_others_where_they_are(n: int, transfer: float) -> None:
    every = tuple(range(n))
    top = most(n, every, transfer, float(n))
    now = WHOLE
    for alpha in (*range(1, top + 1), *range(top - 1, 0, -1)):
        plan = best(n, every, alpha, transfer, 1.0, now=now)
        assert plan is not None
        if alpha + now.slots <= n:  # else a slot has to go, with the places of its layers
            assert now.remapped(plan) <= 4
        now = plan


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


def test_the_paper_s_nine_layers_of_forty_hold_for_some_copies_only() -> None:
    """5.4 says two slots "when alpha >= 9": where equation 4 holds for eight layers and fails for
    nine, and equation 5 still holds for nine.
    """
    low, high = Fraction(40 - 10, 10), Fraction(40 - 9, 9)
    assert (low, float(high)) == (3, pytest.approx(3.444, abs=1e-3))
    for ratio in (Fraction(k, 100) for k in range(250, 400)):
        first = next(alpha for alpha in range(1, 39) if not single(40, alpha, ratio, 1))
        assert (first == 9) == (low < ratio <= high)
        assert not low < ratio <= high or double(40, 9, ratio, 1)


def test_no_more_is_lent_than_a_pass_can_bring() -> None:
    assert most(40, range(40), 4.0, 40.0) == 8  # ten loads, two slots
    assert most(40, range(40), 8.0, 40.0) == 3  # one slot: of five loads it would not hide each
    assert most(40, range(40), 8.0, 40.0, slots=1) == 4
    assert most(40, range(40), 41.0, 40.0) == 0
    assert most(40, range(3), 1.0, 40.0) == 2
