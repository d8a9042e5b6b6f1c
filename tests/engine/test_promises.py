"""Pages set aside for a model's claim are nobody else's until it takes them."""

from __future__ import annotations

from ballast.core.actions import Promise, Short
from ballast.core.cost import activation_bytes
from ballast.core.link import LinkRates
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.sim.test_simulate import COSTS, PAGE, fleet, spec


def state_of(pages: int) -> DeviceState:
    """Two absent models of ten pages of weights, and `pages` beside the arena."""
    specs = [spec(name, 10) for name in "ab"]
    settings = fleet("balloon", specs, pages).device
    arena = max(activation_bytes(s, settings.step_tokens, settings.step_logits) for s in specs)
    assert settings.budget_bytes // PAGE - arena // PAGE >= pages
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=0.0
    )
    device = SimDevice(settings, specs, resolve("balloon"), profile, lambda now, output: None)
    return device.state


def take_all_but(state: DeviceState, pages: int) -> tuple[int, ...]:
    """Somebody has all free pages but so many."""
    taken = state.pool.allocate("other", state.pool.free - pages)
    assert not isinstance(taken, Short)
    return taken


def test_what_is_promised_is_filled_in_order_as_pages_become_free() -> None:
    state = state_of(60)
    a, b = (state.models[name] for name in "ab")
    taken = take_all_but(state, 12)
    state.promises.make([Promise("a", 10, 5), Promise("b", 0, 4)], state.models)
    aside = [
        state.pool.ledger.reservations.promised_to(o)
        for o in (a.weights.owner, a.kv.owner, b.kv.owner)
    ]
    assert aside == [10, 2, 0]
    assert state.promises.pages == 12
    assert state.pool.available(b.kv.owner) == 0
    state.pool.give_back("other", taken[:4])
    state.promises.fill()
    aside = [
        state.pool.ledger.reservations.promised_to(o)
        for o in (a.weights.owner, a.kv.owner, b.kv.owner)
    ]
    assert aside == [10, 5, 1]
    view = device_view(state)
    assert (view.free, view.promised) == (16, 0), "a policy states its own promises anew"
    state.pool.validate()


def test_what_a_model_has_taken_is_not_set_aside_again() -> None:
    state = state_of(60)
    a = state.models["a"]
    take_all_but(state, 20)
    state.promises.make([Promise("a", 0, 6)], state.models)
    assert a.kv.grow([], 64 * 4) is None
    state.promises.fill()
    assert state.pool.ledger.reservations.promised_to(a.kv.owner) == 2
    state.promises.withdraw()
    assert (
        state.promises.stated,
        state.promises.pages,
        state.pool.ledger.reservations.promised,
    ) == ((), 0, 0)
    state.pool.validate()


def test_a_promise_for_weights_is_void_once_they_are_there() -> None:
    state = state_of(60)
    a = state.models["a"]
    assert a.weights.activate(1) is None
    a.life.activate(1)
    state.promises.make([Promise("a", 10, 3)], state.models)
    assert state.pool.ledger.reservations.promised_to(a.weights.owner) == 0
    assert state.pool.ledger.reservations.promised_to(a.kv.owner) == 3


def test_promises_to_models_that_are_gone_are_left_out() -> None:
    state = state_of(60)
    state.promises.make([Promise("gone", 1, 1)], state.models)
    assert state.promises.stated == ()
