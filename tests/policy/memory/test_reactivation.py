"""Evicted models come back before they are asked for: which, at whose expense, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache
from ballast.core.cost import StepCosts
from ballast.core.traffic import TrafficStats
from ballast.core.view import DeviceView, ModelView, Residency, Shortage
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.reactivation import absence_seconds
from tests.policy.worlds import device, kind, model, request

NOW = 60.0


def asked(m: ModelView, times: int) -> ModelView:
    """`m`, of which requests came in the last minute, one second apart, the last one just now."""
    traffic = TrafficStats.since(0.0)
    for i in range(times):
        traffic = traffic.arrived(NOW - times + i + 1)
    return replace(m, traffic=traffic, costs=StepCosts(0.0, 1e-5, 0.0, 0.0, 0.0, 0.0))


def absent(name: str, times: int, pages: int = 10) -> ModelView:
    return asked(model(name, Residency.ABSENT, pages=pages), times)


def world(*models: ModelView, free: int, shortages: tuple[Shortage, ...] = ()) -> DeviceView:
    view = device(*models, free=free, total=100, shortages=shortages)
    return replace(view, now=NOW, arena=0)


def decided(view: DeviceView, *away: str, **options: float) -> list[object]:
    policy = Balloon(**{"restore": 1, "reserve": 0.1, **options})
    return list(policy(view, frozenset(away)).actions)


def names(actions: list[object]) -> list[tuple[str, str]]:
    return [(kind(a), a.model) for a in actions]  # type: ignore[attr-defined]


def test_it_comes_back_where_memory_is_free() -> None:
    view = world(model("here"), absent("gone", 5), free=30)
    assert names(decided(view, "gone")) == [("Activate", "gone")]
    assert decided(view, "gone", restore=0) == []
    assert decided(view) == [], "an operator, or its time to live, has evicted it"


def test_what_is_kept_free_for_kv_is_not_used() -> None:
    """Of 80 pages that weights leave, 8 stay free."""
    here = model("here", running=(request(1),))
    assert names(decided(world(here, absent("gone", 5), free=18), "gone")) == [("Activate", "gone")]
    assert decided(world(here, absent("gone", 5), free=17), "gone") == []
    assert decided(world(here, absent("gone", 5), free=17), "gone", reserve=0) != []


def test_a_model_that_nobody_has_asked_for_stays_away() -> None:
    assert decided(world(model("here"), absent("gone", 0), free=50), "gone") == []


def test_the_one_asked_for_most_comes_first_and_one_at_a_time() -> None:
    a, b = absent("a", 3), absent("b", 30)
    assert names(decided(world(a, b, free=60), "a", "b")) == [("Activate", "b")]
    coming = replace(b, residency=Residency.ACTIVATING)
    assert decided(world(a, coming, free=50), "a") == []


def test_only_an_idle_model_worth_less_makes_way() -> None:
    gone = absent("gone", 30, pages=50)
    seldom, often = (asked(model(n, pages=60), t) for n, t in (("seldom", 1), ("often", 20)))
    assert names(decided(world(seldom, gone, free=8), "gone")) == [
        ("Evict", "seldom"),
        ("Activate", "gone"),
    ]
    assert decided(world(often, gone, free=8), "gone") == []
    runs = replace(seldom, running=(request(1, pages=4),))
    assert decided(world(runs, gone, free=8), "gone") == [], "it has work"


def test_it_takes_cached_prefixes_that_are_worth_less() -> None:
    cache = asked(model("here", kv=20, cached=20), 5)
    drop, come = decided(world(cache, absent("gone", 5), free=5), "gone")
    assert isinstance(drop, DropCache)
    assert kind(come) == "Activate"
    dear = replace(cache, costs=StepCosts(0.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    assert decided(world(dear, absent("gone", 5), free=5), "gone") == []


@pytest.mark.parametrize("pages", [1, 50])
def test_nobody_comes_back_while_requests_lack_pages(pages: int) -> None:
    short = (Shortage("here", "r1", pages, limited=False),)
    here = model("here", running=(request(1, pages=2),))
    view = world(here, absent("gone", 5), free=30, shortages=short)
    assert ("Activate", "gone") not in names(decided(view, "gone"))


def test_the_policy_knows_which_models_it_has_evicted_itself() -> None:
    policy = Balloon(restore=1)
    short = (Shortage("here", "r1", 10, limited=False),)
    here = model("here", running=(request(1, pages=2),))
    idle = asked(model("idle", pages=80), 5)
    decision = policy(world(here, idle, free=0, shortages=short), None)
    assert [kind(a) for a in decision.actions] == ["Evict"]
    assert decision.memo == {"idle"}
    back = world(here, idle, free=5)
    assert policy(back, decision.memo).memo == frozenset(), "it is there again"


def test_a_models_absence_costs_more_the_more_it_is_asked_for() -> None:
    view = world(absent("a", 1), absent("b", 10), absent("c", 10, pages=20), free=0)
    costs = [absence_seconds(view, m) for m in view.models]
    assert 0 < costs[0] < costs[1] < costs[2]
