"""Layers lend pages before requests make way, up to what passes hide, and come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Action, Limit, Preempt, Refuse, Reside
from ballast.core.rotation import WHOLE, most
from ballast.core.view import DeviceView, ModelView, Shortage
from ballast.policy.memory.mirage import Mirage, MirageMemo
from ballast.policy.memory.recompute import PlacesMemo
from ballast.policy.memory.static import Division
from ballast.policy.memory.temporal_sharing import ModelTurn
from ballast.policy.plans import remap
from tests.policy.worlds import device, layered, model, request

SHARES = dict.fromkeys("abc", 20)


def memory(
    turn: ModelTurn | None = None, active: str = "a", order: str = "abc", **more: object
) -> MirageMemo:
    """Of a device that has been serving: no places are to be given, nobody has just come. `order`:
    of places."""
    among = tuple((name, 1.0) for name in order)
    standing = PlacesMemo(Division(among, SHARES), turn)
    return MirageMemo(standing, frozenset(active), **more)  # type: ignore[arg-type]


def lent(actions: tuple[Action, ...]) -> dict[str, int]:
    """Layers that each model is to lend from now on."""
    return {a.model: a.plan.rotation.n_freed for a in actions if isinstance(a, Reside)}


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(a).__name__ for a in actions]


RUNNING = request(1, arrival=1.0, pages=20)
YOUNGER = request(2, arrival=2.0, pages=20)


def busy(name: str = "a", kv: int = 40, **more: object) -> ModelView:
    return model(name, kv=kv, running=(RUNNING, YOUNGER), **more)  # type: ignore[arg-type]


def short_of(pages: int, *models: ModelView, free: int = 0, **more: object) -> DeviceView:
    """Model a's first request lacks so many pages."""
    lack = Shortage("a", RUNNING.id, pages, limited=False)
    return device(*models, free=free, shortages=(lack,), **more)  # type: ignore[arg-type]


def three(**lending: int) -> tuple[ModelView, ModelView, ModelView]:
    """Figure 7: a is active, b and c are not, c is the least important. Caps: 3, 6 and 6."""
    return (
        layered(busy(), lent=lending.get("a", 0)),
        layered(model("b"), lent=lending.get("b", 0), priority=1),
        layered(model("c"), lent=lending.get("c", 0)),
    )


CAPS = {
    "a": most(8, range(8), 1e-3, 4e-3),
    "b": most(8, range(8), 1e-3, 8e-3),
    "c": most(8, range(8), 1e-3, 8e-3),
}


def test_the_caps_are_those_of_decode_steps_and_of_prefills() -> None:
    assert CAPS == {"a": 2, "b": 6, "c": 6}


@pytest.mark.parametrize("temporal", [0, 1])
def test_layers_are_lent_in_the_order_of_figure_7(temporal: int) -> None:
    turn = ModelTurn("a", 9.9) if temporal else None
    policy = Mirage(temporal=temporal)
    for layers, expected in (
        (1, {"c": 1}),
        (6, {"c": 6}),
        (7, {"c": 6, "b": 1}),
        (12, {"c": 6, "b": 6}),
        (13, {"c": 6, "b": 6, "a": 1}),
        (14, {"c": 6, "b": 6, "a": 2}),
    ):
        models = [replace(m, held=bool(temporal) and m.name != "a") for m in three()]
        decision = policy(short_of(2 * layers, *models), memory(turn))
        assert lent(decision.actions) == expected
        assert set(kinds(decision.actions)) == {"Reside"}, "one change for each model, no harm"


def test_requests_make_way_when_all_are_at_their_caps() -> None:
    decision = Mirage()(short_of(2, *three(**CAPS)), memory())
    assert decision.actions == (Preempt("a", YOUNGER.id, why="a comes first"),)
    more = Mirage(cap=0)(short_of(2, *three(**CAPS)), memory())
    assert lent(more.actions) == {"c": 7}


def test_cached_prefixes_go_before_layers() -> None:
    a, b, c = three()
    view = short_of(6, a, replace(b, kv_pages=4, cached_pages=4), c)
    assert kinds(Mirage()(view, memory()).actions) == ["DropCache", "Reside"]


def test_pages_on_their_way_are_not_lent_twice() -> None:
    view = short_of(4, *three(c=2), reclaiming=4)
    assert Mirage()(view, memory()).actions == ()


