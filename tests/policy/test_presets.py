"""Each preset's decisions on views made by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from math import inf
from typing import get_args

import pytest

from ballast.core.actions import DropCache, Hold, Limit, Preempt, Refuse, Reside
from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.view import Residency, SharedView, Shortage
from ballast.fleet.schema import FleetKeys
from ballast.policy.admission.late_last import LateLast
from ballast.policy.compute.basic_orders import RoundRobin
from ballast.policy.compute.deadline import Deadline
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.static import Division, FixedShares, shares
from ballast.policy.memory.swap import ModelTurn, WholeModels
from ballast.policy.presets import (
    ORDERS,
    PLACEMENTS,
    PRESETS,
    option_names,
    preset_of,
    resolve,
    shared_options,
)
from ballast.policy.requirements import Requirements
from tests.policy.worlds import device, in_parts, kind, model, request

ABSENT = Residency.ABSENT


def kinds(actions: object) -> list[str]:
    return [kind(a) for a in actions]  # type: ignore[attr-defined]


# -- balloon ----------------------------------------------------------------------------------


def test_balloon_activates_into_free_pages() -> None:
    m = model("a", ABSENT, waiting=(request(1, arrival=10),), first=2)
    decision = Balloon()(device(m, free=12), None)
    assert next(a for a in decision.actions if kind(a) == "Activate").model == "a"
    assert kinds(decision.actions) == ["Activate"]


def test_balloon_counts_the_first_requests_kv() -> None:
    m = model("a", ABSENT, waiting=(request(1, arrival=10),), first=3)
    assert Balloon()(device(m, free=12), None).actions == ()


def test_balloon_drops_cache_before_it_evicts_and_evicts_longest_idle_first() -> None:
    wanting = model("w", ABSENT, pages=20, waiting=(request(9, arrival=10),), first=1)
    cached = model("c", kv=6, cached=6, running=(request(1),), last_used=9)
    older = model("o", last_used=1)
    newer = model("n", last_used=5)
    decision = Balloon()(device(cached, newer, older, wanting, free=5), None)
    assert kinds(decision.actions) == ["DropCache", "Evict", "Activate"]
    assert decision.actions[0].model == "c"
    assert decision.actions[1].model == "o"


def test_balloon_moves_blocks_together_before_it_evicts() -> None:
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    loose = model("l", kv=20, loose=12, running=(request(1),))
    decision = Balloon()(device(loose, model("idle"), wanting, free=0), None)
    assert kinds(decision.actions) == ["Compact", "Activate"]


def test_balloon_evicts_nobody_for_what_borrowed_pages_give() -> None:
    short = (Shortage("a", "r1", 4, False, 16),)
    a, idle = model("a", kv=5, running=(request(1),)), model("idle")
    assert kinds(Balloon()(device(a, idle, free=0, shortages=short), None).actions) == ["Evict"]
    for borrowed in (4, 9):
        view = device(a, idle, free=0, shortages=short, borrowed=borrowed)
        assert Balloon()(view, None).actions == ()
    view = device(a, idle, free=1, shortages=short, borrowed=2)
    assert kinds(Balloon()(view, None).actions) == ["Evict"]


def test_balloon_counts_borrowed_pages_once_and_not_for_weights() -> None:
    short = tuple(Shortage(name, f"r{i}", 4, False, 16) for i, name in enumerate("ab"))
    models = [model(name, kv=5, running=(request(i),)) for i, name in enumerate("ab")]
    view = device(*models, model("idle"), free=0, shortages=short, borrowed=4)
    assert kinds(Balloon()(view, None).actions) == ["Evict"]
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),), first=3)
    cached = model("c", kv=6, cached_borrowed=6, running=(request(1),))
    view = device(wanting, cached, free=9, borrowed=20)
    assert Balloon()(view, None).actions == ()
    view = device(wanting, cached, free=10, borrowed=20)
    assert kinds(Balloon()(view, None).actions) == ["Activate"]


def test_balloon_drops_what_is_cached_on_borrowed_pages_for_kv() -> None:
    short = (Shortage("a", "r1", 4, False, 16),)
    a = model("a", kv=5, running=(request(1),))
    cached = model("c", kv=6, cached=1, cached_borrowed=3)
    decision = Balloon()(device(a, cached, free=0, shortages=short), None)
    assert decision.actions == (DropCache("c", 4, "a needs pages"),)


def test_balloon_leaves_idle_models_alone_when_nothing_is_short() -> None:
    decision = Balloon()(device(model("a"), model("b"), free=0), None)
    assert decision.actions == ()


def test_balloon_spares_pinned_models() -> None:
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    decision = Balloon()(device(model("p", pinned=True), wanting, free=0), None)
    assert decision.actions == ()


def test_balloon_waits_for_reclaiming_pages_instead_of_evicting_twice() -> None:
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    decision = Balloon()(device(model("idle"), wanting, free=0, reclaiming=10), None)
    assert decision.actions == ()


def test_balloon_preempts_younger_work_only_for_the_overdue() -> None:
    busy = model("b", kv=20, running=(request(5, arrival=9.9, pages=20),))
    waiting = request(4, arrival=9.8)
    wanting = model("w", ABSENT, pages=10, waiting=(waiting,), first=1)
    patient = Balloon(patience=0.5)(device(busy, wanting, free=0, now=10.0), None)
    assert patient.actions == ()
    assert patient.wake_at == pytest.approx(9.8 + 0.5)
    overdue = Balloon(patience=0.5)(device(busy, wanting, free=0, now=10.4), None)
    assert kinds(overdue.actions) == ["Preempt", "Activate"]


def test_balloon_never_preempts_older_work() -> None:
    busy = model("b", kv=20, running=(request(3, arrival=1.0, pages=20),))
    wanting = model("w", ABSENT, waiting=(request(4, arrival=2.0),))
    assert Balloon()(device(busy, wanting, free=0), None).actions == ()


def test_balloon_running_request_short_of_pages_preempts_the_youngest_at_once() -> None:
    old, young, youngest = (request(i, arrival=float(i), pages=4) for i in (1, 2, 3))
    m = model("a", kv=12, running=(old, young, youngest))
    lack = Shortage("a", old.id, 2, limited=False)
    decision = Balloon()(device(m, free=0, shortages=(lack,)), None)
    assert [(type(a), getattr(a, "request_id", None)) for a in decision.actions] == [
        (Preempt, youngest.id)
    ]


def test_balloon_preempts_for_blocks_on_pages_that_stay() -> None:
    old, young, youngest = (request(i, arrival=float(i), blocks=2) for i in (1, 2, 3))
    m = model("a", kv=2, running=(old, young, youngest))
    other = model("b", kv=1, running=(request(4, arrival=4.0, blocks=3),))
    for missing, asked in ((2, ["r3"]), (3, ["r3", "r2"])):
        lack = Shortage("a", old.id, 1, limited=False, blocks=missing)
        actions = Balloon()(device(m, other, free=0, shortages=(lack,)), None).actions
        assert [a.request_id for a in actions if isinstance(a, Preempt)] == asked
    lack = Shortage("a", old.id, 2, limited=False, blocks=5)
    assert Balloon()(device(m, free=0, shortages=(lack,)), None).actions == ()


def test_one_idle_model_is_not_given_to_two_claims() -> None:
    a = model("a", ABSENT, waiting=(request(1, arrival=10),))
    b = model("b", ABSENT, waiting=(request(2, arrival=10),))
    decision = Balloon()(device(model("idle"), a, b, free=0), None)
    assert kinds(decision.actions) == ["Evict", "Activate"]
    assert decision.actions[1].model == "a"


def test_an_idle_models_weights_go_even_where_its_cache_went_first() -> None:
    wanting = model("w", ABSENT, pages=40, waiting=(request(9, arrival=10),))
    idle = model("i", pages=30, kv=10, cached=10)
    decision = Balloon()(device(idle, wanting, free=0), None)
    assert kinds(decision.actions) == ["DropCache", "Evict", "Activate"]
    too_big = model("w", ABSENT, pages=41, waiting=(request(9, arrival=10),))
    assert Balloon()(device(idle, too_big, free=0), None).actions == ()


# -- balloon, where models share segments -------------------------------------------------------


def twins(*holders: str, pages: int = 10) -> tuple[SharedView, ...]:
    """All of a model's weights, that others contain as well."""
    return (SharedView("shared:1f", pages, holders),)


