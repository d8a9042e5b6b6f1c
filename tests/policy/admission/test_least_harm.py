"""One queue for lane and memory: those that are let in are in time for both, nobody waits for
ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Reorder
from ballast.core.view import RequestView, Shortage
from ballast.policy.admission.late_last import LATE, PROMOTED
from ballast.policy.admission.least_harm import LeastHarm, QueuedRequest, left_out
from ballast.policy.market.claims import BEHIND_ALL
from ballast.policy.market.starvation import LONGEST_WAIT
from tests.policy.worlds import device, model, request

INF = float("inf")


def is_in_time(chosen: list[QueuedRequest], per_second: float, begun: float) -> bool:
    """Whether all are, in order of deadline, where so many pages become free each second."""
    at, pages = begun, 0
    for r in sorted(chosen, key=lambda r: r.due):
        at, pages = at + r.seconds, pages + r.pages
        if max(at, pages / per_second + r.seconds) > r.due:
            return False
    return True


@st.composite
def queues(draw: st.DrawFn, most_seconds: int = 8) -> list[QueuedRequest]:
    return [
        QueuedRequest(
            f"r{i}",
            0,
            draw(st.integers(0, 20)) * 0.5 if draw(st.integers(0, 9)) else -INF,
            draw(st.integers(0, most_seconds)) * 0.25,
            draw(st.integers(0, 8)),
        )
        for i in range(draw(st.integers(0, 8)))
    ]


@given(queues(), st.sampled_from([0.5, 2.0, 8.0]), st.sampled_from([0.0, 1.0]))
def test_those_let_in_are_in_time_for_lane_and_memory(
    queue: list[QueuedRequest], per_second: float, begun: float
) -> None:
    late, slack = left_out(queue, lambda pages: pages / per_second, begun)
    kept = [r for r in queue if r.id not in late]
    assert is_in_time(kept, per_second, begun)
    assert slack >= 0


@given(queues(most_seconds=0), st.sampled_from([0.5, 2.0, 8.0]))
def test_where_memory_alone_is_short_as_many_are_let_in_as_brute_force_finds(
    queue: list[QueuedRequest], per_second: float
) -> None:
    late, _ = left_out(queue, lambda pages: pages / per_second)
    most = max(
        n
        for n in range(len(queue) + 1)
        if any(is_in_time(list(some), per_second, 0.0) for some in combinations(queue, n))
    )
    assert len(queue) - len(late) == most


NOW = 100.0


def waits(sequence: int, tokens: int, due: float = 1.5) -> RequestView:
    """A request whose first token is due in so many seconds."""
    return request(sequence, arrival=NOW - 0.5, tokens=tokens)._replace(due=NOW + due)


def test_a_request_that_finds_no_pages_in_time_stands_in_nobodys_way() -> None:
    """The pages that a running request frees within a second serve the brief ones."""
    ending = request(0, pages=4, tokens=40, generated=20, max_tokens=21)
    long, brief = waits(1, 4000), waits(2, 40)
    m = model("m", waiting=(long, brief), running=(ending,), first=300)
    lacking = Shortage("m", long.id, 300, limited=False)
    view = replace(device(m, free=0, shortages=(lacking,)), now=NOW)
    (moved,) = LeastHarm()(view, None).actions
    assert isinstance(moved, Reorder)
    assert (moved.requests, moved.place) == ((long.id,), BEHIND_ALL)
    there = replace(view, free=400)
    assert LeastHarm()(there, None).actions == ()


def test_the_kth_of_those_left_out_comes_first_within_k_times_ten_seconds() -> None:
    """However many others can be in time: the bound that the docs state."""
    left = {f"r{i}": waits(i, 40, due=-1.0 * i)._replace(place=BEHIND_ALL) for i in range(1, 5)}
    first_at: dict[str, float] = {}
    memo: object = None
    for tenth in range(10 * 5 * round(LONGEST_WAIT)):
        now = NOW + tenth / 10
        fresh = request(100 + tenth, arrival=now)._replace(due=now + 2.0)
        view = device(model("m", waiting=(fresh, *left.values()), first=1), free=400)
        decision = LeastHarm()(replace(view, now=now), memo)
        memo = decision.memo
        for action in decision.actions:
            if isinstance(action, Reorder) and action.place == PROMOTED:
                (id,) = action.requests
                del left[id]
                first_at[id] = now
    assert list(first_at) == ["r1", "r2", "r3", "r4"], "the oldest first"
    for k, at in enumerate(first_at.values(), 1):
        assert at <= NOW + k * LONGEST_WAIT + 0.2


def test_who_made_way_ahead_of_its_pace_waits_behind_first_tokens_that_are_due_earlier() -> None:
    """It came first; it comes before those whose first token is due after it has to be back."""
    back = request(1, arrival=0.0, generated=60)._replace(first=0.5, due=1.0, undone=32)
    due_soon, due_late = request(2, arrival=3.5), request(3, arrival=60.0)
    for others, rests in (((due_soon,), True), ((due_late,), False), ((due_soon, due_late), True)):
        m = model("a", waiting=(back, *others), first=1)
        view = replace(device(m, free=50), now=3.6)
        moved = {
            id: a.place
            for a in LeastHarm()(view, None).actions
            if isinstance(a, Reorder)
            for id in a.requests
        }
        assert (moved.get(back.id) == LATE) is rests
        assert not LeastHarm(resting=0)(view, None).actions


def test_who_rests_comes_back_to_its_place_once_no_first_token_is_due_earlier() -> None:
    back = request(1, arrival=0.0, generated=60)._replace(first=0.5, due=1.0, place=LATE, undone=32)
    view = replace(device(model("a", waiting=(back,), first=1), free=50), now=3.6)
    (found,) = LeastHarm()(view, None).actions
    assert isinstance(found, Reorder)
    assert (found.requests, found.place) == ((back.id,), 0)
