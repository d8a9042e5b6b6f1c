"""Give state machines the time, and call them back later: in real time or in virtual time."""

from __future__ import annotations

from collections.abc import Callable
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
