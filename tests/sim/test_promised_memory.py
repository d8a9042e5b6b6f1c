"""What a model is promised in virtual time: its `guarantee` is nobody else's, under any preset, and
it never has more than its `limit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ballast.cluster.placing import need_of
from ballast.core.actions import Change
from ballast.core.errors import ConfigError
from ballast.core.event import FinishedOutput
from ballast.core.levels import level_fields
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.engine.sizing import check_room
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.presets import PRESETS
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_shortages import World
from tests.sim.test_simulate import (
    COSTS,
    KEEP_PLACES,
    PAGE,
    OutputLog,
    fleet,
    spec,
    submissions,
    watch,
)

GUARANTEED, LIMITED = 10 + 30, 15 + 8
"""Pages of two models, weights included."""


def specs() -> list[ModelSpec]:
    """Two that are promised memory, and two that are not."""
    return [
        spec("kept", 10, guarantee=GUARANTEED * PAGE),
        spec("bounded", 15, limit=LIMITED * PAGE),
        spec("c", 20),
        spec("d", 25),
    ]


def held(state: DeviceState, name: str) -> int:
    m = state.models[name]
    return sum(state.pool.ledger.owned(owner) for owner in (m.weights.owner, m.kv.owner))


def watch_promises(now: float, state: DeviceState) -> None:
    """What all others have leaves room for the guarantee; the limit holds."""
    watch(now, state)
    others = state.pool.total - state.pool.free - state.pool.ledger.reclaiming - held(state, "kept")
    assert others + GUARANTEED <= state.pool.total
    assert held(state, "bounded") <= LIMITED


@pytest.mark.parametrize("preset", PRESETS)
def test_promises_hold_under_every_preset_and_all_are_answered(preset: str) -> None:
    arrivals = submissions(["bounded", "d", "c", "kept"], 20, seed=3, rate=60.0)
    received = OutputLog()
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs()}, link=LinkRates.even(1e8), overhead=1e-4
    )
    simulate(
        fleet(preset, specs(), 130), specs(), arrivals, profile, received, observe=watch_promises
    )
    assert set(received.ended) == {s.id for s in arrivals}
    done = {n for n, end in received.ended.items() if isinstance(end, FinishedOutput)}
    if preset not in KEEP_PLACES:
        assert done == received.ended.keys()
    assert done.issuperset(s.id for s in arrivals if s.model == "kept"), "its memory is its own"


def test_policies_divide_what_is_not_guaranteed() -> None:
    state = World(specs(), 130).state
    view = device_view(state)
    kept = view.model("kept")
    assert kept.spec.pinned, "its weights are in the guarantee"
    assert (kept.guaranteed_pages, kept.kept_pages, kept.missing_pages) == (30, 10, 0)
    assert view.free - view.promised == state.pool.free - GUARANTEED
    assert view.arena == state.set_aside + 30
    assert view.model("bounded").cap == LIMITED - 15
    # Others get no page of it; the model gets all of them although none is left beside.
    taken = state.pool.allocate("other", state.pool.available("other"))
    assert (state.pool.free, state.pool.available("other")) == (GUARANTEED, 0)
    m = state.models["kept"]
    assert m.weights.activate(1) is None
    assert m.kv.grow([], 30 * m.kv.layout.blocks_per_slab * m.spec.block_tokens) is None
    assert (held(state, "kept"), state.pool.free, taken == ()) == (GUARANTEED, 0, False)
    assert device_view(state).model("kept").kv_pages == 0, "nothing that others could get"


def test_a_promise_can_change_and_end_while_the_model_serves() -> None:
    world = World(specs(), 130)
    state, m = world.state, world.state.models["kept"]

    def change(**levels: object) -> str | None:
        wanted: dict[str, Any] = level_fields(m.spec) | levels
        return world.device._operate(0.1, Change(model="kept", **wanted))

    assert change(guarantee=20 * PAGE) is None
    assert (m.kv.bounds.floor, state.pool.ledger.reservations.kept) == (10, 20)
    assert "for weights, " in (change(guarantee=200 * PAGE) or "")
    assert m.kv.bounds.floor == 10
    assert change(guarantee=0, pinned=False, limit=12 * PAGE) is None
    assert (m.kv.bounds.floor, m.kv.bounds.cap) == (0, 2)
    assert (m.spec.pinned, state.pool.ledger.reservations.kept) == (False, 0)


def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    settings = fleet("balloon", specs(), 130).device
    check_room(specs()[0], specs()[1:], settings)
    for wrong, key in (
        (spec("kept", 10, guarantee=10 * PAGE), "guarantee of kept"),
        (spec("kept", 10, limit=10 * PAGE), "limit of kept"),
    ):
        with pytest.raises(ConfigError) as fault:
            check_room(wrong, [], settings)
        assert fault.value.key == key
    with pytest.raises(ConfigError, match="guaranteed to others"):
        check_room(replace(specs()[0], guarantee=120 * PAGE), specs()[1:], settings)


def test_devices_are_chosen_with_room_for_guarantees() -> None:
    """Two that fit on one device, but not with what they are promised, need one each."""
    device = fleet("balloon", specs(), 130).device
    plain, kept = spec("kept", 10), specs()[0]
    before, need = need_of(plain, [device], {}), need_of(kept, [device], {})
    assert (before.weights, need.weights) == (10 * PAGE, GUARANTEED * PAGE)
    assert need.pinned
    of_a_step = device.step_tokens * plain.kv_bytes_per_token
    assert need.least - before.least == need.weights - before.weights - of_a_step
    assert need_of(kept, [device], {}, in_place=True).weights >= GUARANTEED * PAGE
