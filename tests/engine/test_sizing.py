"""Which models a device takes in at all: those that could serve a request beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.core.units import KiB, format_bytes
from ballast.engine.sizing import check_room, pages_aside
from ballast.kv.layout import Layout
from tests.policy.worlds import PAGE, spec


def device(pages: int, specs: Sequence[ModelSpec]) -> DeviceSettings:
    """With so many pages beside activations of all the models."""
    plain = DeviceSettings(budget_bytes=PAGE, page_bytes=PAGE, step_tokens=32, step_logits=8)
    return replace(plain, budget_bytes=(pages + pages_aside(specs, plain)) * PAGE)


def test_a_model_needs_its_weights_and_a_slab_of_kv() -> None:
    m, other = spec("m", pages=10), spec("other", pages=3)
    slab = Layout.of(m, PAGE).slab_pages
    check_room(m, [other], device(10 + slab, [m, other]))
    tight = device(10 + slab - 1, [m, other])
    with pytest.raises(ConfigError) as caught:
        check_room(m, [other], tight)
    least = tight.budget_bytes // KiB + PAGE // KiB
    assert caught.value.value == format_bytes(tight.budget_bytes)
    assert f"m needs a device of at least {least}KiB" in caught.value.allowed
    enough = replace(tight, budget_bytes=least * KiB)
    check_room(m, [other], enough)


def test_weights_that_passes_read_in_host_memory_need_no_room() -> None:
    m, pinned = spec("m", pages=10), spec("pinned", pages=3, pinned=True)
    slab = Layout.of(m, PAGE).slab_pages
    check_room(m, [pinned], device(slab, [m, pinned]), in_place=True)
    with pytest.raises(ConfigError, match="for weights"):
        check_room(m, [pinned], device(slab - 1, [m, pinned]), in_place=True)


def test_pinned_models_leave_their_weights_to_nobody() -> None:
    m, pinned = spec("m", pages=10), spec("pinned", pages=5, pinned=True)
    slab = Layout.of(m, PAGE).slab_pages
    check_room(m, [spec("other", pages=5)], device(10 + slab, [m]))
    with pytest.raises(ConfigError, match="for weights, those of pinned models among them"):
        check_room(m, [pinned], device(10 + slab, [m]))
    check_room(m, [pinned], device(15 + slab, [m]))
    with pytest.raises(ConfigError, match="m needs a device of at least"):
        check_room(pinned, [m], device(10 + slab, [m]))  # whichever comes first


def test_what_is_set_aside_already_is_not_there() -> None:
    m = spec(pages=10)
    slab = Layout.of(m, PAGE).slab_pages
    settings = device(10 + slab, [m])
    aside = pages_aside([m], settings)
    check_room(m, [], settings, aside=aside)
    with pytest.raises(ConfigError, match=f"{format_bytes((aside + 1) * PAGE)} for activations"):
        check_room(m, [], settings, aside=aside + 1)