def test_what_activation_takes_and_eviction_frees_depends_on_who_else_is_there() -> None:
    there = SharedView("shared:1f", 4, ("a", "b"))
    alone = SharedView("shared:2e", 3, ("a",))
    nowhere = SharedView("shared:3d", 2, ())
    a = model("a", pages=10, kv=5, shared=(there, alone))
    assert (a.own_pages, a.evictable_pages, a.fair_pages) == (3, 11, 8.0)
    c = model("c", ABSENT, pages=10, shared=(there, nowhere))
    assert (c.own_pages, c.missing_pages) == (4, 6)


def test_balloon_activates_a_second_name_without_room_for_its_weights() -> None:
    there = model("a", running=(request(1),), shared=twins("a"))
    other = model("b", ABSENT, waiting=(request(2, arrival=10),), first=2, shared=twins("a"))
    decision = Balloon()(device(there, other, model("idle"), free=2), None)
    assert kinds(decision.actions) == ["Activate"]


def test_balloon_evicts_no_twin_in_vain() -> None:
    busy = model("a", running=(request(1),), shared=twins("a", "b"))
    idle = model("b", shared=twins("a", "b"), last_used=1)
    other = model("c", last_used=5)
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    decision = Balloon()(device(busy, idle, other, wanting, free=0), None)
    assert [(kind(a), a.model) for a in decision.actions] == [("Evict", "c"), ("Activate", "w")]