def test_who_waits_for_admission_gets_layers_but_nobody_makes_way() -> None:
    a = layered(model("a", kv=20, running=(YOUNGER,), waiting=(request(1),)))
    lack = (Shortage("a", "r1", 4, limited=False),)
    b, c = three()[1:]
    assert lent(Mirage()(device(a, b, c, free=0, shortages=lack), memory()).actions) == {"c": 2}
    full = [replace(m, plan=n.plan) for m, n in zip((a, b, c), three(**CAPS), strict=True)]
    assert Mirage()(device(*full, free=0, shortages=lack), memory()).actions == ()


def test_a_queue_gets_its_layers_at_once() -> None:
    """Requests of 32 tokens are two blocks, half a slab: a page each, a layer for two of them."""
    queue = tuple(request(i) for i in range(1, 7))
    a = layered(model("a", kv=20, running=(YOUNGER,), waiting=queue))
    lack = (Shortage("a", "r1", 4, limited=False),)
    view = device(a, *three()[1:], free=0, shortages=lack)
    assert lent(Mirage()(view, memory()).actions) == {"c": 5}
    held = device(replace(a, held=True), *three()[1:], free=0, shortages=lack)
    assert Mirage(fair_shares=0)(held, memory()).actions == ()
    no_room = replace(a, spec=replace(a.spec, max_running=2))
    view = device(no_room, *three()[1:], free=0, shortages=lack)
    assert lent(Mirage()(view, memory()).actions) == {"c": 2}


def test_of_equals_who_was_used_last_lends_first() -> None:
    turn = ModelTurn("a", 9.9, past=("b", "c"))
    idle = {n: layered(replace(model(n), held=True)) for n in "bc"}
    view = short_of(2, layered(busy()), *idle.values())
    assert lent(Mirage(temporal=1)(view, memory(turn)).actions) == {"c": 1}
    assert lent(Mirage(temporal=1, lru=1)(view, memory(turn)).actions) == {"b": 1}
    spatial = short_of(
        2, layered(busy()), layered(model("b", last_used=8)), layered(model("c", last_used=7))
    )
    assert lent(Mirage()(spatial, memory()).actions) == {"b": 1}


def test_all_are_active_that_have_requests_where_there_are_no_turns() -> None:
    b = layered(model("b", running=(request(3, arrival=0.5),)))
    view = short_of(4, layered(busy()), b, model("c"))
    assert lent(Mirage()(view, memory(active="ab")).actions) == {"a": 2}, "its own first"
    view = short_of(6, layered(busy()), b, model("c"))
    assert lent(Mirage()(view, memory(active="ab")).actions) == {"a": 2, "b": 1}


def test_side_by_side_all_may_count_as_active() -> None:
    """5.2: the model that lacks pages gives up layers first, and the others too only as many as
    their decode steps hide, though they have no request."""
    policy = Mirage(spatial=1)
    low = {name: dict(CAPS, b=2, c=2)[name] for name in "abc"}
    idle = [replace(m, decode_seconds=4e-3) for m in three()[1:]]
    models = [replace(three()[0], spec=replace(three()[0].spec, priority=0)), *idle]
    first = policy(short_of(2, *models), memory(active="abc"))
    assert lent(first.actions) == {"a": 1}, "its own, though idle ones have layers"
    assert lent(Mirage()(short_of(2, *models), memory()).actions) == {"c": 1}
    every = policy(short_of(2 * sum(low.values()), *models), memory(active="abc"))
    assert lent(every.actions) == low
    more = policy(short_of(2 * sum(low.values()) + 2, *models), memory(active="abc"))
    assert "Preempt" in kinds(more.actions)
    turns = Mirage(spatial=1, temporal=1)
    held = [replace(m, held=m.name != "a") for m in three()]
    decision = turns(short_of(2, *held), memory(ModelTurn("a", 9.9)))
    assert lent(decision.actions) == {"c": 1}, "in turns there are inactive ones"


def test_the_setting_of_section_7_3_lets_each_share_grow_by_its_own_layers() -> None:
    policy = Mirage(spatial=1, pooled=0)
    a, b, c = three()
    models = [replace(m, limit=20, decode_seconds=4e-3) for m in (replace(a, kv_pages=20), b, c)]
    lack = Shortage("a", RUNNING.id, 2, limited=True)
    decision = policy(device(*models, free=0, shortages=(lack,)), memory(active="abc"))
    assert lent(decision.actions) == {"a": 1}
    assert [a.pages for a in decision.actions if isinstance(a, Limit) and a.model == "a"] == [22]


