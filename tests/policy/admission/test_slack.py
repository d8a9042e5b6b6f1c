"""One queue for a device: as many requests in time as can be, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Action, Reorder
from ballast.core.cost import StepCosts
from ballast.core.view import DeviceView, ModelView, RequestView, Shortage
from ballast.policy.admission.late_last import IN_TIME, LATE, PROMOTED
from ballast.policy.admission.slack import QueuedPrefill, Slack, left_out
from ballast.policy.market.claims import (
    BEHIND_ALL,
    LONGEST_WAIT,
    activation_claims,
    shortage_claims,
)
from ballast.policy.memory.balloon import Balloon
from tests.policy.worlds import away, device, kind, model, request

NOW = 100.0
INF = float("inf")


def in_time(chosen: list[QueuedPrefill], begun: float = 0.0) -> bool:
    """Whether all are, in order of deadline."""
    at = begun
    for p in sorted(chosen, key=lambda p: p.due):
        at += p.seconds
        if at > p.due:
            return False
    return True


@st.composite
def queues(draw: st.DrawFn) -> list[QueuedPrefill]:
    n = draw(st.integers(0, 8))
    return [
        QueuedPrefill(
            f"r{i}",
            0,
            draw(st.integers(0, 20)) * 0.5 if draw(st.integers(0, 9)) else -INF,
            draw(st.integers(1, 12)) * 0.25,
        )
        for i in range(n)
    ]


@given(queues(), st.sampled_from([0.0, 0.5, 2.0]))
def test_as_many_are_in_time_as_brute_force_finds(queue: list[QueuedPrefill], begun: float) -> None:
    late, slack = left_out(queue, begun)
    kept = [p for p in queue if p.id not in late]
    assert in_time(kept, begun)
    most = max(
        n
        for n in range(len(queue) + 1)
        if any(in_time(list(chosen), begun) for chosen in combinations(queue, n))
    )
    assert len(kept) == most
    assert slack >= 0
    assert (slack == INF) == (not kept)
    if kept:
        later = [p._replace(due=p.due - slack) for p in kept]
        assert in_time(later, begun), "until then all stay in time"
        assert not in_time([p._replace(due=p.due - slack - 0.01) for p in kept], begun)


@given(queues(), queues())
def test_the_more_important_lose_nothing_to_others(
    a: list[QueuedPrefill], b: list[QueuedPrefill]
) -> None:
    others = [p._replace(id=f"other {p.id}", rank=1) for p in b]
    alone, _ = left_out(a)
    late, _ = left_out([*others, *a])
    assert {id for id in late if not id.startswith("other")} == alone
    taken = sum(p.seconds for p in a if p.id not in alone)
    assert {id for id in late if id.startswith("other")} == left_out(others, taken)[0]


SLOW = StepCosts(1.0, 0.0, 0.0, 0.0, 0.0)
"""A prefill takes a second."""


def waits(sequence: int, due: float, place: int = IN_TIME) -> RequestView:
    """A request whose first token is due in so many seconds."""
    return request(sequence, arrival=NOW - 1.0)._replace(due=NOW + due, place=place)


def view(*models: ModelView, now: float = NOW) -> DeviceView:
    return replace(device(*models, free=0), now=now)


def queued(name: str, *waiting: RequestView) -> ModelView:
    return replace(model(name, waiting=waiting), costs=SLOW)


def moves(actions: tuple[Action, ...]) -> dict[str, int]:
    return {id: a.place for a in actions if isinstance(a, Reorder) for id in a.requests}


def test_models_share_one_queue() -> None:
    """Two prefills fit before the deadlines of three, wherever the third is."""
    both = view(queued("a", waits(1, 2.1)), queued("b", waits(2, 2.2), waits(3, 2.3)))
    assert len(moves(Slack()(both, None).actions)) == 1
    apart = view(queued("a", waits(1, 2.1)), queued("b", waits(2, 2.2)))
    assert Slack()(apart, None).actions == ()


def test_a_request_comes_back_when_there_is_time_for_it() -> None:
    back = view(queued("a", waits(1, 2.5), waits(2, 1.5, BEHIND_ALL)))
    assert moves(Slack()(back, None).actions) == {"r2": IN_TIME}


def test_the_same_queue_is_looked_at_again_when_slack_is_gone() -> None:
    there = view(queued("a", waits(1, 1.4)), queued("b", waits(2, 2.3)))
    first = Slack()(there, None)
    assert first.actions == ()
    assert first.wake_at is not None
    assert 0.29 < first.wake_at - NOW < 0.31
    soon = replace(there, now=NOW + 0.2)
    assert Slack()(soon, first.memo).wake_at == first.wake_at
    then = replace(there, now=first.wake_at + 0.01)
    assert BEHIND_ALL in moves(Slack()(then, first.memo).actions).values()


def test_weights_that_are_not_here_take_their_time() -> None:
    absent = away(queued("a", waits(1, 1.5)))
    slow = replace(view(absent), link_bytes_per_second=1.0)
    assert moves(Slack()(slow, None).actions) == {"r1": BEHIND_ALL}
    assert Slack()(replace(slow, link_bytes_per_second=1e12), None).actions == ()


def test_the_oldest_that_is_left_out_comes_first_after_a_while() -> None:
    there = view(queued("a", waits(1, 60.0)), queued("b", waits(2, -5.0, BEHIND_ALL)))
    first = Slack(aging=3.0)(there, None)
    assert first.wake_at == NOW + 3.0
    assert first.actions == ()
    later = Slack(aging=3.0)(replace(there, now=NOW + 3.0), first.memo)
    assert moves(later.actions) == {"r2": PROMOTED}
    promoted = view(queued("a", waits(1, 60.0)), queued("b", waits(2, -5.0, PROMOTED)))
    assert Slack()(replace(promoted, now=NOW + 9.0), later.memo).actions == (), "it stays first"


def test_nobody_is_put_first_where_all_are_late() -> None:
    there = view(queued("a", waits(1, -1.0, BEHIND_ALL)), queued("b", waits(2, -2.0, BEHIND_ALL)))
    assert Slack()(there, None).wake_at is None
    assert Slack()(replace(there, now=NOW + 2 * LONGEST_WAIT), None).actions == ()


def test_claims_of_those_left_out_come_last_and_undo_nothing() -> None:
    for place, undoes in ((IN_TIME, True), (BEHIND_ALL, False), (PROMOTED, True)):
        late = waits(1, -50.0, place)
        absent = away(queued("a", late))
        (claim,), _ = activation_claims(view(absent), 0.5)
        assert claim.may_preempt is undoes
        assert (claim.due == INF) is not undoes
        there = replace(
            view(queued("a", late)), shortages=(Shortage("a", late.id, 1, limited=False),)
        )
        (claim,), _ = shortage_claims(there, 0.5)
        assert claim.may_preempt is undoes


def test_an_important_request_that_is_late_waits_behind_its_own_model_alone() -> None:
    late, other = waits(1, -5.0), waits(2, 60.0)
    important = late._replace(order=late.order._replace(rank=-1))
    there = view(queued("a", important), queued("b", other))
    assert moves(Slack()(there, None).actions) == {"r1": LATE}
    assert moves(Slack()(view(queued("a", late), queued("b", other)), None).actions) == {
        "r1": BEHIND_ALL
    }


def test_a_model_whose_requests_wait_behind_all_makes_way_for_a_running_one() -> None:
    runs = request(9, arrival=NOW - 0.5, generated=3)
    for place, goes in ((IN_TIME, False), (BEHIND_ALL, True)):
        waiting = queued("a", waits(1, -50.0, place))
        there = view(waiting, replace(model("b", running=(runs,)), costs=SLOW))
        there = replace(there, shortages=(Shortage("b", runs.id, 1, limited=False),))
        actions = Balloon()(there, None).actions
        assert [(kind(a), a.model) for a in actions if kind(a) == "Evict"] == (
            [("Evict", "a")] if goes else []
        )
