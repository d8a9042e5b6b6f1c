"""KV blocks go to the host while steps hide it, come home where there is room, and cost nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Action, DropCache, Preempt, Stage
from ballast.core.cost import StepCosts
from ballast.core.view import DeviceView, ModelView, Shortage, StagingView
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.staged_blocks import freed_pages, staged_blocks, staged_seconds
from ballast.policy.memory.kvswap import KvSwap
from tests.policy.worlds import PAGE, device, model, request

LAYERS, STEP, BLOCKS = 8, 4e-3, 32
"""A block a page."""
RUNNING = tuple(request(i, arrival=float(i), pages=16, tokens=512) for i in (1, 2))


def stageable(
    staged: int = 0, *, moving: bool = False, cached: int = 0, n: int = len(RUNNING)
) -> ModelView:
    """A model of `n` requests with 32 blocks of KV in all, of which some are on the host."""
    running = tuple(
        request(i, arrival=float(i), pages=16, tokens=512)._replace(staged=staged // n)
        for i in range(1, n + 1)
    )
    m = model("a", kv=BLOCKS - staged + cached, cached=cached, running=running)
    spec = replace(m.spec, n_layers=LAYERS)
    spec = replace(spec, block_tokens=PAGE // spec.kv_bytes_per_token)
    return replace(
        m,
        spec=spec,
        slab_blocks=1,
        costs=StepCosts(STEP, 0.0, 0.0, 0.0, 0.0),
        decode_seconds=STEP,
        staging=StagingView(staged, BLOCKS - staged, 100, 2, 0, moving),
    )


def short(m: ModelView, rate: float, free: int = 0) -> DeviceView:
    """Its older request lacks four pages; the link carries `rate` bytes per second."""
    lack = Shortage(m.name, RUNNING[0].id, 4, limited=False)
    view = device(m, free=free, shortages=() if free else (lack,))
    return replace(view, link_bytes_per_second=rate)


def decided(view: DeviceView, policy: KvSwap) -> list[Action]:
    """The actions once models have their places."""
    return list(policy(view, policy(view, None).memo).actions)


def hiding(part: float) -> float:
    """A rate at which a layer of that part of the blocks takes as long as `slack` lets it."""
    return part * BLOCKS * PAGE / LAYERS / (0.02 * STEP)


def test_blocks_go_to_the_host_before_a_request_is_preempted() -> None:
    m = stageable()
    (stage,) = decided(short(m, hiding(1.0)), KvSwap(ahead=0))
    assert isinstance(stage, Stage)
    assert freed_pages(short(m, 1.0), m, stage.staged) >= 4
    assert freed_pages(short(m, 1.0), m, stage.staged - 1) < 4, "no more than is lacked"
    (ahead,) = decided(short(m, hiding(1.0)), KvSwap(ahead=0.5))
    assert isinstance(ahead, Stage)
    assert freed_pages(short(m, 1.0), m, ahead.staged) >= BLOCKS // 2


def test_what_a_step_would_not_hide_stays_unless_it_may_go() -> None:
    view = short(stageable(), hiding(0.05))
    (preempted,) = decided(view, KvSwap())
    assert isinstance(preempted, Preempt)
    (stage,) = decided(view, KvSwap(cap=0))
    assert isinstance(stage, Stage)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_steps_seconds_are_those_of_a_pass_layer_by_layer(slots: int) -> None:
    m = stageable(8)
    assert m.staging is not None
    m = replace(m, staging=m.staging._replace(slots=slots))
    for rate in (1e6, 1e8, 1e10):
        load, each = 8 * m.spec.block_bytes / LAYERS / rate, STEP / LAYERS
        loaded, used = [0.0], [0.0] * slots
        for _ in range(LAYERS):
            loaded.append(max(loaded[-1], used[-slots]) + load)
            used.append(max(used[-1], loaded[-1]) + each)
        found = staged_seconds(short(m, rate), m, STEP, 8)
        assert found == pytest.approx(used[-1])


def test_nothing_is_decided_about_blocks_that_are_moving() -> None:
    view = short(stageable(4, moving=True), hiding(1.0))
    assert decided(view, KvSwap()) == []


def test_blocks_come_home_while_a_part_of_what_kv_has_stays_free() -> None:
    m = stageable(8)
    (home,) = decided(short(m, 1e9, free=26), KvSwap(reserve=0.1))
    assert isinstance(home, Stage)
    assert home.staged == 0
    assert decided(short(m, 1e9, free=3), KvSwap(reserve=0.9)) == []


def test_blocks_come_home_in_place_of_cached_prefixes() -> None:
    other = model("b", kv=26, cached=26)
    view = device(stageable(8), other, free=2)
    actions = decided(view, KvSwap(reserve=0))
    assert [type(a) for a in actions] == [DropCache, Stage]
    assert actions[0] == DropCache("b", 6, actions[0].why)  # type: ignore[attr-defined]
    waits = replace(other, waiting=(request(9),))
    assert decided(replace(view, models=(view.models[0], waits)), KvSwap(reserve=0))


def test_swapping_costs_more_the_more_requests_wait_for_the_copies() -> None:
    claim = Claim("claimer", request(1).order, 4, may_preempt=True)
    claimer = model("claimer", running=(request(1),))
    one, two = (
        next(
            iter(
                staged_blocks(float("inf"))(
                    replace(device(claimer, m, free=0), link_bytes_per_second=1e6), claim
                )
            )
        ).price()
        for m in (stageable(n=1), stageable(n=2))
    )
    assert one > 0
    assert two == pytest.approx(2 * one)
