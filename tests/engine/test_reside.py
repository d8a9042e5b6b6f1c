"""Residency plans are carried out whole, or refused with a reason and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ballast.core.actions import Leave, Reside
from ballast.core.link import LinkRates
from ballast.core.request import Submission
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
from tests.engine.orders import evict
from tests.policy import worlds
from tests.sim.test_simulate import COSTS, fleet, watch

LAYERS = 8
SPEC = replace(worlds.spec("a"), n_layers=LAYERS, segment_bytes=(worlds.PAGE,) * (LAYERS + 1))
TWO = Rotation((1, 3, 5), 1)


class Patient(FixedShares):
    """Lets weights be where they are."""

    __slots__ = ()

    @property
    def requires(self) -> Requirements:
        return Requirements(rotation=True)


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


def test_layers_get_slots(device: SimDevice) -> None:
    m = model(device)
    wanted = replace(m.plan, rotation=TWO)
    pages = device.state.pool.free
    assert order(device, wanted) is None
    assert (m.plan, m.weights.slots.rotation) == (wanted, TWO)
    assert device.state.pool.free - pages == m.plan.whole().device_pages - m.plan.device_pages == 2


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


# -- places of units of a model that stays --------------------------------------------------------

MS = 1e-3
SLOW = LinkRates.even(worlds.PAGE / MS)
"""A link that brings a page in a millisecond."""
FIRST, SECOND = frozenset({1, 2, 3}), frozenset({3, 4})


@pytest.fixture
def at_work() -> Iterator[SimDevice]:
    """Models over one shared segment, `a` with a request that decodes for a while."""
    shared = tuple("same" if i == 2 else "" for i in range(LAYERS + 1))
    digests = {n: tuple(d or f"{n}{i}" for i, d in enumerate(shared)) for n in "ab"}
    specs = [replace(SPEC, name=n, segment_digests=digests[n]) for n in "ab"]
    profile = MachineProfile(costs=dict.fromkeys("ab", COSTS), link=SLOW, overhead=1e-4)
    settings = fleet("static", specs, 110).of_one_device("this test")
    made = SimDevice(
        settings, specs, resolve("c2cserve", {"promote": 0}), profile, lambda now, o: None
    )
    prompt = tuple(range(20))
    made.submit(Submission(id="r", model="a", prompt=prompt, max_tokens=250, arrival=0.0))
    made.advance(1.0)
    yield made
    made.finish(100.0)
    watch(made.clock.now(), made.state)
    assert made.state.pool.ledger.owned("promoted:a") == 0


def in_place(device: SimDevice) -> frozenset[int]:
    return device.state.models["a"].weights.plan.in_place


def until(device: SimDevice, wanted: Callable[[], bool]) -> int:
    """Advance until `wanted`; return the jobs that have begun meanwhile."""
    jobs, now = device.state.jobs, device.clock.now()
    for i in range(1000):
        device.advance(now + i * MS / 4)
        device.state.validate()
        if wanted():
            return device.state.jobs - jobs
    raise AssertionError("it does not come")


def test_units_change_places_while_a_model_runs(at_work: SimDevice) -> None:
    m = at_work.state.models["a"]
    everything = frozenset(range(LAYERS + 1))
    rest = everything - FIRST
    assert in_place(at_work) == everything
    assert order(at_work, m.plan.reading(rest), 1.0 + MS) is None
    assert in_place(at_work) == everything, "two of three pages are still on their way"
    until(at_work, lambda: in_place(at_work) == rest)
    assert m.weights.present_pages == 2, "one is shared"
    mixed = rest - SECOND | FIRST - SECOND
    assert order(at_work, m.plan.reading(mixed), at_work.clock.now()) is None
    until(at_work, lambda: in_place(at_work) == mixed)
    assert m.weights.present_pages == 2
    assert order(at_work, m.plan.reading(everything), at_work.clock.now()) is None
    until(at_work, lambda: in_place(at_work) == everything)
    jobs = at_work.state.jobs
    at_work.advance(at_work.clock.now() + 100 * MS)
    assert at_work.state.jobs > jobs + 5, "it runs on"
    assert (m.preemptions, m.evictions) == (0, 0)


@pytest.mark.parametrize("what", ["evict", "leave", "another", "back"])
def test_copies_to_pages_can_be_overtaken(at_work: SimDevice, what: str) -> None:
    state, m = at_work.state, at_work.state.models["a"]
    everything, free = in_place(at_work), at_work.state.pool.free
    assert order(at_work, m.plan.reading(frozenset()), 1.0 + MS) is None
    assert state.pool.free == free - LAYERS - 1
    if what == "evict":
        assert evict(state, "a") is None
    elif what == "leave":
        at_work.order(1.0 + MS, "go", Leave("a", at_once=True))
    elif what == "another":
        assert "being copied" in (order(at_work, m.plan.reading(FIRST), 1.0 + MS) or "")
        until(at_work, lambda: in_place(at_work) == frozenset())
        return
    else:
        assert order(at_work, m.plan, 1.0 + MS) is None
    until(at_work, lambda: state.pool.ledger.owned("promoted:a") == 0)
    assert what == "leave" or in_place(at_work) in (everything, frozenset())
    until(at_work, lambda: ("a" not in state.models) == (what == "leave"))


def test_a_shared_segment_that_another_model_has_is_not_copied_again(at_work: SimDevice) -> None:
    a, b = at_work.state.models["a"], at_work.state.models["b"]
    assert apply(at_work.state, Reside("b", b.plan.whole()), []) is None
    until(at_work, lambda: b.residency is Residency.RESIDENT)
    free = at_work.state.pool.free
    assert apply(at_work.state, Reside("a", a.plan.reading(in_place(at_work) - {2})), []) is None
    until(at_work, lambda: 2 not in in_place(at_work))
    assert at_work.state.pool.free == free
    assert apply(at_work.state, Reside("a", a.plan.reading(in_place(at_work) | {2})), []) is None
    until(at_work, lambda: 2 in in_place(at_work))
    assert at_work.state.pool.free == free, "it is b's still"
