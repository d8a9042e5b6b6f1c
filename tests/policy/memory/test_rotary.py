"""Preset `superinfer`: who is ahead of its pace makes way, rests, and comes back in time."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.actions import Action, Preempt, Reorder
from ballast.core.view import DeviceView, ModelView, RequestView, Shortage
from ballast.policy.admission.late_last import IN_TIME, LATE
from ballast.policy.admission.turns_by_slack import TurnsBySlack, back_by
from ballast.policy.memory.recompute import Recompute
from ballast.policy.memory.rotary import Rotary
from tests.policy.worlds import device, model, request

LEAD = 0.5


def ahead_by(sequence: int, seconds: float, now: float, tokens: int = 32) -> RequestView:
    """A running request whose next token is due `seconds` from `now`: it had its first at 0."""
    generated = round((now + seconds) / 0.1)
    return request(sequence, pages=4, generated=generated, tokens=tokens)


def world(now: float, *running: RequestView) -> DeviceView:
    """A full device on which `running` are served and one request waits for pages."""
    first = request(9, arrival=now)
    a = model("a", kv=4 * len(running), running=running, waiting=(first,), first=4)
    short = (Shortage("a", first.id, 4, limited=False),)
    return replace(device(a, free=0, shortages=short), now=now)


def preempted(actions: tuple[Action, ...]) -> list[str]:
    return [a.request_id for a in actions if isinstance(a, Preempt)]


def test_the_request_with_most_time_makes_way_for_one_that_is_due_earlier() -> None:
    view = world(1.0, ahead_by(1, 0.2, 1.0), ahead_by(2, 4.0, 1.0), ahead_by(3, 9.0, 1.0))
    assert preempted(Rotary(lead=LEAD)(view, None).actions) == ["r3"]
    assert preempted(Recompute()(view, None).actions) == [], "nobody undoes work to be admitted"


def test_nobody_makes_way_without_a_lead_or_for_who_is_due_later() -> None:
    little = world(1.0, ahead_by(1, 0.3, 1.0), ahead_by(2, 0.4, 1.0))
    assert preempted(Rotary(lead=LEAD)(little, None).actions) == []
    later = world(1.0, ahead_by(1, 0.9, 1.0))  # the waiting one is due in a second
    assert preempted(Rotary(lead=LEAD)(later, None).actions) == []


def test_who_comes_back_sooner_from_the_host_than_by_computing_may_rest_longer() -> None:
    view = world(1.0, ahead_by(1, 4.0, 1.0, tokens=400))
    [m] = view.models
    slow = replace(m, costs=replace(m.costs, base=0.0, per_token=0.01))
    computed = replace(view, models=(slow,))
    kept = replace(computed, kv_fetch_bytes_per_second=1e9)
    assert back_by(computed, slow, m.running[0]) < back_by(kept, slow, m.running[0])
    assert preempted(Rotary(lead=LEAD)(computed, None).actions) == []
    assert preempted(Rotary(lead=LEAD)(kept, None).actions) == ["r1"]


def test_who_has_lost_its_kv_rests_again_only_where_it_comes_back_by_a_copy() -> None:
    lost = ahead_by(1, 9.0, 1.0)._replace(undone=20)
    view = world(1.0, lost)
    assert preempted(Rotary(lead=LEAD)(view, None).actions) == []
    kept = replace(view, kv_fetch_bytes_per_second=1e12)
    assert preempted(Rotary(lead=LEAD)(kept, None).actions) == ["r1"]


def test_a_more_important_request_never_rests_for_a_less_important_one() -> None:
    running = ahead_by(1, 9.0, 1.0)
    important = running._replace(order=running.order._replace(rank=-1))
    assert preempted(Rotary(lead=LEAD)(world(1.0, important), None).actions) == []


def resting(at: float, place: int) -> tuple[DeviceView, ModelView, RequestView]:
    """A request that has made way, at a time."""
    r = request(1, generated=50)._replace(place=place, last=1.0)
    m = model("a", waiting=(r,), first=4)
    return replace(device(m, free=0), now=at), m, r


def reorders(view: DeviceView) -> list[tuple[str, int]]:
    actions = TurnsBySlack(lead=LEAD)(view, None).actions
    return [(a.requests[0], a.place) for a in actions if isinstance(a, Reorder)]


def test_who_made_way_rests_and_the_policy_asks_to_be_called_when_it_is_due() -> None:
    view, m, r = resting(1.0, IN_TIME)
    assert reorders(view) == [("r1", LATE)]
    due = back_by(view, m, r) - LEAD / 2
    assert TurnsBySlack(lead=LEAD)(view, None).wake_at == due
    again, _, _ = resting(due, LATE)
    assert reorders(again) == [("r1", IN_TIME)]


def test_who_can_keep_its_level_no_more_does_not_come_first() -> None:
    assert reorders(resting(200.0, LATE)[0]) == []
