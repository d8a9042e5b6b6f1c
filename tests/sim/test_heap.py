"""The total order of events in virtual time, ties included."""

from __future__ import annotations

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise
from ballast.core.event import Arrival, Cancel, Drain, JobDone, Timer, TransferDone
from ballast.core.job import Job
from ballast.core.request import Submission
from ballast.sim.heap import EventHeap


def test_ties_end_things_before_they_begin_others() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    arrival = Arrival(Submission(id="a", model="m", prompt=(1,), max_tokens=1))
    done = JobDone(Job(1, 0, "m", ()), (), 1.0)
    moved = TransferDone(1, 1, 1.0)
    for event in (Drain(), Timer(), arrival, Cancel("x"), moved, done, Cancel("y")):
        heap.schedule(1.0, event)
    taken = heap.take(None)
    assert taken == [done, moved, Cancel("x"), Cancel("y"), arrival, Timer(), Drain()]
    assert clock.now() == 1.0


def test_take_stops_at_until() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    heap.schedule(2.0, Timer())
    assert heap.take(1.5) == []
    assert clock.now() == 1.5
    assert heap.take(2.0) == [Timer()]


def test_the_past_cannot_be_scheduled() -> None:
    clock = VirtualClock(5.0)
    heap = EventHeap(clock)
    heap.schedule(1.0, Timer())
    heap.take(None)
    assert clock.now() == 5.0


def test_waiting_for_nothing_is_a_broken_promise() -> None:
    with pytest.raises(BrokenPromise):
        EventHeap(VirtualClock()).take(None)
