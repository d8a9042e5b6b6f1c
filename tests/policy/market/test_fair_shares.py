"""Fair shares: who is held while others lack pages, whose work is undone first, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Hold, Promise
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, RequestView, Residency, Shortage
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.fair_shares import fair_shares, share_out, younger_requests_by_share
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.policy.memory.balloon import Balloon
from tests.policy.worlds import device, kind, model, request

NOW = 3.0


def lacks(m: str, r: RequestView, pages: int = 2) -> Shortage:
    return Shortage(m, r.id, pages, False, pages * 4, pages * 4)


def world(a: ModelView, b: ModelView, *, now: float = NOW) -> DeviceView:
    """Models `a` and `b` on 40 pages for KV, of which the first request of `b` lacks some."""
    short = (lacks(b.name, b.waiting[0]),) if b.waiting else ()
    return device(a, b, free=40 - a.kv_pages - b.kv_pages, shortages=short, now=now)


def big(*, held: bool = False, rank: int = 0) -> ModelView:
    """Has 30 of 40 pages, two requests that run, and one that waits."""
    running = (request(1, pages=16), request(4, arrival=1.0, pages=14))
    first = request(5, arrival=1.5)
    waiting = (first._replace(order=first.order._replace(rank=rank)),)
    return model("a", kv=30, running=running, waiting=waiting, first=4, held=held)


def small(*waiting: RequestView) -> ModelView:
    """Has 6 pages, and its first request needs 4 more."""
    return model("b", kv=6, running=(request(2, pages=6),), waiting=waiting, first=4)


def holds(view: DeviceView) -> dict[str, bool]:
    return {a.model: a.held for a in share_out(view, fair=True).holds if isinstance(a, Hold)}


def test_what_kv_could_have_is_divided_by_the_configured_shares() -> None:
    b = model("b", kv=6, share=3.0, waiting=(request(3),))
    gone = model("c", Residency.ABSENT, waiting=(request(6),))
    view = device(big(), b, gone, model("d", kv=2), free=2)
    assert fair_shares(view) == {"a": 10, "b": 30}, "idle and absent models have none"


def test_who_has_more_than_its_share_is_held_while_another_lacks_pages() -> None:
    view = world(big(), small(request(3, arrival=1.0)))
    assert holds(view) == {"a": True}
    sharing = share_out(view, fair=True)
    assert sharing.holding
    assert sharing.view.model("a").held


def test_it_is_released_when_nobody_lacks_a_share() -> None:
    sharing = share_out(world(big(held=True), small()), fair=True)
    assert holds(world(big(held=True), small())) == {"a": False}
    assert not sharing.holding


def test_nobody_is_held_for_less_important_requests() -> None:
    assert holds(world(big(rank=-5), small(request(3, arrival=1.0)))) == {}


def test_a_model_that_runs_nothing_is_not_held() -> None:
    a = replace(big(), running=())
    assert holds(world(a, small(request(3, arrival=1.0)))) == {}


@pytest.mark.parametrize("put_first", [False, True])
def test_a_starved_request_has_all_others_held(put_first: bool) -> None:
    """`a` is within its share; `b` runs nothing, and needs more than its own."""
    a = replace(big(), kv_pages=10, running=(request(1, pages=10),))
    first = request(3, arrival=1.0)._replace(place=-put_first)
    b = model("b", waiting=(first,), first=35)
    assert holds(world(a, b)) == ({"a": True} if put_first else {})
    assert holds(world(a, b, now=1.0 + LONGEST_WAIT)) == {"a": True}


def test_nobody_is_held_for_a_starved_request_when_nothing_runs() -> None:
    """What it lacks is weights of `a`, whose request is older: that one has to go on."""
    a = replace(big(held=True), kv_pages=0, running=())
    b = model("b", waiting=(request(6, arrival=2.0)._replace(place=-1),), first=35)
    sharing = share_out(world(a, b), fair=True)
    assert [(h.model, h.held) for h in sharing.holds if isinstance(h, Hold)] == [("a", False)]
    assert not sharing.holding


def victims(view: DeviceView, claim: Claim) -> list[str]:
    return [offer.key[-1] for offer in younger_requests_by_share(view, claim)]


def test_requests_of_models_beyond_their_share_are_undone_first() -> None:
    """The youngest of all is of `b`, which has less."""
    a = replace(big(), waiting=())
    b = model("b", kv=6, running=(request(6, arrival=2.0, pages=6),))
    view, order = world(a, b), Precedence(0, 0.5, 2)
    running = Claim("b", order, 4, may_preempt=True)
    assert victims(view, running) == ["r4", "r6"]


def test_a_request_without_a_share_left_undoes_no_work_even_if_it_is_put_first() -> None:
    """Of `a`, which has more; it keeps what becomes free, though. Under overload some request of
    every model is always put first, and each would undo several."""
    first = request(3, arrival=0.5)
    a = replace(big(), waiting=(first,))
    view = world(a, model("b", kv=6, running=(request(6, arrival=2.0, pages=6),)))
    claim = Claim("a", first.order, 4, may_preempt=True, admission=True)
    (changed,) = share_out(view, fair=True).claims([claim])
    assert (changed.may_preempt, changed.overdue) == (False, True)
    assert victims(view, claim) == []
    view = world(replace(a, waiting=(first._replace(place=-1),)), view.model("b"))
    assert share_out(view, fair=True).claims([claim]) == [changed]
    assert victims(view, claim) == []


def test_a_more_important_request_does_not_wait_behind_claims_that_undo_work() -> None:
    """A less important one would take the pages that it had undone for this one before."""

    def important(r: RequestView) -> RequestView:
        return r._replace(order=r.order._replace(rank=-5))

    a = big()
    first = important(request(3, arrival=2.0))
    a = replace(a, running=tuple(map(important, a.running)), waiting=(first,))
    b = model("b", waiting=(request(6, arrival=2.5),), first=4)
    sharing = share_out(device(a, b, free=0, now=NOW), fair=True)
    claim = Claim("a", first.order, 4, may_preempt=True, admission=True)
    other = Claim("b", b.waiting[0].order, 4, may_preempt=True, admission=True)
    absent = Claim("c", other.order, 20, may_preempt=True, weights=True)
    for entitled in (other, absent):
        assert sharing.claims([claim, entitled]) == [claim, entitled]
    waits = claim._replace(may_preempt=False, overdue=True)
    assert sharing.claims([claim]) == [waits]
    assert sharing.claims([claim, waits._replace(model="b", order=other.order)])[0] == waits


def test_a_more_important_request_does_not_wait_behind_a_model_to_be_activated() -> None:
    """`c` needs the free pages beside those of `d`, and is less important than the request of `a`,
    which is beyond its share."""

    def important(r: RequestView) -> RequestView:
        return r._replace(order=r.order._replace(rank=-5))

    first = important(request(3, arrival=2.0))
    a = replace(big(), running=tuple(map(important, big().running)), waiting=(first,))
    c = model("c", Residency.ABSENT, pages=10, waiting=(request(6, arrival=2.1),))
    b = model("b", waiting=(request(7, arrival=0.5),))
    d = model("d", pages=8)
    view = device(a, b, c, d, free=4, shortages=(lacks("a", first, 4),), now=NOW)
    decision = Balloon()(view, None)
    assert decision.promises == (Promise("a", 0, 4),)
    assert not any(kind(x) in ("Activate", "Evict") for x in decision.actions)
