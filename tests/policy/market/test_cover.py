"""Claims are covered in order, page by page, and what is freed for one is promised to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from ballast.core.actions import Compact, Decision, DropCache, Preempt, Promise, Recall
from ballast.core.settings import Slo
from ballast.core.view import DeviceView, ModelView, Residency, Shortage
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claims import BEHIND_ALL
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.kvswap import KvSwap
from ballast.policy.memory.mirage import Mirage
from ballast.policy.memory.recompute import Recompute
from ballast.policy.memory.static import FixedShares
from ballast.policy.memory.swap import WholeModels
from ballast.policy.presets import PRESETS, resolve
from tests.policy import worlds
from tests.policy.worlds import device, kind, model, request

T = TypeVar("T")
ABSENT, ACTIVATING = Residency.ABSENT, Residency.ACTIVATING
POOLED = (Balloon(), Recompute(pooled=1), Mirage(), KvSwap(pooled=1))
"""Policies under which models take pages from each other."""


def settled(policy: MemoryPolicy, view: DeviceView) -> Decision:
    """A decision after the one that gives models their places."""
    return policy(view, policy(view, None).memo)


def of_kind(decision: Decision, kind: type[T]) -> list[T]:
    return [a for a in decision.actions if isinstance(a, kind)]


# -- a claim that cannot be covered ---------------------------------------------------------------


def test_a_claim_that_cannot_be_covered_leaves_free_pages_to_those_after_it() -> None:
    old = model("old", ABSENT, pages=50, waiting=(request(1, arrival=9.9),))
    young = model("young", ABSENT, pages=11, waiting=(request(2, arrival=10.0),))
    decision = Balloon()(device(old, young, free=26), None)
    assert [(kind(a), a.model) for a in decision.actions] == [("Activate", "young")]


def test_who_was_let_by_makes_way_once_that_covers_the_older_claim() -> None:
    old = model("old", ABSENT, pages=50, waiting=(request(1, arrival=8.0),))
    let_by = model("young", pages=30, kv=4, running=(request(2, arrival=8.1, pages=4),))
    decision = Balloon()(device(old, let_by, free=20), None)
    assert [(kind(a), a.model) for a in decision.actions][-2:] == [
        ("Evict", "young"),
        ("Activate", "old"),
    ]


@pytest.mark.parametrize("policy", POOLED[1:], ids=lambda p: type(p).__name__)
def test_who_undoes_nobody_keeps_free_pages_only_when_it_is_overdue(policy: MemoryPolicy) -> None:
    """Else smaller requests of other models would overtake it for ever."""
    lacks = tuple(Shortage(name, f"r{i}", n, False) for i, name, n in ((1, "a", 9), (2, "b", 4)))
    for now, promised in ((10.4, ["b"]), (10.5, ["a"])):
        a = model("a", waiting=(request(1, arrival=10.0),))
        b = model("b", waiting=(request(2, arrival=10.1),))
        view = device(a, b, free=6, now=now, shortages=lacks)
        assert [p.model for p in settled(policy, view).promises] == promised


@pytest.mark.parametrize("policy", POOLED[1:], ids=lambda p: type(p).__name__)
def test_who_undoes_nobody_keeps_cached_pages_as_well_and_drops_them_when_that_covers_it(
    policy: MemoryPolicy,
) -> None:
    """What ends leaves its pages cached: free ones alone would be next to nothing."""
    lacks = tuple(Shortage(name, f"r{i}", n, False) for i, name, n in ((1, "a", 9), (2, "b", 4)))
    a = model("a", waiting=(request(1, arrival=10.0),))
    b = model("b", waiting=(request(2, arrival=10.1),))
    for now, cached, dropped in ((10.4, 5, [4]), (10.5, 5, []), (10.5, 9, [9])):
        idle = model("c", kv=cached, cached=cached)
        view = device(a, b, idle, free=0, now=now, shortages=lacks)
        drops = of_kind(settled(policy, view), DropCache)
        assert [drop.pages for drop in drops] == dropped


def test_of_models_that_only_wait_that_comes_first_whose_first_token_is_due_first() -> None:
    """As its prompt will be; but no service level counts as longer than LONGEST_WAIT."""

    def absent(name: str, i: int, arrival: float, ttft: float) -> ModelView:
        waits = request(i, arrival=arrival)._replace(due=arrival + ttft)
        m = model(name, ABSENT, pages=10, waiting=(waits,))
        return replace(m, spec=replace(m.spec, slo=Slo(ttft=ttft, tpot=0.1)))

    for first, patient, urgent in (("urgent", 9.0, 0.5), ("patient", 1e9, LONGEST_WAIT - 0.5)):
        a = absent("patient", 1, 9.8, patient)
        b = absent("urgent", 2, 9.9 if first == "urgent" else 10.4, urgent)
        decision = Balloon(patience=1.0)(device(a, b, free=12, now=10.2), None)
        assert [(kind(x), x.model) for x in decision.actions] == [("Activate", first)]


@pytest.mark.parametrize("tuned", [False, True])
def test_a_request_waits_for_the_service_level_of_its_adapter(tuned: bool) -> None:
    """It is overdue, and may have `young` undone, after half of 0.1 s; its base has 10 s."""
    first = request(1, arrival=9.9)._replace(due=9.9 + (0.1 if tuned else 10.0))
    old = model("old", ABSENT, pages=50, waiting=(first,))
    old = replace(old, spec=replace(old.spec, slo=Slo(ttft=10.0, tpot=0.1)))
    young = model("young", pages=30, kv=4, running=(request(2, arrival=9.95, pages=4),))
    decision = Balloon()(device(old, young, free=20), None)
    assert bool(worlds.evicted(decision.actions)) == tuned


# -- no more than is needed -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POOLED, ids=lambda p: type(p).__name__)
def test_one_page_short_costs_one_page_of_cache(policy: MemoryPolicy) -> None:
    short = (Shortage("a", "r1", 1, limited=False),)
    a = model("a", kv=5, running=(request(1),))
    cached = model("c", kv=500, cached=500, running=(request(2),), last_used=1)
    view = device(a, cached, free=0, total=600, shortages=short)
    assert of_kind(settled(policy, view), DropCache) == [DropCache("c", 1, "a needs pages")]


def test_pages_that_free_ones_make_up_for_are_not_dropped() -> None:
    wanting = model("w", ABSENT, pages=20, waiting=(request(9, arrival=10),), first=1)
    cached = model("c", kv=60, cached=60, running=(request(1),))
    decision = Balloon()(device(cached, wanting, free=5), None)
    assert of_kind(decision, DropCache) == [DropCache("c", 16, "w needs pages")]


def test_blocks_are_moved_together_as_far_as_is_needed() -> None:
    short = (Shortage("a", "r1", 3, limited=False),)
    a = model("a", kv=5, running=(request(1),))
    loose = model("l", kv=400, loose=300, running=(request(2),))
    decision = Balloon()(device(a, loose, free=0, total=600, shortages=short), None)
    assert of_kind(decision, Compact) == [Compact("l", 3, "a needs pages")]


def test_two_claims_take_their_parts_of_one_cache() -> None:
    short = tuple(Shortage(name, f"r{i}", n, False) for i, name, n in ((1, "a", 3), (2, "b", 4)))
    models = [model(name, kv=5, running=(request(i),)) for i, name in ((1, "a"), (2, "b"))]
    cached = model("c", kv=10, cached=6, running=(request(3, pages=4),))
    decision = Balloon()(device(*models, cached, free=0, shortages=short), None)
    assert of_kind(decision, DropCache) == [
        DropCache("c", 3, "a needs pages"),
        DropCache("c", 3, "b needs pages"),
    ]
    assert [a.request_id for a in of_kind(decision, Preempt)] == ["r3"]


@pytest.mark.parametrize("policy", POOLED, ids=lambda p: type(p).__name__)
def test_a_claim_does_not_drop_the_prefix_that_its_own_request_goes_on_from(
    policy: MemoryPolicy,
) -> None:
    short = (Shortage("a", "r1", 4, limited=False),)
    waiting = (request(1, arrival=9.9),)
    a = model("a", kv=9, cached=9, waiting=waiting, first=12, first_cached=8)
    view = device(a, free=3, shortages=short)
    decision = settled(policy, view)
    assert of_kind(decision, DropCache) == [DropCache("a", 1, "a needs pages", spare="r1")]
    view = device(a, free=0, shortages=short)
    assert settled(policy, view).actions == (), "dropping the prefix, too, would free nothing"


def test_a_scattered_prefix_goes_as_the_last_remedy() -> None:
    """Eight pages hold what computed anew takes four."""
    short = (Shortage("a", "r1", 4, limited=False),)
    a = model("a", kv=8, cached=8, waiting=(request(1),), first=8, first_cached=8)
    decision = Balloon()(device(a, free=0, shortages=short), None)
    assert of_kind(decision, DropCache) == [DropCache("a", 4, "a needs pages")]


# -- promises -------------------------------------------------------------------------------------


def test_what_is_freed_for_a_claim_is_promised_to_it_until_the_rest_has_come() -> None:
    flying = tuple(request(i, arrival=9.0 + i, pages=8, flying=True) for i in (1, 2))
    a, b = (model(n, kv=8, running=(r,)) for n, r in zip("ab", flying, strict=True))
    wanting = model("w", ABSENT, pages=14, waiting=(request(0, arrival=8.0),), first=2)
    decision = Balloon()(device(a, b, wanting, free=0), None)
    assert len(of_kind(decision, Preempt)) == 2
    assert decision.promises == (Promise("w", 14, 2),)
    half_way = device(a, model("b", waiting=(flying[1],)), wanting, free=8, reclaiming=8)
    assert Balloon()(half_way, None).promises == (Promise("w", 14, 2),)


def test_where_a_model_has_to_go_others_requests_are_not_undone_as_well() -> None:
    """Weights of 30 pages: the requests have 12 together, and `b` has 20 with its own."""
    small = [request(i, arrival=9.0 + i, pages=2) for i in range(1, 6)]
    a = model("a", kv=8, running=tuple(small[1:]), pinned=True)
    b = model("b", pages=18, kv=2, running=(small[0],))
    wanting = model("w", ABSENT, pages=20, waiting=(request(0, arrival=8.0),))
    decision = Balloon(fair_shares=0)(device(a, b, wanting, free=0), None)
    assert of_kind(decision, Preempt) == []
    assert [*worlds.evicted(decision.actions)] == ["b"]


def test_a_model_that_starves_gets_the_place_of_one_whose_older_requests_only_wait() -> None:
    """The running request of `a` came after that of `w`; one that waits came before."""
    now = 8.0 + LONGEST_WAIT
    a = model(
        "a", kv=8, running=(request(2, arrival=9.0, pages=8),), waiting=(request(1, arrival=7.0),)
    )
    wanting = model("w", ABSENT, pages=10, waiting=(request(3, arrival=8.0),))
    decision = Balloon()(device(a, wanting, free=0, now=now), None)
    assert [*worlds.evicted(decision.actions)] == ["a"]
    before = Balloon()(device(a, wanting, free=0, now=now - 0.1), None)
    assert not worlds.evicted(before.actions)
    older = replace(a, running=(request(1, arrival=7.0, pages=8),))
    assert not worlds.evicted(Balloon()(device(older, wanting, free=0, now=now), None).actions)


def test_a_model_that_starves_and_has_come_is_not_evicted_before_it_runs() -> None:
    """By one that waits for less long, though longer than the model's own request; and by one that
    starves too if that came before, also where the requests of both are left out."""
    now = 9.0 + LONGEST_WAIT
    come = model("a", kv=0, waiting=(request(2, arrival=9.0),))
    served = request(1, arrival=8.0)._replace(first=10.0, last=now - 1.0)
    wanting = model("w", ABSENT, pages=10, waiting=(served,))
    assert not worlds.evicted(Balloon()(device(come, wanting, free=0, now=now), None).actions)
    runs = replace(come, waiting=(), running=(request(2, arrival=9.0, pages=8),), kv_pages=8)
    assert [*worlds.evicted(Balloon()(device(runs, wanting, free=0, now=now), None).actions)] == [
        "a"
    ]
    for arrival in (8.0, 10.0):
        left_out = [replace_place(m, r) for m, r in ((come, 9.0), (wanting, arrival))]
        view = device(*left_out, free=0, now=now + 1.0)
        assert [*worlds.evicted(Balloon()(view, None).actions)] == ["a"] * (arrival < 9.0)


def replace_place(m: ModelView, arrival: float) -> ModelView:
    """The model with one request without a token, left out by admission."""
    sequence = round(arrival)
    return replace(m, waiting=(request(sequence, arrival=arrival)._replace(place=BEHIND_ALL),))


def test_a_model_on_its_way_keeps_the_pages_of_its_first_request() -> None:
    m = model("a", ACTIVATING, waiting=(request(1),), first=3)
    assert Balloon()(device(m, free=5), None).promises == (Promise("a", 0, 3),)
    assert Balloon()(device(m, free=2), None).promises == ()


def test_a_model_that_has_come_keeps_them_until_that_request_is_admitted() -> None:
    """Its prompt may have to wait for the decodes of others, who would take the pages meanwhile."""
    waits = model("a", waiting=(request(1),), first=3)
    other = model("b", kv=4, running=(request(2, arrival=2.0),))
    assert Balloon()(device(waits, other, free=5), None).promises == (Promise("a", 0, 3),)
    runs = model("a", waiting=(request(1),), running=(request(0),), first=3)
    assert Balloon()(device(runs, other, free=5), None).promises == ()
    lacks = (Shortage("a", "r1", 3, False),)
    view = device(waits, other, free=5, shortages=lacks)
    assert Balloon()(view, None).promises == (Promise("a", 0, 3),), "it claims them once"


def test_promises_come_in_order_of_precedence() -> None:
    lacks = tuple(Shortage(name, f"r{i}", 4, False) for i, name in ((1, "a"), (2, "b")))
    b = model("b", kv=4, running=(request(2, arrival=2.0),))
    a = model("a", kv=4, running=(request(1, arrival=1.0),))
    decision = Balloon()(device(b, a, free=8, shortages=lacks), None)
    assert decision.promises == (Promise("a", 0, 4), Promise("b", 0, 4))
    overtaken = Balloon()(device(b, a, free=5, shortages=lacks), None)
    assert overtaken.promises == (Promise("a", 0, 4),)


def test_nothing_is_promised_where_nothing_is_short() -> None:
    for name in PRESETS:
        view = device(model("a", running=(request(1),)), model("b"), free=20)
        assert settled(resolve(name).memory, view).promises == ()


# -- pages lent to other devices ------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POOLED, FixedShares(), Recompute(), WholeModels()], ids=repr)
def test_lent_pages_are_recalled_while_something_runs(policy: MemoryPolicy) -> None:
    short = (Shortage("a", "r1", 4, limited=False),)
    running, waiting = (request(1), request(2, pages=3)), (request(9, arrival=10.0),)
    a = model("a", kv=5, running=running, waiting=waiting, limit=60)
    view = device(a, free=1, shortages=short, lent=(("cpu:1", 20),))
    decision = policy(view, policy(view, None).memo)
    (recall,) = of_kind(decision, Recall)
    assert (recall.to, recall.pages) == ("cpu:1", 3)
    assert of_kind(decision, Preempt) == []
    coming = device(a, free=1, shortages=short, lent=(("cpu:1", 17),), recalled=3)
    again = policy(coming, policy(coming, None).memo)
    assert of_kind(again, Recall) == of_kind(again, Preempt) == []


def test_what_borrowers_still_have_does_not_cover_an_activation_yet() -> None:
    m = model("a", ABSENT, waiting=(request(1),))
    decision = Balloon()(device(m, free=6, lent=(("cpu:1", 20),)), None)
    assert [kind(a) for a in decision.actions] == ["Recall"]
    assert decision.promises == (Promise("a", 10, 0),)


def test_static_recalls_what_an_evicted_model_needs_to_come_back() -> None:
    a = model("a", ABSENT, waiting=(request(1),))
    view = device(a, free=4, lent=(("cpu:1", 20),))
    (recall,) = of_kind(settled(FixedShares(), view), Recall)
    assert recall.pages == 6