def test_balloon_evicts_both_twins_where_that_frees_their_weights() -> None:
    a = model("a", shared=twins("a", "b"), last_used=1)
    b = model("b", shared=twins("a", "b"), last_used=2)
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    decision = Balloon()(device(a, b, wanting, free=0), None)
    assert [(kind(x), x.model) for x in decision.actions] == [
        ("Evict", "a"),
        ("Evict", "b"),
        ("Activate", "w"),
    ]


def test_balloon_does_not_count_on_pages_that_the_claims_own_model_needs() -> None:
    """Evicting the last holder of a segment that is to come again frees the rest only."""
    base = model("a", pages=12, shared=twins("a"))
    wanting = model("w", ABSENT, pages=15, waiting=(request(9, arrival=10),), shared=twins("a"))
    tight = Balloon()(device(base, wanting, free=2), None)
    assert tight.actions == ()
    enough = Balloon()(device(base, wanting, free=3), None)
    assert kinds(enough.actions) == ["Evict", "Activate"]
    twin = model("w", ABSENT, waiting=(request(9, arrival=10),), first=1, shared=twins("a"))
    held = model("a", kv=0, shared=twins("a"))
    assert Balloon()(device(held, twin, free=0), None).actions == ()


def test_balloon_counts_a_segment_for_later_claims_once_a_first_has_brought_it() -> None:
    first = model("a", ABSENT, waiting=(request(1, arrival=9),), shared=twins())
    second = model("b", ABSENT, waiting=(request(2, arrival=9.5),), shared=twins())
    decision = Balloon()(device(first, second, free=10), None)
    assert [(kind(x), x.model) for x in decision.actions] == [("Activate", "a"), ("Activate", "b")]


