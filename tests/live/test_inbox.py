"""Events from any thread: in order, stamped, and waited for however long."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from ballast.core.event import ArrivalEvent, CancelEvent
from ballast.core.request import Submission
from ballast.live.inbox import MonotonicClock, QueueInbox

ASKED = Submission(id="new", model="m", prompt=(1,), max_tokens=1)


@pytest.mark.parametrize("until", [None, 1e6, 1e11, float("inf")])
def test_an_event_is_waited_for_whatever_else_is_due(until: float | None) -> None:
    """A level of 1e9 seconds a token makes something due in centuries."""
    inbox = QueueInbox(MonotonicClock())
    threading.Timer(0.05, lambda: inbox.post(CancelEvent("a"), CancelEvent("b"))).start()
    assert inbox.take(until) == [CancelEvent("a"), CancelEvent("b")]


def test_a_moment_that_comes_ends_the_wait() -> None:
    inbox = QueueInbox(MonotonicClock())
    began = time.monotonic()
    assert inbox.take(0.05) == []
    assert inbox.take(-1.0) == []
    assert time.monotonic() - began < 60.0


def test_a_request_that_was_elsewhere_keeps_its_place() -> None:
    """By when it first arrived."""
    clock = MonotonicClock()
    clock.now = lambda: 100.0  # type: ignore[method-assign]
    inbox = QueueInbox(clock)
    inbox.post(ArrivalEvent(ASKED), ArrivalEvent(replace(ASKED, id="old", resumed=(1,), age=5.0)))
    new, old = (e.submission for e in inbox.take(0.0) if isinstance(e, ArrivalEvent))
    assert old.arrival == new.arrival - 5.0
