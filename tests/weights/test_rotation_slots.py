"""What a rotation's slots hold, pass by pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.rotation import WHOLE, Rotation
from ballast.weights.rotation_slots import NOBODY, RotationSlots


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    layers = draw(st.lists(st.integers(0, 30), unique=True, min_size=2, max_size=12))
    slots = draw(st.integers(1, len(layers) - 1))
    # Each slot has a layer; the others are anywhere.
    rest = len(layers) - slots
    assigned = [*range(slots), *(draw(st.integers(0, slots - 1)) for _ in range(rest))]
    return Rotation(tuple(sorted(layers)), slots, tuple(draw(st.permutations(assigned))))


def begin(slots: RotationSlots) -> None:
    for slot, layer in slots.lacking():
        slots.put(slot, layer)
    assert slots.lacking() == []


def run(slots: RotationSlots, layers: int) -> None:
    """A pass over so many layers, each of which is in its slot when its turn comes."""
    for layer in range(layers):
        if layer in slots.slot_of:
            assert slots.held[slots.slot_of[layer]] == layer
        following = slots.following(layer)
        if following is not None:
            slot, into = following
            assert slots.put(slot, into) == layer != into


@given(rotations(), st.data())
def test_each_layer_is_in_its_slot_when_a_pass_comes_to_it(
    rotation: Rotation, data: st.DataObject
) -> None:
    slots = RotationSlots()
    held = [data.draw(st.sampled_from((NOBODY, *rotation.layers))) for _ in range(rotation.slots)]
    slots.remap(rotation, held)
    begin(slots)
    run(slots, 31)
    assert slots.lacking() == [], "a pass leaves what the next begins with"
    run(slots, data.draw(st.integers(0, 31)))
    begin(slots)
    run(slots, 31)


def test_a_layer_that_shares_with_none_stays() -> None:
    slots = RotationSlots()
    slots.remap(Rotation((0, 2, 5), 2), (0, 2))
    assert slots.following(2) is None
    assert slots.following(0) == (0, 5)
    assert slots.following(1) is None
    assert list(slots.next_of) == [0, 5]


def test_nothing_rotates_at_first() -> None:
    slots = RotationSlots()
    assert slots.rotation == WHOLE
    assert slots.lacking() == []
    assert slots.following(0) is None