def test_balloon_keeps_a_segment_that_an_older_claim_has_come_to_use() -> None:
    idle = model("a", shared=twins("a"))
    twin = model("b", ABSENT, waiting=(request(1, arrival=9),), shared=twins("a"))
    other = model("c", ABSENT, waiting=(request(2, arrival=9.5),))
    decision = Balloon()(device(idle, twin, other, free=0), None)
    assert [(kind(x), x.model) for x in decision.actions] == [("Activate", "b")]


# -- static -----------------------------------------------------------------------------------


def test_static_gives_a_shared_segment_room_once() -> None:
    a, b = (model(n, ABSENT, pages=60, shared=twins(pages=50)) for n in "ab")
    assert shares(device(a, b, free=96, total=100, arena=4)) == {"a": 13, "b": 13}


def test_static_divides_what_the_weights_leave() -> None:
    a, b = model("a", ABSENT, share=3), model("b", ABSENT, share=1)
    view = device(a, b, free=96, total=100, arena=4)
    assert shares(view) == {"a": 57, "b": 19}
    decision = FixedShares()(view, None)
    assert [a for a in decision.actions if isinstance(a, Limit)] == [
        Limit("a", 57, why="fixed share"),
        Limit("b", 19, why="fixed share"),
    ]
    assert FixedShares()(view, decision.memo).actions == ()


def test_static_refuses_requests_of_models_without_a_place() -> None:
    a = model("a", ABSENT, pages=60, share=2)
    b = model("b", ABSENT, pages=60, waiting=(request(1),))
    decision = FixedShares()(device(a, b, free=96), None)
    refused = [a for a in decision.actions if isinstance(a, Refuse)]
    assert [r.model for r in refused] == ["b"]
    assert "no place" in refused[0].why


def test_static_preempts_within_the_share_only() -> None:
    old, young = request(1, arrival=1, pages=4), request(2, arrival=2, pages=4)
    tight = model("a", kv=8, limit=8, running=(old, young))
    other = model("b", kv=8, limit=8, running=(request(3, arrival=3, pages=8),))
    lack = Shortage("a", old.id, 1, limited=True)
    view = device(tight, other, free=50, shortages=(lack,))
    memo = Division((("a", 1.0), ("b", 1.0)), {"a": 8, "b": 8})
    decision = FixedShares()(view, memo)
    assert decision.actions == (Preempt("a", young.id, why="a comes first"),)


def test_static_divides_anew_when_a_model_has_come_or_gone() -> None:
    a = model("a", kv=60, cached=20, limit=86)
    before = FixedShares()(device(a, free=30), None)
    new = model("b", ABSENT)
    with_it = FixedShares()(device(a, new, free=30), before.memo)
    assert kinds(with_it.actions) == ["Limit", "DropCache", "Limit", "Activate"]
    assert with_it.actions[1] == DropCache("a", 22, why="its fixed share is smaller now")
    back = FixedShares()(device(a, free=30), with_it.memo)
    assert kinds(back.actions) == ["Limit"]
    assert back.actions[0] == before.actions[0]


def test_static_brings_an_evicted_model_back_to_its_place() -> None:
    a = model("a")
    memo = FixedShares()(device(a, free=90), None).memo
    assert FixedShares()(device(model("a", ABSENT), free=90), memo).actions == ()
    wanted = model("a", ABSENT, waiting=(request(1),))
    assert kinds(FixedShares()(device(wanted, free=90), memo).actions) == ["Activate"]
    assert FixedShares()(device(wanted, free=3), memo).actions == ()


def test_static_takes_the_device_from_a_model_that_has_lost_its_place() -> None:
    small, large = model("a", share=1), model("b", ABSENT, pages=95, share=2)
    memo = FixedShares()(device(small, free=90, total=100, arena=0), None).memo
    decision = FixedShares()(device(small, large, free=90, total=100, arena=0), memo)
    assert kinds(decision.actions) == ["Limit", "Activate", "Evict"]


# -- swap -------------------------------------------------------------------------------------


