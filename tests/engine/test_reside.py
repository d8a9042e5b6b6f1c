"""Residency plans are carried out whole, or refused with a reason and without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ballast.core.actions import Reside
from ballast.core.link import LinkRates
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.rotation import Rotation
from ballast.core.view import Residency
from ballast.engine.apply import apply
from ballast.engine.model import ModelState
from ballast.policy.memory.static import FixedShares
from ballast.policy.presets import resolve
from ballast.policy.requirements import Requirements
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.policy import worlds
from tests.sim.test_simulate import COSTS, fleet, watch

LAYERS = 8
SPEC = replace(worlds.spec("a"), n_layers=LAYERS, segment_bytes=(worlds.PAGE,) * (LAYERS + 1))
TWO, OTHER = Rotation((1, 3, 5), 1), Rotation((2, 4), 1)


class Patient(FixedShares):
    """Lets weights and KV be where they are."""

    __slots__ = ()

    @property
    def requires(self) -> Requirements:
        return Requirements(rotation=True, kv_swapping=True)


@pytest.fixture
def device() -> Iterator[SimDevice]:
    """One model, whose weights are there."""
    profile = MachineProfile(costs={"a": COSTS}, link=LinkRates.even(1e9), overhead=1e-4)
    settings = fleet("kvswap", [SPEC], 110).of_one_device("this test")
    preset = replace(resolve("static"), memory=Patient())
    made = SimDevice(settings, [SPEC], preset, profile, lambda now, o: None)
    made.advance(1.0)
    yield made
    made.finish(10.0)
    watch(10.0, made.state)


def model(device: SimDevice) -> ModelState:
    m = device.state.models["a"]
    assert m.residency is Residency.RESIDENT
    return m


def order(device: SimDevice, plan: ResidencyPlan, until: float = 2.0) -> str | None:
    refused = apply(device.state, Reside("a", plan), [])
    device.advance(until)
    watch(until, device.state)
    return refused


def test_slots_of_weights_and_kv_change_together(device: SimDevice) -> None:
    m = model(device)
    wanted = replace(m.plan, rotation=TWO, kv=OTHER)
    pages = device.state.pool.free
    assert order(device, wanted) is None
    assert (m.plan, m.weights.slots.rotation, m.kv.rotation) == (wanted, TWO, OTHER)
    assert device.state.pool.free - pages == m.plan.whole().device_pages - m.plan.device_pages == 2


def test_a_plan_of_which_a_part_cannot_be_is_refused_whole(device: SimDevice) -> None:
    m = model(device)
    now, everything = m.plan, Rotation(tuple(range(LAYERS)), 1)
    refused = order(device, replace(now, rotation=TWO, kv=everything))
    assert refused is not None
    assert "keeps its pages" in refused
    assert m.plan == now
    assert m.weights.slots.rotation == now.rotation


def test_a_model_gives_up_parts_and_gets_them_back(device: SimDevice) -> None:
    m = model(device)
    assert order(device, replace(m.plan, rotation=TWO)) is None
    less = m.plan.without(3)
    assert order(device, less, 3.0) is None
    assert (m.residency, m.weights.plan) == (Residency.ABSENT, less)
    assert order(device, less.without(2), 4.0) is None, "more of it"
    assert m.weights.plan.absent > less.absent
    assert order(device, m.plan.whole(), 5.0) is None
    assert (m.residency, m.plan.device_pages) == (Residency.RESIDENT, LAYERS + 1)


def test_what_no_pass_could_do_or_no_plan_can_say_is_refused(device: SimDevice) -> None:
    m = model(device)
    first, last = frozenset({0}), frozenset({LAYERS})
    assert "already" in (order(device, m.plan) or "")
    assert "other segments" in (order(device, replace(m.plan, units=(Unit(1, 1),))) or "")
    assert order(device, replace(m.plan, rotation=TWO)) is None
    slots = order(device, replace(m.plan, rotation=Rotation(), absent=last))
    assert "layers in slots go first" in (slots or "")
    part = m.plan.without(3)
    assert order(device, part, 3.0) is None
    swapped = replace(part, absent=part.absent - last | first)
    assert "not both at once" in (order(device, swapped, 3.0) or "")
    assert "comes at once" in (order(device, replace(part, absent=part.absent - last), 3.0) or "")
    at_once = replace(part.whole(), rotation=TWO)
    assert "then layers may get slots" in (order(device, at_once, 3.0) or "")
    assert order(device, part.whole(), 4.0) is None
