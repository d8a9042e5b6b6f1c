"""Models that keep their places: turns, one pool or shares, the youngest request preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache, Hold, Limit, Preempt
from ballast.core.view import ModelView, Residency, Shortage
from ballast.policy.base import MemoryPolicy
from ballast.policy.memory.kvswap import KvSwap
from ballast.policy.memory.mirage import Mirage
from ballast.policy.memory.recompute import PlacesMemo, Recompute, pooled
from ballast.policy.memory.static import Division, FixedShares, shares
from ballast.policy.memory.temporal_sharing import ModelTurn
from tests.policy.worlds import device, kind, model, request

ABSENT = Residency.ABSENT
AMONG = Division(tuple((name, 1.0) for name in "abc"), dict.fromkeys("abc", 20))


def standing(turn: ModelTurn | None = None) -> PlacesMemo:
    return PlacesMemo(AMONG, turn)


def held(actions: object) -> dict[str, bool]:
    return {a.model: a.held for a in actions if isinstance(a, Hold)}  # type: ignore[attr-defined]


def test_shares_are_those_of_static() -> None:
    view = device(model("a", ABSENT, share=3), model("b", ABSENT), free=96)
    assert Recompute(pooled=0)(view, None).actions == FixedShares()(view, None).actions


def test_one_pool_bounds_each_models_kv_by_what_all_weights_leave() -> None:
    view = device(model("a", ABSENT, share=3), model("b", ABSENT), free=96)
    actions = Recompute(pooled=1)(view, None).actions
    assert {a.model: a.pages for a in actions if isinstance(a, Limit)} == {"a": 76, "b": 76}
    assert [a.model for a in actions if kind(a) == "Activate"] == ["a", "b"]


def test_the_youngest_of_all_makes_way_in_one_pool_and_only_the_models_own_in_its_share() -> None:
    old, young = request(1, arrival=1, pages=4), request(2, arrival=2, pages=4)
    a = model("a", kv=8, limit=8, running=(old, young))
    b = model("b", kv=8, limit=8, running=(request(3, arrival=3, pages=8),))
    lack = (Shortage("a", old.id, 1, limited=True),)
    view = device(a, b, model("c"), free=0, shortages=lack)
    for shared, victim in ((0, young), (1, b.running[0])):
        decision = Recompute(pooled=shared)(view, standing())
        owner = "b" if shared else "a"
        assert decision.actions == (Preempt(owner, victim.id, why="a comes first"),)


def test_who_waits_for_admission_undoes_nobody() -> None:
    a = model("a", kv=20, running=(request(2, arrival=2, pages=20),), waiting=(request(1),))
    lack = (Shortage("a", "r1", 4, limited=False),)
    view = device(a, model("b"), model("c"), free=0, shortages=lack)
    assert Recompute(pooled=1)(view, standing()).actions == ()


@pytest.mark.parametrize("policy", [Recompute(), Mirage(), KvSwap()], ids=repr)
def test_a_model_without_a_place_is_not_activated(policy: MemoryPolicy) -> None:
    """Its request is refused anyway, and its weights would delay those of the model that has the
    place, which was evicted meanwhile."""
    placed = model("a", ABSENT, pages=60, share=3.0, limit=36)
    without = model("b", ABSENT, pages=60, waiting=(request(1),))
    view = device(placed, without, free=96)
    actions = policy(view, policy(view, None).memo).actions
    assert [(kind(x), x.model) for x in actions] == [("Refuse", "b")]


# -- turns ------------------------------------------------------------------------------------


def test_a_turn_holds_the_others_back() -> None:
    a = model("a", waiting=(request(1),))
    b, c = model("b", waiting=(request(2),)), model("c")
    decision = Recompute(temporal=1)(device(a, b, c, free=60), standing())
    assert held(decision.actions) == {"b": True, "c": True}
    assert isinstance(decision.memo, PlacesMemo)
    assert decision.memo.turn == ModelTurn("a", 10.0)


def test_turns_go_round_in_the_fleets_order() -> None:
    waits = [model(n, waiting=(request(i, arrival=9 - i),), held=True) for i, n in enumerate("abc")]
    a, b, c = waits
    following = {}
    for name, others in {"a": (model("a"), b, c), "b": (a, model("b"), c)}.items():
        memo = Recompute(temporal=1)(device(*others, free=60), standing(ModelTurn(name, 9.0))).memo
        assert isinstance(memo, PlacesMemo)
        following[name] = memo.turn
    assert following == {"a": ModelTurn("b", 10.0, ("a",)), "b": ModelTurn("c", 10.0, ("b",))}


def test_a_turn_lasts_its_quantum_then_runs_out_what_it_runs() -> None:
    policy = Recompute(temporal=1, quantum=1.0)
    a = model("a", running=(request(1),), waiting=(request(2),))
    b, c = model("b", waiting=(request(3),), held=True), model("c", held=True)
    early = policy(device(a, b, c, free=60, now=10.0), standing(ModelTurn("a", 9.5)))
    assert (early.actions, early.wake_at) == ((), pytest.approx(10.5))
    late = policy(device(a, b, c, free=60, now=10.6), standing(ModelTurn("a", 9.5)))
    assert (held(late.actions), late.wake_at) == ({"a": True}, None)
    drained = model("a", waiting=(request(2),), held=True)
    over = policy(device(drained, b, c, free=60, now=10.7), standing(ModelTurn("a", 9.5)))
    assert held(over.actions) == {"b": False}
    idle = policy(device(model("a"), b, c, free=60, now=9.6), standing(ModelTurn("a", 9.5)))
    assert held(idle.actions) == {"a": True, "b": False}


def test_a_turn_begins_with_the_pages_that_its_first_request_lacks() -> None:
    """Its shortage is known from an earlier turn, so that no new one would ask for them."""
    a = model("a", kv=8, cached=8)
    b = model("b", waiting=(request(2),), held=True)
    lack = (Shortage("b", "r2", 4, limited=False),)
    decision = Recompute(temporal=1)(
        device(a, b, model("c", held=True), free=0, shortages=lack), standing(ModelTurn("a", 9.9))
    )
    assert held(decision.actions) == {"a": True, "b": False}
    assert [x.model for x in decision.actions if isinstance(x, DropCache)] == ["a"]


@pytest.mark.parametrize("preemptive", [0, 1])
def test_no_turn_is_waited_for_where_none_brings_pages(preemptive: int) -> None:
    """The loop is stuck then, and ends that; an alarm would hide it from the loop."""
    a, b, c = (
        model(n, waiting=(request(i),), held=n != "a", frozen=n != "a" and bool(preemptive))
        for i, n in enumerate("abc")
    )
    lack = tuple(Shortage(n, f"r{i}", 9, limited=False) for i, n in enumerate("abc"))
    policy = Recompute(temporal=1, preemptive=preemptive)
    for free, wake in ((8, None), (9, 10.9)):
        view = device(a, b, c, free=free, shortages=lack)
        assert policy(view, standing(ModelTurn("a", 9.9))).wake_at == (wake and pytest.approx(wake))


def test_a_turn_nobody_waits_for_goes_on() -> None:
    a = model("a", running=(request(1),), waiting=(request(2),), held=True)
    others = model("b", held=True), model("c", held=True)
    decision = Recompute(temporal=1)(device(a, *others, free=60), standing(ModelTurn("a", 1.0)))
    assert held(decision.actions) == {"a": False}


def test_the_turn_of_a_model_that_is_gone_is_over() -> None:
    b, c = model("b", waiting=(request(3),), held=True), model("c", held=True)
    for gone in ((), (model("a", ABSENT, waiting=(request(1),)),)):
        decision = Recompute(temporal=1)(device(*gone, b, c, free=0), standing(ModelTurn("a", 9.0)))
        assert held(decision.actions)["b"] is False


# -- preemptive turns -------------------------------------------------------------------------

PREEMPTIVE = Recompute(temporal=1, quantum=1.0, preemptive=1)


def frozen(actions: object) -> dict[str, bool]:
    return {a.model: a.frozen for a in actions if isinstance(a, Hold)}  # type: ignore[attr-defined]


def test_a_preemptive_turn_ends_at_once_and_what_runs_pauses() -> None:
    a = model("a", running=(request(1),), waiting=(request(2),))
    b, c = (model(n, held=True, frozen=True, waiting=(request(3),)) for n in "bc")
    early = PREEMPTIVE(device(a, b, c, free=60, now=10.0), standing(ModelTurn("a", 9.5)))
    assert (early.actions, early.wake_at) == ((), pytest.approx(10.5))
    over = PREEMPTIVE(device(a, b, c, free=60, now=10.6), standing(ModelTurn("a", 9.5)))
    assert held(over.actions) == frozen(over.actions) == {"a": True, "b": False}
    assert over.wake_at == pytest.approx(11.6)


def test_a_model_whose_requests_all_pause_gets_another_turn() -> None:
    """Also where none of its requests waits to be admitted."""
    resting = model("a", running=(request(1),), held=True, frozen=True)
    b, c = model("b"), model("c", held=True, frozen=True)
    decision = PREEMPTIVE(device(resting, b, c, free=60), standing(ModelTurn("b", 9.9)))
    assert held(decision.actions) == frozen(decision.actions) == {"a": False, "b": True}


def test_frozen_requests_claim_no_pages() -> None:
    old = request(1, arrival=1, pages=4)
    a = model("a", kv=8, running=(old,), held=True, frozen=True)
    b = model("b", kv=8, running=(request(2, arrival=2, pages=8),))
    lack = (Shortage("a", old.id, 1, limited=False),)
    view = device(a, b, model("c", held=True, frozen=True), free=0, shortages=lack)
    assert PREEMPTIVE(view, standing(ModelTurn("b", 9.9))).actions == ()


def test_a_preemptive_turn_that_can_run_nothing_ends_early() -> None:
    """A waiting request preempts nobody: its model would idle while another could run."""
    a = model("a", kv=20, running=(request(1, pages=20),), held=True, frozen=True)
    b, c = model("b", waiting=(request(2),)), model("c", held=True, frozen=True)
    lack = (Shortage("b", "r2", 4, limited=False),)
    over = PREEMPTIVE(device(a, b, c, free=3, shortages=lack), standing(ModelTurn("b", 9.9)))
    assert held(over.actions) == {"a": False, "b": True}
    assert isinstance(over.memo, PlacesMemo)
    assert over.memo.turn == ModelTurn("a", 10.0, ("b",))
    assert over.wake_at == pytest.approx(11.0)
    # Not where there is room by now, nor while pages are on their way.
    for view in (
        device(a, b, c, free=4, shortages=lack),
        device(a, b, c, free=3, reclaiming=1, shortages=lack),
    ):
        stays = PREEMPTIVE(view, standing(ModelTurn("b", 9.9)))
        assert (stays.actions, stays.wake_at) == ((), pytest.approx(10.9))


def test_a_turn_passes_to_nobody_who_lacks_pages_too() -> None:
    a = model("a", kv=20, waiting=(request(1),), held=True, frozen=True)
    b, c = model("b", waiting=(request(2),)), model("c", held=True, frozen=True)
    lack = tuple(Shortage(n, r, 4, limited=False) for n, r in (("a", "r1"), ("b", "r2")))
    view = device(a, b, c, free=3, shortages=lack)
    assert PREEMPTIVE(view, standing(ModelTurn("b", 9.9))).actions == ()


def test_a_turn_lasts_where_the_decision_frees_pages() -> None:
    mine, theirs = request(1, arrival=1, pages=4), request(2, arrival=2, pages=8)
    a = model("a", kv=4, running=(mine,))
    b = model("b", kv=8, running=(theirs,), held=True, frozen=True)
    lack = (Shortage("a", mine.id, 1, limited=False),)
    view = device(a, b, model("c", held=True, frozen=True), free=0, shortages=lack)
    decision = PREEMPTIVE(view, standing(ModelTurn("a", 9.9)))
    assert decision.actions == (Preempt("b", theirs.id, why="a comes first"),)


def test_places_go_to_the_models_of_which_most_is_expected() -> None:
    """Where the workload is known, each with room for a request of full context: 8 pages."""

    def expecting(name: str, tokens: float) -> ModelView:
        m = model(name, Residency.ABSENT)
        return replace(m, spec=replace(m.spec, expected_tokens=tokens))

    models = (expecting("rare", 1.0), expecting("busy", 50.0), expecting("other", 9.0))
    view = device(*models, free=44, total=48)
    assert sorted(shares(view)) == ["busy", "other"], "three of 10 pages leave less than 24"
    assert sorted(pooled(view)) == ["busy", "other", "rare"], "one pool has room for one request"
    unknown = device(*(expecting(m.name, 0.0) for m in models), free=44, total=48)
    assert sorted(shares(unknown)) == ["busy", "other", "rare"]
    small = device(*models, free=12, total=16)
    assert sorted(shares(small)) == ["busy"], "no share holds a whole context: as if unplanned"
