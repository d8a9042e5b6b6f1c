"""Weights change places by what they bring: onto free pages while hot, back when KV needs pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache, Preempt, Reside
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.view import DeviceView, ModelView, RequestView, Residency, Shortage
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


# -- models that are asked for --------------------------------------------------------------------


def absent(name: str, *waiting: RequestView) -> ModelView:
    m = placed(name, set(), last_used=5.0)
    gone = replace(m.plan, absent=m.plan.in_place, in_place=frozenset())
    return replace(m, residency=Residency.ABSENT, plan=gone, waiting=waiting)


def asks(sequence: int, answer: int = 40) -> RequestView:
    return request(sequence, max_tokens=answer)


def slow(*models: ModelView, free: int) -> DeviceView:
    """A view of a link that cannot carry what one of the models reads for each token."""
    (demand,) = {sum(u.n_bytes for u in UNITS) / m.spec.slo.tpot for m in models}
    return view(*models, free=free, link=0.9 * demand)


ROWS = frozenset({0})
"""Embeddings, of which a pass reads few rows."""
EVERYTHING = frozenset(range(len(UNITS)))


def test_a_model_that_is_asked_for_comes_where_there_is_room_and_else_is_read_in_place() -> None:
    m = absent("a", asks(0))
    whole = replace(m.plan, absent=frozenset(), in_place=ROWS)
    there = replace(m.plan, absent=frozenset(), in_place=EVERYTHING)
    assert plans(slow(m, free=86)) == {"a": whole}
    assert plans(slow(m, free=85)) == {"a": there}, "a tenth stays free, and embeddings"
    assert plans(slow(m, free=300), promote=0) == {"a": there}
    assert plans(replace(slow(m, free=300), near_host=True)) == {"a": there}
    assert plans(view(m, free=300)) == {"a": there}, "the link carries what it reads"
    beside = placed("b", set(), running(9, left=1))
    two = sum(u.n_bytes for u in UNITS) / m.spec.slo.tpot * 1.9
    assert plans(view(m, beside, free=300, link=two)) == {"a": whole}, "but not for both"
    brief = absent("a", asks(0, answer=1))
    assert plans(slow(brief, free=300)) == {"a": there}, "it is read once either way"


def test_models_that_come_at_once_share_the_room_by_the_order_of_their_requests() -> None:
    late, early = absent("a", asks(7)), absent("b", asks(3))
    found = plans(slow(late, early, free=100))
    assert {name: plan.in_place for name, plan in found.items()} == {"b": ROWS, "a": EVERYTHING}


def test_idle_models_make_way_for_one_that_is_asked_for_those_idle_longest_first() -> None:
    m = absent("a", asks(0))
    stale, fresh = placed("b", {1, 2}, last_used=1.0), placed("c", {3, 4}, last_used=2.0)
    actions = HostDirect()(slow(m, fresh, stale, free=71), None).actions
    assert [(a.model, a.plan) for a in actions if isinstance(a, Reside)] == [
        ("b", replace(stale.plan, absent=frozenset({1, 2}))),
        ("a", replace(m.plan, absent=frozenset(), in_place=ROWS)),
    ]
    (only,) = HostDirect()(slow(m, fresh, stale, free=40), None).actions
    assert isinstance(only, Reside)
    assert only.plan.in_place == EVERYTHING, "they would not suffice, and stay"
    busy = [replace(o, running=(running(5, left=3),)) for o in (stale, fresh)]
    (only,) = HostDirect()(slow(m, *busy, free=71), None).actions
    assert isinstance(only, Reside)
    assert only.plan.in_place == EVERYTHING, "models with requests keep theirs"


def test_what_was_read_in_place_is_given_up_before_it_comes() -> None:
    """And its KV stays, as it keeps the embeddings where they are."""
    m = replace(placed("a", {1}), waiting=(asks(0),))
    actions = HostDirect()(slow(m, free=100), None).actions
    assert [a.plan for a in actions if isinstance(a, Reside)] == [
        replace(m.plan, absent=frozenset({2, 3, 4, 5}), in_place=ROWS),
        replace(m.plan, in_place=ROWS),
    ]
    for other in (
        replace(m, busy=True),
        replace(m, running=(running(1),)),
        replace(m, promoting=9),
    ):
        assert not any(plan.absent for plan in plans_of(other))


def plans_of(m: ModelView) -> list[ResidencyPlan]:
    return list(plans(slow(m, free=100)).values())


def test_a_request_that_nothing_serves_is_served_from_host_memory() -> None:
    m = absent("a", asks(0))
    (action,) = HostDirect().when_stuck(slow(m, free=0))
    assert isinstance(action, Reside)
    assert action.plan.in_place == EVERYTHING