def test_swap_starts_with_the_oldest_request() -> None:
    a = model("a", ABSENT, waiting=(request(2, arrival=2),))
    b = model("b", ABSENT, waiting=(request(1, arrival=1),))
    decision = WholeModels()(device(a, b, free=90), None)
    assert decision.actions == (Reside("b", b.plan.whole(), "its turn"),)
    assert decision.memo == ModelTurn("b", inf)


def test_swap_counts_a_turn_from_when_its_weights_are_there() -> None:
    """A copy that takes longer than the quantum does not use the turn up."""
    a, b = model("a", waiting=(request(1),)), model("b", ABSENT, waiting=(request(2),))
    policy = WholeModels(quantum=1.0)
    began = policy(device(a, b, free=0, now=10.0), ModelTurn("a", inf))
    assert began.memo == ModelTurn("a", 10.0)
    assert (began.actions, began.wake_at) == ((), 11.0)
    coming = model("a", Residency.ACTIVATING, waiting=(request(1),))
    waits = policy(device(coming, b, free=0, now=10.0), ModelTurn("a", inf))
    assert (waits.actions, waits.memo, waits.wake_at) == ((), ModelTurn("a", inf), None)


def test_swap_forgets_the_turn_of_a_model_that_was_removed() -> None:
    b = model("b", ABSENT, waiting=(request(1),))
    decision = WholeModels()(device(b, free=90), ModelTurn("a", 9.9))
    assert decision.actions == (Reside("b", b.plan.whole(), "its turn"),)


def test_swap_replaces_an_idle_model_at_once() -> None:
    a, b = model("a"), model("b", ABSENT, waiting=(request(1),))
    decision = WholeModels()(device(a, b, free=0), ModelTurn("a", 9.9))
    assert kinds(decision.actions) == ["Hold", "Evict", "Activate"]


def test_swap_brings_a_twin_before_the_other_goes() -> None:
    a = model("a", shared=twins("a"))
    b = model("b", ABSENT, waiting=(request(1),), shared=twins("a"))
    decision = WholeModels()(device(a, b, free=0), ModelTurn("a", 9.9))
    assert kinds(decision.actions) == ["Hold", "Activate", "Evict"]
    larger = model("b", ABSENT, pages=12, waiting=(request(1),), shared=twins("a"))
    decision = WholeModels()(device(a, larger, free=1), ModelTurn("a", 9.9))
    assert kinds(decision.actions) == ["Hold", "Evict", "Activate"]


def test_a_turn_of_no_time_still_admits_what_waits_when_it_begins() -> None:
    """Else models would be swapped for ever, and none would run."""
    a = model("a", waiting=(request(1),), first=2)
    b = model("b", ABSENT, pages=20, waiting=(request(0),), first=2)
    begins = WholeModels(quantum=0.0)(device(a, b, free=0, now=10.0), ModelTurn("a", 10.0))
    assert begins.actions == ()
    ran = WholeModels(quantum=0.0)(device(a, b, free=0, now=10.1), ModelTurn("a", 10.0))
    assert kinds(ran.actions) == ["Hold", "Evict", "Activate"]


def test_swap_lets_a_turn_run_its_quantum_then_ends_what_runs() -> None:
    a = model("a", running=(request(1),), waiting=(request(2),))
    b = model("b", ABSENT, waiting=(request(3, arrival=5.0),))
    early = WholeModels(quantum=1.0)(device(a, b, free=0, now=10.0), ModelTurn("a", 9.5))
    assert early.actions == ()
    assert early.wake_at == pytest.approx(10.5)
    late = WholeModels(quantum=1.0)(device(a, b, free=0, now=10.6), ModelTurn("a", 9.5))
    assert [(type(x), getattr(x, "held", None)) for x in late.actions] == [(Hold, True)]
    drained = model("a", waiting=(request(2),), held=True)
    go = WholeModels(quantum=1.0)(device(drained, b, free=0, now=10.7), ModelTurn("a", 9.5))
    assert kinds(go.actions) == ["Hold", "Evict", "Activate"]


