"""StartTimeFairQueues are fair by cost, and first in, first out within a queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.memory.fair_queueing import StartTimeFairQueues


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 60))
def test_charges_of_those_who_wait_differ_by_a_turn(costs: list[int], rounds: int) -> None:
    turns: StartTimeFairQueues[int, str] = StartTimeFairQueues()
    for key in range(len(costs)):
        turns.add(key, "endless")
    charged = [0] * len(costs)
    for _ in range(rounds):
        key = turns.next()
        turns.charge(key, costs[key])
        charged[key] += costs[key]
    assert max(charged) - min(charged) <= max(costs)


def test_who_comes_late_is_owed_nothing() -> None:
    turns: StartTimeFairQueues[str, int] = StartTimeFairQueues()
    turns.add("long", 0)
    for _ in range(100):
        assert turns.next() == "long"
        turns.charge("long", 1.0)
    turns.add("late", 0)
    served = []
    for _ in range(6):
        served.append(turns.next())
        turns.charge(served[-1], 1.0)
    assert served.count("late") in (3, 4)


def test_who_comes_again_and_again_does_not_starve_the_others() -> None:
    """A queue that empties at each turn and is filled at once is charged for what it had."""
    turns: StartTimeFairQueues[str, int] = StartTimeFairQueues()
    turns.add("again", 0)
    turns.add("long", 0)
    served = []
    for i in range(20):
        served.append(turns.next())
        turns.charge(served[-1], 1.0)
        if served[-1] == "again":
            turns.pop("again")
            turns.add("again", i)
    assert served.count("long") == 10


def test_a_queue_keeps_its_order_and_ends() -> None:
    turns: StartTimeFairQueues[str, int] = StartTimeFairQueues()
    for i in range(3):
        turns.add("a", i)
    turns.add("b", 9)
    assert (len(turns), turns.first("a"), turns.first("b")) == (2, 0, 9)
    turns.pop("a")
    assert turns.first("a") == 1
    turns.pop("b")
    assert "b" not in turns
    assert "a" in turns
