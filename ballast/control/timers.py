"""Give state machines the time, and call them back later: in real time or in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol


class Timer(Protocol):
    """A call that has been scheduled."""

    def cancel(self) -> None:
        """Cancel the call, if it has not been made."""


class Timers(Protocol):
    """A clock that calls back. `cluster.loop_timers.LoopTimers` is an event loop's."""

    def now(self) -> float:
        """Return the time in seconds; it does not go back."""

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call `call` when `seconds` have passed."""


class Alarm:
    """One timer that is set anew: for the time at which a state machine has to look again."""

    def __init__(self, timers: Timers, call: Callable[[], object]) -> None:
        self._timers, self._call = timers, call
        self._timer: Timer | None = None

    def set(self, due: float) -> None:
        """Call at `due`, in seconds on the timers' clock, and at no time set before; inf: not at
        all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if due < inf:
            self._timer = self._timers.call_later(due - self._timers.now(), self._call)
