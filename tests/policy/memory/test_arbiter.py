"""The preset `ballast`: what harms least is taken, if it gains more, and nobody starves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ballast.core.actions import Action, Preempt, Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, RequestView, Residency, Shortage
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.policy.memory.absences import STAY, Absences
from ballast.policy.memory.arbiter import STARVES_AFTER, Arbiter, _gains_of_coming
from ballast.policy.plans import activation
from tests.policy.worlds import device, evicted, in_parts, kind, model, request

ABSENT = Residency.ABSENT


def parted(m: ModelView) -> ModelView:
    """The model with weights of ten segments, all on the device."""
    return in_parts(m, *(m.own_pages // 10,) * 10)


def decoding(sequence: int, ahead: float, *, arrival: float = 0.0) -> RequestView:
    """A running request that is so many seconds ahead of its pace at the time 100."""
    r = request(sequence, arrival=arrival, pages=2, tokens=40, generated=20, max_tokens=60)
    return r._replace(first=100.0 - 20 * r.pace + ahead, due=200.0)


def at_100(*models: ModelView, free: int = 0, **more: object) -> DeviceView:
    return replace(device(*models, free=free), now=100.0, **more)  # type: ignore[arg-type]


def acts(view: DeviceView, policy: Arbiter | None = None) -> list[Action]:
    return list((policy or Arbiter())(view, None).actions)


def urgent(sequence: int) -> RequestView:
    """A waiting request whose first token is due soon at the time 100."""
    return request(sequence, arrival=99.6)


FIRST = model("first", running=(request(0, pages=2),), pages=20)
"""A model whose request came before all others, which is never undone."""


def test_an_absent_model_comes_onto_free_pages() -> None:
    view = at_100(model("a", ABSENT, waiting=(urgent(1),), first=2), free=12)
    assert acts(view) == [activation(view, view.model("a"), "requests wait for it")]


def test_cached_prefixes_that_nobody_used_again_go_before_weights() -> None:
    wanting = model("w", ABSENT, pages=10, waiting=(urgent(9),), first=1)
    cached = model("c", kv=20, cached=20, running=(request(1, pages=1),))
    idle = parted(model("i", pages=20, last_used=99.0))
    busy = replace(idle.traffic.arrived(99.0), reuse=idle.traffic.reuse.and_one(10, 0))
    found = acts(at_100(wanting, replace(cached, traffic=busy), replace(idle, traffic=busy)))
    assert [kind(a) for a in found] == ["DropCache", "Activate"]


def test_a_model_that_is_ahead_is_parked_for_an_urgent_one() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    ahead = parted(model("ahead", pages=40, kv=2, running=(decoding(1, 20.0),)))
    found = acts(at_100(FIRST, ahead, wanting))
    assert evicted(found) == {"ahead": 12}


def test_a_model_is_not_parked_for_one_that_is_no_more_urgent() -> None:
    patient = request(9, arrival=99.99)
    wanting = model("w", ABSENT, pages=8, waiting=(patient,), first=1)
    behind = model("behind", pages=40, kv=2, waiting=(urgent(3),), running=(decoding(1, 0.2),))
    behind = parted(behind)
    assert not [a for a in acts(at_100(FIRST, behind, wanting)) if kind(a) == "Evict"]


def test_the_first_of_all_is_never_parked_nor_preempted() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9),), first=1)
    oldest = parted(model("o", pages=40, kv=2, running=(decoding(1, 50.0),)))
    assert acts(at_100(oldest, wanting)) == []


def test_a_model_that_got_nothing_for_long_is_served() -> None:
    """Ten seconds where a request has had no token, though others came since and can be in time;
    longer where all have begun."""
    others = parted(model("o", pages=40, kv=2, running=(decoding(6, 0.2, arrival=99.0),)))
    new, begun = request(5), request(5, generated=1)
    fresh = request(9, arrival=99.9)._replace(due=1e3)  # it can wait
    for waited, asked, served in (
        (LONGEST_WAIT + 1, (new,), True),
        (LONGEST_WAIT - 1, (new,), False),
        (LONGEST_WAIT + 1, (fresh, new), True),
        (LONGEST_WAIT - 1, (fresh, new), False),
        (STARVES_AFTER + 1, (begun,), True),
        (STARVES_AFTER - 1, (begun,), False),
        (STARVES_AFTER + 1, (fresh, begun), True),
    ):
        since = 100.0 - waited
        late = asked[-1]._replace(last=since, order=asked[-1].order._replace(arrival=since))
        wanting = model("w", ABSENT, pages=8, waiting=(*asked[:-1], late), first=1)
        found = acts(at_100(FIRST, others, wanting))
        gone = [a.model for a in found if isinstance(a, Reside) and kind(a) == "Evict"]
        assert gone == ["o"] * served, (waited, asked)


def test_a_model_with_requests_is_owed_what_no_request_uses() -> None:
    """After ten seconds without a token, at any price; but not what others use."""
    late = request(5, arrival=100.0 - LONGEST_WAIT - 1, generated=1)
    wanting = model("w", ABSENT, pages=8, waiting=(late,), first=1)
    popular = parted(model("i", pages=20, last_used=99.9))
    for at in range(9):
        popular = replace(popular, traffic=popular.traffic.arrived(91.0 + at))
    used = parted(model("o", pages=20, kv=2, running=(decoding(6, 0.2, arrival=99.0),)))
    assert evicted(acts(at_100(FIRST, popular, used, wanting))) == {"i": 10}
    assert evicted(acts(at_100(FIRST, used, wanting))) == {}
    soon = replace(wanting, waiting=(request(5, arrival=101.0 - LONGEST_WAIT),))
    assert evicted(acts(at_100(FIRST, popular, used, soon))) == {}


def test_a_running_request_that_cannot_go_on_preempts_a_later_one() -> None:
    older, later = decoding(1, 1.0), decoding(2, 1.0, arrival=50.0)
    m = model("m", kv=8, running=(older, later))
    view = at_100(m, shortages=(Shortage("m", older.id, 2, limited=False),))
    assert [a.request_id for a in acts(view) if isinstance(a, Preempt)] == [later.id]


def test_a_source_can_be_switched_off() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    ahead = parted(model("ahead", pages=40, kv=2, running=(decoding(1, 20.0),)))
    view = at_100(FIRST, ahead, wanting)
    assert acts(view, Arbiter(parking=0)) == []


def test_decisions_say_what_they_cost_and_what_was_not_taken() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    models = [
        parted(model(name, pages=40, kv=2, running=(decoding(i, 20.0 - i),)))
        for i, name in enumerate(("a", "b", "c"), 1)
    ]
    found = acts(at_100(FIRST, *models, wanting))
    (parked,) = (a for a in found if isinstance(a, Reside) and kind(a) == "Evict")
    reason, late, untaken = parked.why.split("; ")
    assert reason == "its requests can wait until w had its turn"
    assert re.fullmatch(r"expected late requests: [\w .]+ by it, [\d.]+ without it", late)
    names = {"a", "b", "c"} - {parked.model}
    number = r"(under )?[\d.]+"
    named = f"weights of \\w {number}, weights of \\w {number}"
    assert re.fullmatch(f"next best for as many pages: {named}", untaken)
    assert all(f"weights of {name} " in untaken for name in names)


def hopeless(sequence: int, arrival: float) -> RequestView:
    """A running request whose first token was late."""
    return decoding(sequence, 5.0, arrival=arrival)._replace(first=50.0, due=40.0)


def preempted(view: DeviceView) -> list[str]:
    return preempted_by(Arbiter(), view)


def preempted_by(policy: Arbiter, view: DeviceView) -> list[str]:
    return [a.request_id for a in acts(view, policy) if isinstance(a, Preempt)]


def test_the_hopeless_undo_no_work_of_others() -> None:
    late, later = hopeless(1, 10.0), decoding(2, 1.0, arrival=50.0)
    for lacking, undone in ((late, []), (later, [late.id])):
        m = model("m", kv=8, running=(late, later))
        view = at_100(FIRST, m, shortages=(Shortage("m", lacking.id, 2, limited=False),))
        assert preempted(view) == undone


def waits_beside(*running: RequestView, first: RequestView | None = None) -> DeviceView:
    first = first or urgent(9)
    m = model("m", kv=8, waiting=(first,), first=2, running=running)
    return at_100(FIRST, m, shortages=(Shortage("m", first.id, 2, limited=False),))


def test_a_request_that_waits_takes_pages_of_hopeless_ones() -> None:
    assert preempted(waits_beside(hopeless(10, 99.8))) == ["r10"]
    assert preempted(waits_beside(about_to_end(10, arrival=99.8))) == []


def about_to_end(sequence: int, arrival: float) -> RequestView:
    """A running request at its pace that can make up for no pause any more."""
    return decoding(sequence, 0.0, arrival=arrival)._replace(max_tokens=21)


def test_who_is_ahead_of_its_pace_rests_for_a_first_token() -> None:
    """Though it came before: its next token will be in time all the same."""
    at_pace, ahead = decoding(3, 0.0, arrival=55.0), decoding(2, 15.0, arrival=50.0)
    view = waits_beside(*(r._replace(max_tokens=1000) for r in (at_pace, ahead)))
    assert preempted(view) == ["r2"]
    assert preempted_by(Arbiter(resting=0), view) == []
    assert preempted(waits_beside(decoding(3, 0.5, arrival=55.0))) == [], "it waits for longer"


def test_no_more_important_request_rests_nor_any_for_one_that_has_had_its_first_token() -> None:
    ahead = decoding(2, 15.0, arrival=50.0)
    important = ahead._replace(order=ahead.order._replace(rank=-1))
    alone = waits_beside(important)
    alone = replace(alone, models=alone.models[1:])
    assert preempted(alone) == []
    returning = decoding(9, 0.1, arrival=60.0)._replace(pages=0)
    assert preempted(waits_beside(ahead, first=returning)) == []
    assert preempted(waits_beside(decoding(0, 15.0))) == [], "the first of all"


def test_weights_leave_room_for_kv_of_requests_that_wait() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9),), first=1)
    queue = model("q", waiting=tuple(urgent(i) for i in range(10, 20)), first=2)
    for free, comes in ((12, False), (60, True)):
        found = acts(at_100(FIRST, wanting, queue, free=free))
        assert ("Activate" in map(kind, found)) is comes


def test_a_model_is_parked_for_kv_only_if_all_that_wait_lose_more_together() -> None:
    busy = parted(model("busy", pages=40, kv=2, running=(decoding(1, 0.0),)))
    for n, parked in ((1, False), (12, True)):
        waiting = tuple(urgent(10 + i) for i in range(n))
        m = model("m", kv=8, waiting=waiting, first=2)
        short = Shortage("m", waiting[0].id, 2, limited=False)
        assert bool(evicted(acts(at_100(FIRST, busy, m, shortages=(short,))))) is parked


def test_absences_of_models_with_requests_are_learned() -> None:
    waits = model("w", ABSENT, pages=8, waiting=(request(9, arrival=99.9),), first=1)
    others = parted(model("o", pages=40, kv=2, running=tuple(decoding(i, 0.1) for i in range(9))))
    policy = Arbiter()
    first = policy(at_100(FIRST, others, waits), None).memo
    assert isinstance(first, Absences)
    assert (first.since, first.mean) == ({"w": 100.0}, None)
    back = replace(at_100(FIRST, others, replace(waits, residency=Residency.RESIDENT)), now=104.0)
    assert first.updated(back).mean == 4.0
    late = replace(waits, waiting=(request(9, arrival=90.0),))
    lost = first.updated(at_100(FIRST, others, late))
    assert (lost.since, lost.mean) == ({}, None), "nobody hurries to end it"
    never = policy(at_100(FIRST, others, late), None).memo
    assert isinstance(never, Absences)
    assert never.since == {}


def test_what_finds_no_way_to_come_makes_parking_others_no_dearer() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    streams = tuple(decoding(n, 3.0) for n in range(1, 5))
    ahead = parted(model("ahead", pages=40, kv=2, running=streams))
    for since in ({}, {"w": 90.0}):
        decision = Arbiter()(at_100(FIRST, ahead, wanting), Absences(since=since, mean=0.5))
        assert evicted(decision.actions) == {"ahead": 12}


def test_a_model_that_came_back_stays_for_as_long_as_copies_of_its_weights_take() -> None:
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    streams = tuple(decoding(n, 3.0) for n in range(1, 5))
    back = parted(model("back", pages=40, kv=2, running=streams))
    view = at_100(FIRST, back, wanting)
    copy = copy_seconds(40 * view.page_bytes, view.weights_bytes_per_second)
    decision = Arbiter()(view, Absences(since={"back": 99.0}, mean=0.5))
    assert evicted(decision.actions) == {}
    memo = decision.memo
    assert isinstance(memo, Absences)
    assert memo.until == {"back": pytest.approx(100.0 + STAY * copy)}
    stayed = replace(memo, until={"back": 100.0})
    assert evicted(Arbiter()(view, stayed).actions) == {"back": 12}


def test_who_came_for_a_request_that_waited_for_long_serves_it_before_making_way() -> None:
    """Its request is late, so that parking it again harms nobody: it would come back at any price,
    and be parked again, without end."""
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(10)), first=1)
    owed = request(1, arrival=80.0)._replace(due=82.0)
    token = owed._replace(first=99.0, generated=1, last=99.0, pages=2)
    for waiting, running, stays in (
        ((owed,), (), True),
        ((), (owed._replace(pages=2),), True),
        ((), (token,), False),
        ((owed,), (token,), False),
    ):
        late = parted(model("late", pages=40, kv=2, waiting=waiting, running=running, first=1))
        found = evicted(acts(at_100(FIRST, late, wanting)))
        assert ("late" not in found) is stays


def test_weights_that_leave_free_pages_to_kv_come_onto_others() -> None:
    """They lack pages only because of those that they leave."""
    wanting = model("w", ABSENT, pages=8, waiting=(urgent(9), urgent(8)), first=1)
    waiting = tuple(urgent(10 + i) for i in range(8))
    queue = model("q", waiting=waiting, first=2, running=(decoding(2, 9.0),))
    idle = parted(model("i", pages=40, last_used=10.0))
    found = acts(at_100(FIRST, wanting, queue, idle, free=9))
    assert evicted(found) == {"i": 4}
    assert "Activate" in map(kind, found)


def test_a_turn_may_take_longer_than_its_mean() -> None:
    """A request with slack for half as much again gains by coming now."""
    waits = request(9, arrival=99.9)._replace(due=103.0)
    wanting = model("w", ABSENT, pages=8, waiting=(waits,), first=1)
    view = at_100(FIRST, wanting)
    (gain,) = _gains_of_coming(Outlook(view, turn=2.0), [view.model("w")])
    assert 0.2 < gain < 0.5
    assert _gains_of_coming(Outlook(view, turn=0.5), [view.model("w")])[0] < 0.05