def test_swap_ends_a_turn_between_tokens_for_a_model_that_owes_a_first_token() -> None:
    """Though a request that came just now is the first of its queue. KV stays."""
    a = in_parts(model("a", pages=40, kv=1, running=(request(1),)), 10, 10, 10, 10)
    waiting = request(4, arrival=9.9), request(3, arrival=0.5)
    b, c = model("b", ABSENT, waiting=waiting), model("c", ABSENT, waiting=(request(2),))
    policy, turn = WholeModels(quantum=1.0), ModelTurn("a", 9.0)
    begun = replace(c, waiting=(request(2, generated=1)._replace(last=9.0),))
    early = policy(device(a, b, begun, free=0, now=10.4), turn)
    assert [(type(x), getattr(x, "held", None)) for x in early.actions] == [(Hold, True)]
    assert early.wake_at == pytest.approx(10.5)
    late = policy(device(a, b, begun, free=0, now=10.6), turn)
    assert [(kind(x), x.model) for x in late.actions if isinstance(x, Reside)] == [
        ("Evict", "a"),
        ("Activate", "b"),  # though requests of c are older
    ]
    (evict,) = (x for x in late.actions if kind(x) == "Evict")
    assert isinstance(evict, Reside)
    assert evict.plan.device_pages > 0, "a part stays, and its KV with it"


def test_swap_tries_again_when_the_activation_was_refused() -> None:
    b = model("b", ABSENT, waiting=(request(1),))
    decision = WholeModels()(device(b, free=90), ModelTurn("b", 9.0))
    assert kinds(decision.actions) == ["Activate"]


# -- common -----------------------------------------------------------------------------------


def test_policies_are_pure() -> None:
    busy = model("b", kv=20, cached=3, running=(request(5, arrival=9.9, pages=17),))
    wanting = model("w", ABSENT, waiting=(request(4, arrival=1.0),), first=1)
    view = device(busy, model("i"), wanting, free=2)
    for name in PRESETS:
        policy = resolve(name).memory
        assert policy(view, None) == policy(view, None)


def test_unknown_presets_and_options_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'balloon'"):
        resolve("baloon")
    with pytest.raises(ConfigError, match="patience"):
        resolve("balloon", {"patient": 1})


NAMES = [f"{preset}{order}" for preset in PRESETS for order in ("", *(f"+{o}" for o in ORDERS))]
"""All combinations."""


def test_an_option_has_one_default_in_all_presets() -> None:
    """What presets are compared with unless a setting says otherwise is alike, in all policies of a
    preset that have it."""
    defaults: dict[str, set[float]] = {}
    for name in NAMES:
        chosen = resolve(name)
        for option in option_names(name):
            parts = [chosen.memory, chosen.compute, chosen.admission]
            owners: list[object] = [p for p in parts if hasattr(p, option)]
            if option in chosen.fleet.options:
                owners.append(chosen.fleet)
            assert owners, f"{name}: {option} is no policy's own"
            defaults.setdefault(option, set()).update(getattr(owner, option) for owner in owners)
    assert {name: of for name, of in defaults.items() if len(of) > 1} == {}
    assert {"pooled", "temporal", "quantum", "preemptive"} <= set(option_names("recompute"))


def test_a_preset_may_have_another_order_of_compute() -> None:
    for name in NAMES:
        memory, _, order = name.partition("+")
        own, chosen = resolve(memory), resolve(name)
        assert chosen.name == name
        assert chosen.memory == own.memory
        assert chosen.order == (order or own.order)
        assert type(chosen.compute) is ORDERS[chosen.order]
    assert resolve("balloon").order == "deadline"
    assert resolve("swap").order == "round-robin"
    assert resolve("balloon+deadline").compute == resolve("balloon").compute


