"""Define the `Clock` protocol, and a virtual clock for the simulator and tests.

Every component below `cli` is given its clock; none reads the system's time by itself.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Seconds since an origin of its own choosing; never goes backwards."""

    def now(self) -> float: ...


class VirtualClock:
    """A clock that only moves by `advance_to`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        """Move to `when`; a moment already past leaves the clock where it is."""
        self._now = max(self._now, when)
