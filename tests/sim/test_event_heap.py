"""The total order of events in virtual time, ties included."""

from __future__ import annotations

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    JobDoneEvent,
    TimerEvent,
    TransferDoneEvent,
)
from ballast.core.job import Job
from ballast.core.request import Submission
from ballast.sim.event_heap import EventHeap


def test_ties_end_things_before_they_begin_others() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    arrival = ArrivalEvent(Submission(id="a", model="m", prompt=(1,), max_tokens=1))
    done = JobDoneEvent(Job(1, 0, "m", ()), (), 1.0)
    moved = TransferDoneEvent(1, 1, 1.0)
    for event in (
        DrainEvent(),
        TimerEvent(),
        arrival,
        CancelEvent("x"),
        moved,
        done,
        CancelEvent("y"),
    ):
        heap.schedule(1.0, event)
    taken = heap.take(None)
    assert taken == [
        done,
        moved,
        CancelEvent("x"),
        CancelEvent("y"),
        arrival,
        TimerEvent(),
        DrainEvent(),
    ]
    assert clock.now() == 1.0


def test_take_stops_at_until() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    heap.schedule(2.0, TimerEvent())
    assert heap.take(1.5) == []
    assert clock.now() == 1.5
    assert heap.take(2.0) == [TimerEvent()]


def test_the_past_cannot_be_scheduled() -> None:
    clock = VirtualClock(5.0)
    heap = EventHeap(clock)
    heap.schedule(1.0, TimerEvent())
    heap.take(None)
    assert clock.now() == 5.0


def test_what_is_forgotten_does_not_happen() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    numbers = {at: heap.schedule(at, CancelEvent(str(at))) for at in range(1, 9)}
    heap.forget(numbers[1])
    assert heap.next == 2.0
    heap.forget(numbers[3])
    assert heap.take(None) == [CancelEvent("2")]
    assert heap.next == 4.0
    for at in (6, 5, 7, 8):
        heap.forget(numbers[at])
    job = Job(1, 0, "m", ())
    heap.forget(heap.schedule(3.0, TimerEvent()))
    heap.schedule(3.5, JobDoneEvent(job, (), 1.0))
    assert heap.withdraw(job) is not None
    assert heap.take(None) == [CancelEvent("4")]
    assert heap.next is None
    assert heap.take(20.0) == []


def test_what_follows_an_event_may_happen_at_the_same_moment() -> None:
    heap = EventHeap(VirtualClock())
    moved = [TransferDoneEvent(i, 1, 1.0) for i in range(3)]

    def third() -> None:
        heap.schedule(1.0, moved[2])

    heap.schedule(1.0, moved[0], lambda: heap.forget(timer))
    heap.schedule(1.0, moved[1], third)
    heap.schedule(1.0, CancelEvent("after"))
    timer = heap.schedule(1.0, TimerEvent())
    assert heap.take(None) == [*moved, CancelEvent("after")]
    assert heap.next is None


def test_an_end_is_next_only_if_nothing_else_happens_then() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    first, second = (JobDoneEvent(Job(i, i, "m", ()), (), 1.0) for i in range(2))
    taken: list[float] = []
    heap.schedule(1.0, first, lambda: taken.append(clock.now()))
    assert heap.next_end == (1.0, first)
    number = heap.schedule(1.0, second)
    assert heap.next_end is None
    heap.forget(number)
    heap.schedule(2.0, second)
    heap.schedule(2.0, TimerEvent())
    heap.take_end(first.job)
    assert (taken, clock.now()) == ([1.0], 1.0)
    assert heap.next_end is None
    whole = Job(1, 1, "m", (), 3)
    heap.give_work(whole, ())
    assert heap.take(None) == [JobDoneEvent(whole, (), 1.0), TimerEvent()]


def test_waiting_for_nothing_is_a_broken_promise() -> None:
    with pytest.raises(BrokenPromise):
        EventHeap(VirtualClock()).take(None)