def test_pinned_models_and_those_without_equal_layers_lend_nothing() -> None:
    pinned = layered(model("c", pinned=True))
    decision = Mirage()(short_of(2, busy(), model("b"), pinned), memory(order="cab"))
    assert kinds(decision.actions) == ["Preempt"]


@pytest.mark.parametrize(("options", "layers"), [({"portion": 0.5}, 4), ({"beta": 2}, 6)])
def test_options_bound_what_is_lent(options: dict[str, float], layers: int) -> None:
    b, c = model("b"), layered(model("c"), prefill=1.0)
    for asked in (layers, layers + 1):
        a = model("a", kv=40, running=(RUNNING,))
        view = short_of(2 * asked, a, b, c)
        found = lent(Mirage(**options)(view, memory()).actions)
        assert found == ({"c": layers} if asked == layers else {})


def test_the_first_of_all_gets_layers_beyond_the_cap_rather_than_nothing() -> None:
    a, b, c = three(**CAPS)
    alone = replace(a, running=(RUNNING,))
    assert lent(Mirage()(short_of(2, alone, b, c), memory()).actions) == {"c": 7}
    older = layered(model("b", running=(request(0, arrival=0.5),)), lent=2)
    assert Mirage()(short_of(2, alone, older, c), memory(active="ab")).actions == ()


def test_nobody_waits_for_layers_longer_than_stated() -> None:
    """`a` alone, whose answer has 512 passes; each load beyond its cap of 2 takes a millisecond."""
    alone = layered(model("a", kv=20, running=(RUNNING,)), lent=2)
    view = short_of(2, alone)
    assert lent(Mirage(longest_stall=0.01)(view, memory(order="a")).actions) == {}
    assert lent(Mirage(longest_stall=2.0)(view, memory(order="a")).actions) == {"a": 3}
    assert lent(Mirage(longest_stall=0.01, cap=0)(view, memory(order="a")).actions) == {"a": 3}
    nearly = replace(alone, running=(RUNNING._replace(max_tokens=4),))
    assert lent(Mirage(longest_stall=0.01)(short_of(2, nearly), memory(order="a")).actions) == {
        "a": 3
    }


def test_who_would_wait_for_layers_too_long_is_refused() -> None:
    """Weights leave 36 pages, and layers up to 14 more; the request needs 46."""
    first = request(3, arrival=0.5, tokens=46 * 64)
    a = layered(model("a", pages=60, waiting=(first,), first=46))
    view = device(a, free=36, shortages=(Shortage("a", first.id, 10, limited=False),))
    refusals = [x for x in Mirage()(view, memory(order="a")).actions if isinstance(x, Refuse)]
    assert [x.request_id for x in refusals] == [first.id]
    for policy in (Mirage(longest_stall=60.0), Mirage(cap=0)):
        assert not any(isinstance(x, Refuse) for x in policy(view, memory(order="a")).actions)


def test_whose_requests_wait_for_layers_too_long_has_younger_ones_make_way() -> None:
    """`a` gave up 7 layers while it was idle; `b`, which has the pages, came later."""
    a = layered(model("a", running=(RUNNING,)), lent=7)
    b = model("b", kv=20, running=(YOUNGER,))
    made = Mirage()(device(a, b, free=0), memory(active="ab", order="ab")).actions
    assert [x.request_id for x in made if isinstance(x, Preempt)] == [YOUNGER.id]
    older = replace(b, running=(request(0, arrival=0.5, pages=20),))
    assert kinds(Mirage()(device(a, older, free=0), memory(active="ab", order="ab")).actions) == []


# -- layers come back ---------------------------------------------------------------------------


def calm(*models: ModelView, free: int, since: float | None = 5.0, **more: object) -> DeviceView:
    return device(*models, free=free, **more)  # type: ignore[arg-type]


def test_layers_come_back_when_nothing_was_short_for_a_while() -> None:
    policy = Mirage(cooldown=1.0, reserve=0.1)
    models = layered(busy(kv=2), lent=2), model("b"), layered(model("c"), lent=2)
    view = device(*models, free=40, now=10.0)
    first = policy(view, memory())
    assert (first.actions, first.wake_at) == ((), pytest.approx(11.0))
    assert isinstance(first.memo, MirageMemo)
    assert policy(replace(view, now=10.9), first.memo).actions == ()
    later = policy(replace(view, now=11.0), first.memo)
    assert later.actions == (
        remap(models[0], WHOLE, "the peak is over"),
        remap(models[2], WHOLE, "the peak is over"),
    )
    assert Mirage(reversion=0)(replace(view, now=11.0), first.memo).actions == ()


