"""Weights change places by what they bring: onto free pages while hot, back when KV needs pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache, Preempt, Reside
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.view import DeviceView, ModelView, RequestView, Shortage
from ballast.policy.memory.host_direct import HostDirect
from tests.policy.worlds import PAGE, device, model, request

UNITS = tuple(Unit(pages, pages * PAGE) for pages in (4, 10, 10, 10, 10, 6))
"""Embeddings, four layers, a head."""
FAST = 2e10


def placed(name: str, home: set[int], *running: RequestView, last_used: float = 0.0) -> ModelView:
    """A model of which the units `home` are on pages."""
    m = model(name, pages=50, running=running, last_used=last_used)
    away = frozenset(range(len(UNITS))) - home
    spec = replace(m.spec, n_layers=4)
    return replace(m, spec=spec, plan=ResidencyPlan(UNITS, 4, in_place=away))


def running(sequence: int, left: int = 40) -> RequestView:
    return request(sequence, pages=2, generated=1, max_tokens=1 + left)


def view(*models: ModelView, free: int, link: float = FAST) -> DeviceView:
    made = device(*models, free=free)
    return replace(made, total=400, arena=0, link_bytes_per_second=link, reads_host=True)


def plans(at: DeviceView, **options: float) -> dict[str, ResidencyPlan]:
    """The plans that are asked for, by model."""
    actions = HostDirect(**options)(at, None).actions
    assert all(isinstance(a, Reside) for a in actions)
    return {a.model: a.plan for a in actions if isinstance(a, Reside)}


def test_a_hot_models_segments_come_in_the_order_of_passes_while_a_tenth_stays_free() -> None:
    m = placed("a", set(), running(0))
    assert plans(view(m, free=90)) == {"a": replace(m.plan, in_place=frozenset())}
    assert plans(view(m, free=71)) == {"a": replace(m.plan, in_place=frozenset({0, 4, 5}))}
    assert plans(view(m, free=49)) == {}
    there = placed("a", {1, 2, 3, 4}, running(0))
    assert plans(view(there, free=46)) == {"a": replace(m.plan, in_place=frozenset({0}))}


def test_the_links_unreserved_part_bounds_a_copy_but_for_one_segment() -> None:
    m = placed("a", set(), running(0))
    demand = sum(u.n_bytes for u in UNITS) / m.spec.slo.tpot
    none_left = plans(view(m, free=300, link=demand))["a"]
    assert m.plan.in_place - none_left.in_place == {1}
    some_left = plans(view(m, free=300, link=demand + 5000 * PAGE))["a"]
    assert m.plan.in_place - some_left.in_place == {1, 2}
    too_little = plans(view(m, free=300, link=0.9 * demand))["a"]
    assert too_little.in_place == frozenset(), "all are late until it has come"


@pytest.mark.parametrize("why", ["cold", "copying", "near", "option"])
def test_nothing_comes_that_brings_nothing(why: str) -> None:
    m = placed("a", set(), running(0, left=1 if why == "cold" else 40))
    other = replace(placed("b", set()), promoting=10 if why == "copying" else 0)
    at = replace(view(m, other, free=300), near_host=why == "near")
    assert plans(at, promote=why != "option") == {}


def test_the_model_with_most_passes_to_come_has_the_room_of_those_idle_longest() -> None:
    brief, long = placed("a", set(), running(0, left=5)), placed("b", set(), running(1, left=90))
    fresh, stale = placed("c", {1, 2}, last_used=9.0), placed("d", {1, 2}, last_used=3.0)
    assert list(plans(view(brief, long, fresh, stale, free=300))) == ["b"]
    laid = plans(view(brief, long, fresh, stale, free=41))
    assert laid == {"d": replace(stale.plan, in_place=stale.plan.in_place | {2})}
    busy = (replace(m, running=(running(5, left=3),)) for m in (fresh, stale))
    assert plans(view(brief, long, *busy, free=41)) == {}, "no model with requests gives way"


def test_kv_gets_pages_of_idle_weights_before_caches_and_of_running_models_before_work() -> None:
    first = running(0)
    lacking = (Shortage("a", first.id, 2, limited=False),)
    hot = placed("a", {1, 2}, first, running(1))
    cached = replace(placed("c", set()), kv_pages=4, cached_pages=4)
    idle = placed("b", {3, 4})
    at = replace(view(hot, idle, cached, free=0), shortages=lacking)
    assert plans(at) == {"b": replace(idle.plan, in_place=idle.plan.in_place | {4})}
    without = replace(view(hot, cached, free=0), shortages=lacking)
    (drop,) = HostDirect()(without, None).actions
    assert isinstance(drop, DropCache)
    alone = replace(view(hot, free=0), shortages=lacking)
    assert plans(alone) == {"a": replace(hot.plan, in_place=hot.plan.in_place | {2})}
    bare = replace(view(placed("a", set(), first, running(1)), free=0), shortages=lacking)
    (undone,) = HostDirect()(bare, None).actions
    assert isinstance(undone, Preempt)
    copying = replace(hot, promoting=10)
    at = replace(view(copying, idle, free=0), shortages=lacking)
    assert plans(at) == {"a": hot.plan}, "a copy stops first: passes go on as they are"
