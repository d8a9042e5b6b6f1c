"""Preset `lru`: whole models with reserved KV stay while they fit, the longest idle one goes."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.actions import Decision, Hold, Limit
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.memory.lru import LeastRecentlyUsed
from ballast.policy.presets import resolve
from tests.policy.worlds import device, kind, model, request

ONE = 8
"""Pages of a request of full context: 512 tokens in blocks of 16, four of them a slab of a page."""
POLICY = LeastRecentlyUsed(parallel=1, quantum=1.0)


def reserved(name: str, residency: Residency = Residency.RESIDENT, **more: object) -> ModelView:
    """A model of 10 pages of weights that reserves 8 for its KV."""
    return model(name, residency, limit=ONE, **more)  # type: ignore[arg-type]


def decide(view: DeviceView, memo: object = None) -> Decision:
    return POLICY(view, memo)


def wants(name: str, sequence: int = 1, arrival: float = 0.0) -> ModelView:
    waiting = (request(sequence, arrival=arrival),)
    return reserved(name, Residency.ABSENT, waiting=waiting, first=1)


def evicted(decision: Decision) -> list[str]:
    return [a.model for a in decision.actions if kind(a) == "Evict"]


def activated(decision: Decision) -> list[str]:
    return [a.model for a in decision.actions if kind(a) == "Activate"]


def test_a_model_that_fits_beside_comes_without_an_eviction() -> None:
    view = device(reserved("a"), wants("b"), free=30, total=40)
    assert activated(decide(view)) == ["b"]
    assert evicted(decide(view)) == []


def test_reserved_kv_keeps_a_model_out_though_its_weights_would_fit() -> None:
    """Two models take 20 pages of weights and 16 of KV; 35 are not enough, and nothing is used."""
    view = device(reserved("a"), wants("b"), free=25, total=35)
    assert evicted(decide(view)) == ["a"]
    assert activated(decide(view)) == ["b"]


def test_the_least_recently_used_goes_and_no_more_than_are_needed() -> None:
    idle = [reserved(name, last_used=used) for name, used in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    view = device(*idle, wants("d"), free=24, total=58)
    assert evicted(decide(view)) == ["b"]


def test_a_busy_model_stays_for_its_quantum_then_drains_and_goes() -> None:
    busy = reserved("a", running=(request(0, pages=1),), kv=1)
    view = device(busy, wants("b", arrival=5.0), free=9, total=24)
    first = decide(view)
    assert not evicted(first)
    assert not [a for a in first.actions if isinstance(a, Hold)]
    assert first.wake_at == view.now + 1.0
    later = replace(view, now=view.now + 1.0)
    draining = decide(later, first.memo)
    assert [(a.model, a.held) for a in draining.actions if isinstance(a, Hold)] == [("a", True)]
    assert not evicted(draining)
    empty = replace(busy, running=(), held=True, waiting=(request(5, arrival=9.0),), kv_pages=0)
    over = decide(replace(later, models=(empty, wants("b")), free=10), draining.memo)
    assert evicted(over) == ["a"]
    assert activated(over) == ["b"]


def test_a_busy_model_makes_way_at_once_for_one_that_owes_a_first_token() -> None:
    """Also where a request that came just now is the first of its queue."""
    busy = reserved("a", running=(request(0, pages=1)._replace(first=0.4),), kv=1)
    owing = wants("b", arrival=0.5)
    owing = replace(owing, waiting=(request(9, arrival=9.9), *owing.waiting))
    view = device(busy, owing, free=9, total=24)
    before = {"a": 0.0}
    early = decide(view, before)
    assert (evicted(early), early.wake_at) == ([], 10.5)
    late = decide(replace(view, now=10.6), before)
    assert (evicted(late), activated(late)) == (["a"], ["b"])


def test_of_two_models_that_owe_a_first_token_the_one_who_owes_it_longer_stays() -> None:
    """Else each would be evicted before its prompt ends."""
    late = 20.0

    def decision(running: float, waiting: float) -> Decision:
        busy = reserved("a", running=(request(0, arrival=running, pages=1),), kv=1)
        view = device(busy, wants("b", arrival=waiting), free=9, total=24, now=late)
        return decide(view, {"a": 0.0})

    assert evicted(decision(1.0, 2.0)) == []
    assert evicted(decision(2.0, 1.0)) == ["a"]
    assert evicted(decision(1.0, 1.0)) == []


def test_a_model_is_held_no_longer_than_somebody_waits() -> None:
    held = reserved("a", running=(request(0, pages=1),), kv=1, held=True)
    absent = reserved("b", Residency.ABSENT)
    decision = decide(device(held, absent, free=9, total=24))
    assert [(a.model, a.held) for a in decision.actions if isinstance(a, Hold)] == [("a", False)]


def test_who_waited_longest_comes_first() -> None:
    """There is room for one more: the older request's model."""
    view = device(
        reserved("a", running=(request(0),)),
        wants("b", 2, arrival=5.0),
        wants("c", 1, arrival=4.0),
        free=26,
        total=40,
    )
    assert activated(decide(view)) == ["c"]


def test_pinned_models_stay() -> None:
    pinned = reserved("a", pinned=True, last_used=0.0)
    view = device(pinned, reserved("b", last_used=1.0), wants("c"), free=16, total=40)
    assert evicted(decide(view)) == ["b"]


def test_reservations_are_bounds_of_kv_and_no_larger_than_what_weights_leave() -> None:
    view = device(model("a"), model("b", Residency.ABSENT), free=10, total=24)
    limits = {
        a.model: a.pages for a in resolve("lru").memory(view, None).actions if isinstance(a, Limit)
    }
    assert limits == {"a": 10, "b": 10}, (
        "four requests of 8 pages would not fit beside 10 of weights"
    )