def test_a_shortage_begins_the_wait_anew() -> None:
    policy = Mirage(cooldown=1.0)
    short = policy(short_of(2, *three(a=1), now=10.0), memory(calm_since=9.5))
    after = policy(device(*three(a=1), free=60, now=10.6), short.memo)
    assert after.actions == ()
    assert after.wake_at == pytest.approx(11.6)


def test_a_reserve_stays_free_and_active_models_come_first() -> None:
    """Weights take 30 of 96 pages: a reserve of a tenth is 7."""
    policy = Mirage(cooldown=1.0, reserve=0.1)
    for free, expected in ((8, {}), (9, {"a": 1}), (11, {"a": 0}), (13, {"a": 0, "c": 1})):
        view = device(*three(a=2, c=2), free=free)
        assert lent(policy(view, memory(calm_since=1.0)).actions) == expected


def test_cached_prefixes_make_way_for_layers_that_come_back() -> None:
    a, b, c = three(a=1)
    cached = replace(b, kv_pages=30, cached_pages=30)
    decision = Mirage()(device(a, cached, c, free=1), memory(calm_since=1.0))
    assert kinds(decision.actions) == ["DropCache", "Reside"]


def test_of_inactive_models_the_next_in_turn_gets_its_layers_back_first() -> None:
    turn = ModelTurn("a", 9.9, past=("b", "c"))
    models = (model("a"), *(layered(model(n, held=True), lent=1) for n in "bc"))
    view = device(*models, free=9)
    decision = Mirage(temporal=1)(view, memory(turn, "", calm_since=1.0))
    assert lent(decision.actions) == {"b": 0}


def test_who_becomes_active_is_brought_back_to_its_cap_by_those_who_are_not() -> None:
    turn = ModelTurn("b", 9.0)
    a = layered(model("a", waiting=(request(1),), held=True), lent=6)
    b = layered(model("b"))
    view = device(a, b, model("c", held=True), free=3)
    policy = Mirage(temporal=1)
    first = policy(view, memory(turn, "b"))
    assert lent(first.actions) == {"a": 5, "b": 3}, "one page pair is there, b gives the rest"
    assert isinstance(first.memo, MirageMemo)
    assert first.memo.returning == {"a"}
    a = layered(model("a", running=(request(1),)), lent=5)
    waits = device(a, layered(b, lent=3), model("c", held=True), free=1, reclaiming=6)
    assert lent(policy(waits, first.memo).actions) == {}
    there = device(a, layered(b, lent=3), model("c", held=True), free=7)
    assert lent(policy(there, first.memo).actions) == {"a": 2}


# -- shares that grow ---------------------------------------------------------------------------


def test_a_share_grows_by_what_is_lent_for_it_and_shrinks_when_that_goes_back() -> None:
    policy = Mirage(pooled=0, cooldown=1.0)
    a, b, c = three()
    a = replace(a, limit=20, kv_pages=20)
    b, c = (replace(m, limit=20) for m in (b, c))
    lack = (Shortage("a", RUNNING.id, 3, limited=True),)
    decision = policy(device(a, b, c, free=40, shortages=lack), memory())
    assert lent(decision.actions) == {"c": 2}
    assert [x for x in decision.actions if isinstance(x, Limit)] == [
        Limit("a", 24, why="layers give up pages for it")
    ]
    a, c = replace(a, limit=24, kv_pages=10), layered(c, lent=2)
    back = policy(device(a, b, c, free=50, now=20.0), memory(calm_since=1.0))
    assert lent(back.actions) == {"c": 0}
    assert [x for x in back.actions if isinstance(x, Limit)] == [
        Limit("a", 20, why="the peak is over")
    ]


def test_what_one_share_does_not_need_any_more_another_gets_without_a_change_of_layers() -> None:
    a, b, c = three(c=2)
    a = replace(a, limit=20, kv_pages=20)
    lack = (Shortage("a", RUNNING.id, 3, limited=True),)
    decision = Mirage(pooled=0)(device(a, b, c, free=40, shortages=lack), memory())
    assert decision.actions == (Limit("a", 24, why="layers give up pages for it"),)
