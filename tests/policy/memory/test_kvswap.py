"""What swapping KV by layers costs, as the policy counts it, and what it decides by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Preempt, Reside
from ballast.core.cost import StepCosts
from ballast.core.kv_swap import SLOTS, spread, swapped_seconds
from ballast.core.link import LinkRates
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.view import DeviceView, ModelView, Shortage
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.memory.kvswap import SWAPPED, KvSwap
from tests.policy.worlds import PAGE, device, model, request

LAYERS, LAYER_PAGES, TOKENS = 8, 4, 512
STEP = 4e-3
RUNNING = tuple(request(i, arrival=float(i), pages=16, tokens=TOKENS) for i in (1, 2))


def swappable(rotation: Rotation = WHOLE, step: float = STEP) -> ModelView:
    """A model whose KV lies layer by layer, of two requests."""
    m = model("a", kv=LAYERS * LAYER_PAGES, running=RUNNING)
    return replace(
        m,
        spec=replace(m.spec, n_layers=LAYERS),
        costs=StepCosts(step, 0.0, 0.0, 0.0, 0.0),
        decode_seconds=step,
        kv_rotation=rotation,
        kv_layer_pages=LAYER_PAGES,
    )


def short(m: ModelView, rate: float) -> DeviceView:
    """Its older request lacks a layer's pages; the link carries `rate` bytes per second."""
    lack = Shortage(m.name, RUNNING[0].id, LAYER_PAGES, limited=False)
    view = device(m, free=0, shortages=(lack,))
    return replace(view, link_bytes_per_second=rate)


def layer_bytes(m: ModelView) -> int:
    """KV of the running requests in one layer."""
    return sum(r.computed for r in m.running) * m.spec.kv_bytes_per_token // LAYERS


@pytest.mark.parametrize("dirty", [0, 1])
@pytest.mark.parametrize("freed", [1, 3])
def test_a_step_stores_whole_layers_unless_only_what_is_new_goes_back(
    dirty: int, freed: int
) -> None:
    m, rate = swappable(), 1e8
    policy = KvSwap(dirty=dirty)
    plan = policy.plan(short(m, rate), m, freed, 1)
    assert plan is not None
    # KV grows into the pages that the layers give up.
    loaded = layer_bytes(m) * LAYERS // (LAYERS - freed)
    new = len(m.running) * m.spec.kv_bytes_per_token // LAYERS
    rates = LinkRates.even(rate, 2 * policy.mixed * rate)
    stored = new if dirty else loaded + new
    shortest = min(
        swapped_seconds(LAYERS, Rotation(spread(LAYERS, freed + n), n), STEP, loaded, stored, rates)
        for n in SLOTS
        if freed + n <= LAYERS
    )
    assert plan.seconds == pytest.approx(shortest, rel=0.01)
    moved = (freed + plan.rotation.slots) * (loaded + stored) / rate
    assert plan.seconds >= moved / 2, "both directions at their best"


def test_whole_layers_cost_a_step_about_twice_what_is_new_does() -> None:
    m = swappable()
    view = short(m, 1e8)
    whole, new = (KvSwap(dirty=dirty).plan(view, m, 1, 1) for dirty in (0, 1))
    assert whole is not None
    assert new is not None
    assert 1.5 < whole.seconds / new.seconds < 2.5


def test_layers_are_swapped_where_a_step_hides_their_copies_and_only_there() -> None:
    """By the cap; there is a link on which whole layers are not hidden, and what is new is."""
    seen = set()
    for rate in (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10):
        found = []
        for dirty in (0, 1):
            policy, m = KvSwap(dirty=dirty), swappable()
            view = short(m, rate)
            actions = policy(view, None).actions
            swaps = [a for a in actions if isinstance(a, Reside)]
            plan = policy.plan(view, m, 1, 1)
            assert plan is not None
            assert bool(swaps) == (plan.seconds <= STEP * (1 + policy.slack))
            assert any(isinstance(a, Preempt) for a in actions) != bool(swaps)
            found.append(bool(swaps))
        seen.add(tuple(found))
    assert seen == {(False, False), (False, True), (True, True)}


@pytest.mark.parametrize("rate", [1e8, 1e9])
@pytest.mark.parametrize("before", [0, 2])
def test_the_price_is_that_of_moving_whole_layers_and_of_longer_steps(
    rate: float, before: int
) -> None:
    rotation = Rotation(spread(LAYERS, before + 1), 1) if before else WHOLE
    m, policy = swappable(rotation), KvSwap(cap=0)
    view = short(m, rate)
    claim = Claim("a", RUNNING[0].order, LAYER_PAGES, may_preempt=True)
    offer = next(iter(policy.layers(view)(view, claim)))
    swap = offer.act(offer.pages, claim)
    assert isinstance(swap, Reside)
    layers = swap.plan.kv.n_freed - before
    assert layers >= 1
    assert offer.pages == layers * LAYER_PAGES
    plan = policy.plan(view, m, swap.plan.kv.n_freed, len(rotation.layers) + 1)
    assert plan is not None
    moving = layers * LAYER_PAGES * PAGE / rate
    longer = max(0.0, plan.seconds - STEP) * max(1.0, SWAPPED / plan.seconds)
    assert offer.price() == pytest.approx(2 * (moving + longer))
    faster = short(m, 10 * rate)
    assert next(iter(policy.layers(faster)(faster, claim))).price() < offer.price()