def test_an_order_of_its_own_is_what_counts_unless_the_name_states_one() -> None:
    """A story says which order it was, also where a preset had another at the time."""
    assert resolve("balloon", order="round-robin").compute == RoundRobin()
    assert resolve("swap", order="deadline").compute == Deadline()
    assert resolve("swap+deadline", order="round-robin").order == "deadline"


def test_unknown_orders_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"deadline.*did you mean 'deadline'") as raised:
        resolve("swap+deadlines")
    for order in ORDERS:
        assert order in str(raised.value)
    with pytest.raises(ConfigError, match="swap may be followed by"):
        resolve("swap+nothing-like-it")
    with pytest.raises(ConfigError, match="did you mean 'swap'"):
        resolve("swop+deadline")
    with pytest.raises(ConfigError, match="swap may be followed by"):
        resolve("swap+")
    with pytest.raises(ConfigError, match="deadline"):
        resolve("swap", order="nothing-like-it")


def test_options_of_the_order_belong_to_it_alone() -> None:
    chosen = resolve("swap+deadline", {"late_share": 0.1, "margin": 1.0, "quantum": 2.0})
    assert chosen.compute == Deadline(late_share=0.1, margin=1.0)
    assert chosen.memory == WholeModels(quantum=2.0)
    assert resolve("balloon", {"late_share": 0.1}).compute == Deadline(late_share=0.1)
    assert resolve("swap", {"late_share": 0.1}, "deadline").compute == Deadline(late_share=0.1)
    for name in ("swap", "swap+round-robin", "balloon+round-robin"):
        with pytest.raises(ConfigError, match="has options"):
            resolve(name, {"late_share": 0.1})
    with pytest.raises(ConfigError, match=r"quantum.*late_share"):
        resolve("swap+deadline", {"late": 0.1})
    assert {"late_share", "longest_wait", "margin"} <= set(option_names("balloon"))
    assert set(option_names("swap+deadline")) - set(option_names("swap")) == {
        field.name for field in dataclasses.fields(Deadline)
    }
    assert option_names("balloon+round-robin") == tuple(
        field.name for kind in (Balloon, RoundRobin, LateLast) for field in dataclasses.fields(kind)
    )


def test_options_are_shared_with_the_presets_that_have_them() -> None:
    terms = {"pooled": 0.0, "quantum": 2.0, "lru": 1.0, "late_share": 0.1}
    assert shared_options("recompute", terms) == {"pooled": 0.0, "quantum": 2.0}
    assert shared_options("swap", terms) == {"quantum": 2.0}
    assert shared_options("swap+deadline", terms) == {"quantum": 2.0, "late_share": 0.1}
    assert shared_options("static", terms) == {}
    assert shared_options("static+deadline", terms) == {"late_share": 0.1}


def test_actions_carry_reasons() -> None:
    wanting = model("w", ABSENT, waiting=(request(9, arrival=10),))
    decision = Balloon()(device(model("idle"), wanting, free=0), None)
    assert all(a.why for a in decision.actions)
    assert any(kind(a) == "Evict" and "idle for 10.0 s" in a.why for a in decision.actions)
    assert not any(isinstance(a, DropCache) for a in decision.actions)


# -- what presets require -------------------------------------------------------------------------


def test_what_a_device_cannot_do_is_refused_with_the_reason() -> None:
    for name, why in (("mirage", "must rotate"), ("kvswap", "must be staged")):
        ranks = DeviceSettings(name="cpu:1", budget_bytes=2**20, tensor_parallel=2)
        one = DeviceSettings(budget_bytes=2**20)
        fleet = FleetSettings(models=(), device=one, preset=name)
        assert preset_of(fleet).name == name
        with pytest.raises(ConfigError, match=f"cpu:1: .*{why}"):
            preset_of(replace(fleet, others=(ranks,)))
    for name in ("static", "swap", "balloon", "recompute"):
        assert resolve(name).requires == Requirements()


