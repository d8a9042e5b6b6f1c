"""The demand bound, against earliest-deadline-first order played out step by step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.policy.compute.demand import Demand, Task
from tests.effort import tries

ROUNDING = 1e-9
"""Seconds: sums of a few numbers below a thousand, in another order."""

sixteenths = st.integers(1, 160).map(lambda n: n / 16)
tasks = st.builds(
    Task,
    due=st.integers(-8, 320).map(lambda n: n / 16),
    seconds=st.integers(1, 48).map(lambda n: n / 16),
    pace=sixteenths,
    steps=st.one_of(st.just(1), st.integers(2, 12)),
)


def laxity(known: Sequence[Task]) -> float:
    """Seconds by which the least lucky step ends before it is due, in earliest-deadline-first
    order from now on; negative: by which it is late. Infinite if there is none.

    A step may begin when the one before it has ended, so nothing that is due earlier ever comes in
    while another runs, and preemption changes nothing.
    """
    queue = [(task.due, i, 0) for i, task in enumerate(known)]
    heapq.heapify(queue)
    now, least = 0.0, math.inf
    while queue:
        due, i, step = heapq.heappop(queue)
        task = known[i]
        now += task.seconds
        least = min(least, due - now)
        if step + 1 < task.steps:
            heapq.heappush(queue, (task.due + (step + 1) * task.pace, i, step + 1))
    return least


@given(st.lists(tasks, max_size=6))
def test_headroom_is_never_more_than_there_is(known: list[Task]) -> None:
    headroom, least = Demand(known).headroom(), laxity(known)
    if headroom >= 0:
        assert least >= -ROUNDING, "somebody is late"
    assert headroom <= least + ROUNDING
    # Between two steps the demand is a line, above what is due by less than a step.
    lines = sum(task.seconds for task in known if task.steps > 1)
    assert headroom >= least - lines - ROUNDING


@given(st.lists(tasks, max_size=6), st.sets(st.integers(0, 5)))
def test_headroom_without_some_is_that_of_the_rest(known: list[Task], some: set[int]) -> None:
    without = [i for i in some if i < len(known)]
    rest = [task for i, task in enumerate(known) if i not in some]
    found = Demand(known).headroom(*without)
    assert found == pytest.approx(Demand(rest).headroom(), abs=ROUNDING)


@given(st.lists(tasks, max_size=4), tasks, st.none() | tasks)
def test_a_task_is_added_if_nobody_is_late_for_it(
    known: list[Task], task: Task, then: Task | None
) -> None:
    more = [task] if then is None else [task, then]
    all_of_them = Demand([*known, *more]).headroom()
    demand = Demand(known, more)
    before = demand.headroom()
    assert before == pytest.approx(Demand(known).headroom(), abs=ROUNDING)
    added = demand.add(*more)
    if abs(all_of_them) > ROUNDING:
        assert added == (all_of_them > 0)
    expected = all_of_them if added else before
    assert demand.headroom() == pytest.approx(expected, abs=ROUNDING)
    if added:
        assert laxity([*known, *more]) >= -ROUNDING


@settings(max_examples=tries(25, all=50))
@given(st.lists(tasks, max_size=3), st.lists(tasks, min_size=1, max_size=4))
def test_what_is_refused_leaves_room_for_what_comes_later(
    known: list[Task], more: list[Task]
) -> None:
    demand = Demand(known, more)
    kept = [*known, *(task for task in more if demand.add(task))]
    assert demand.headroom() == pytest.approx(Demand(kept).headroom(), abs=ROUNDING)
    assert Demand(known, more, all_of_them=True).headroom() == pytest.approx(
        Demand([*known, *more]).headroom(), abs=ROUNDING
    )


def test_headroom_of_nothing_is_infinite() -> None:
    assert Demand([]).headroom() == math.inf
    assert Demand([Task(2.0, 0.5)]).headroom(0) == math.inf
    assert Demand([], [Task(2.0, 0.5)]).headroom() == math.inf


def test_headroom_is_the_least_over_all_due_times() -> None:
    soon, later = Task(1.0, 0.25), Task(4.0, 3.5)
    assert Demand([soon]).headroom() == 0.75
    assert Demand([soon, later]).headroom() == 0.25
    assert Demand([soon, later]).headroom(1) == 0.75
    # Ten steps, the last due at 10.0, of 0.5 each: 5.0 of time is free, but the first comes at 1.0.
    steps = Task(1.0, 0.5, 1.0, 10)
    assert steps.last_due == 10.0
    assert Demand([steps]).headroom() == 0.5
    assert Demand([steps, Task(10.0, 4.75)]).headroom() == 0.25
