"""Layers share slots: pages add up after every change, and each layer lies where it should."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm_null import NullVm
from ballast.weights.slots import LayerPages, Slots

PAGE = 4096


def made(n: int, pages: int, spare: int = 0) -> tuple[Pool, BackedRange, Slots]:
    """A model of `n` layers of so many pages, all there, in a pool with `spare` pages more."""
    pool = Pool(NullVm(PAGE, n * pages + spare), n * pages + spare)
    weights = BackedRange(pool, pool.vm, "weights:a", n * pages * PAGE)
    slots = Slots("a", pool, weights)
    slots.tabulate([LayerPages(i * pages, pages, pages * PAGE - 5, True) for i in range(n)])
    assert weights.back(0, n * pages) is None
    return pool, weights, slots


@st.composite
def rotations(draw: st.DrawFn, n: int) -> Rotation:
    layers = draw(st.sets(st.integers(0, n - 1)))
    if len(layers) < 2:
        return WHOLE
    slots = draw(st.integers(1, len(layers) - 1))
    # Each slot has a layer; the others are anywhere.
    rest = len(layers) - slots
    assigned = [*range(slots), *(draw(st.integers(0, slots - 1)) for _ in range(rest))]
    return Rotation(tuple(sorted(layers)), slots, tuple(draw(st.permutations(assigned))))


@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 3), st.data())
def test_pages_add_up(n: int, pages: int, spare: int, data: st.DataObject) -> None:
    pool, weights, slots = made(n, pages, spare)
    held: tuple[int, ...] = ()
    bytes_at = {weights.pages(i * pages, pages): i for i in range(n)}
    for _ in range(8):
        wanted = data.draw(rotations(n))
        before = slots.rotation
        free = pool.free
        turned = slots.remap(wanted, held)
        if isinstance(turned, Short):
            assert turned.pages == (before.n_freed - wanted.n_freed) * pages - free > 0
            assert slots.rotation == before
            continue
        slots.validate()
        weights.validate()
        pool.validate()
        assert pool.total - pool.free == (n - wanted.n_freed) * pages
        assert slots.pages == wanted.slots * pages
        # What it says is there, is there; all else has to be brought.
        for slot, layer in enumerate(turned.held):
            here = weights.pages(wanted.first[slot] * pages, pages)
            assert layer == -1 or bytes_at[here] == layer
            assert layer in (-1, *wanted.of_slot(slot))
        there = {
            i
            for i in range(n)
            if i not in wanted.layers and bytes_at.get(weights.pages(i * pages, pages)) == i
        }
        assert set(turned.missing) >= set(range(n)) - set(wanted.layers) - there
        assert not set(turned.missing) & set(wanted.layers)
        # All is brought; then each slot holds any of its layers.
        held = tuple(data.draw(st.sampled_from(wanted.of_slot(s))) for s in range(wanted.slots))
        bytes_at = {
            weights.pages(i * pages, pages): i for i in range(n) if i not in wanted.layers
        } | {weights.pages(i * pages, pages): i for i in held}
    slots.dissolve()
    pool.validate()


def test_only_layers_of_one_size_that_are_the_models_alone_rotate() -> None:
    _pool, _weights, slots = made(4, 2)
    slots.tabulate(
        [
            LayerPages(0, 2, 9, True),
            LayerPages(2, 1, 9, True),
            LayerPages(3, 2, 7, True),
            LayerPages(5, 2, 9, False),
        ]
    )
    assert slots.rotatable == (0, 2)
    assert (slots.layer_pages, slots.layer_bytes) == (2, 9)
    for wrong in (Rotation((0, 1), 1), Rotation((2, 0), 1), Rotation((0, 2), 2), Rotation((0,), 0)):
        assert slots.refusal(wrong) is not None
        with pytest.raises(BrokenPromise):
            slots.remap(wrong, ())
    assert slots.refusal(Rotation((0, 2), 1)) is None
    slots.tabulate([LayerPages(0, 2, 9, True), LayerPages(2, 1, 9, False)])
    assert slots.rotatable == ()
    assert slots.layer_pages == 0