# -- the fleet part -------------------------------------------------------------------------------


def test_a_preset_names_its_fleet_policy_and_a_fleet_may_name_another() -> None:
    for name in PRESETS:
        chosen = resolve(name)
        assert chosen.fleet is PLACEMENTS[chosen.placement]
        own = {"prism": "kvpr", "c2cserve": "link", "swiftcache": "swiftcache", "ballast": "price"}
        assert chosen.placement == own.get(name, "work"), "by weights where no work is expected"
        fleet = FleetSettings(models=(), device=DeviceSettings(budget_bytes=2**20), preset=name)
        assert preset_of(fleet).fleet == chosen.fleet
        for other, policy in PLACEMENTS.items():
            assert preset_of(replace(fleet, placement=other)).fleet is policy
            assert resolve(name, placement=other).memory == chosen.memory
    with pytest.raises(ConfigError, match="weights, work, follow, both, kvpr, link"):
        resolve("balloon", placement="wieghts")


def test_a_fleet_file_may_name_every_fleet_policy() -> None:
    (names, none) = get_args(FleetKeys.model_fields["placement"].annotation)
    assert get_args(names) == tuple(PLACEMENTS)
    assert none is type(None)


def test_models_cannot_follow_the_load_to_devices_of_several_ranks() -> None:
    ranks = DeviceSettings(name="cpu:1", budget_bytes=2**20, tensor_parallel=2)
    one = DeviceSettings(budget_bytes=2**20)
    for placement, policy in PLACEMENTS.items():
        fleet = FleetSettings(models=(), device=one, others=(ranks,), placement=placement)
        assert policy.requires == Requirements(following=policy.moves)
        if policy.moves:
            with pytest.raises(ConfigError, match=r"^placement: .*cpu:1: .*over ranks"):
                preset_of(fleet)
        else:
            assert preset_of(fleet).placement == placement
    fleet = FleetSettings(models=(), device=one, others=(ranks,), preset="ballast")
    assert preset_of(fleet).placement == "work", "the preset's own one gives way"


def test_only_who_expects_work_gives_a_busy_model_several_devices() -> None:
    rooms = [DeviceCapacity("x", 100), DeviceCapacity("y", 100)]
    busy, quiet = ModelDemand("busy", 10, 10, {"": 1.2}), ModelDemand("quiet", 10, 10)
    for placement, policy in PLACEMENTS.items():
        by_work = placement in ("work", "both", "swiftcache", "price")
        everywhere = placement == "link"
        assert len(policy.place([busy, quiet], rooms)["busy"]) == (
            2 if by_work or everywhere else 1
        )
        assert policy.replicates == (by_work or policy.moves or everywhere)
        if placement != "random":
            assert policy.place([quiet], rooms) == {"quiet": ["x", "y"] if everywhere else ["x"]}
        assert policy.moves == (placement in ("follow", "both", "kvpr", "price"))
    decision = PLACEMENTS["weights"](FleetView(0.0, (), ()), "memo")
    assert decision == FleetDecision(memo="memo"), "it wishes never to be asked"


def test_placement_at_random_depends_on_a_models_name_and_the_seed_alone() -> None:
    rooms = [DeviceCapacity("x", 100), DeviceCapacity("y", 100), DeviceCapacity("small", 5)]
    needs = [ModelDemand(f"m{i}", 10, 10) for i in range(64)]
    first = resolve("c2cserve", placement="random").fleet.place(needs, rooms)
    other = resolve("c2cserve", {"seed": 1}, placement="random").fleet.place(needs, rooms)
    assert {device for (device,) in first.values()} == {"x", "y"}
    assert first != other
    assert resolve("swap", placement="random").fleet.place(needs[7:8], rooms) == {"m7": first["m7"]}
    with pytest.raises(ConfigError, match="the largest device has"):
        resolve("swap", placement="random").fleet.place([ModelDemand("large", 200, 10)], rooms)
