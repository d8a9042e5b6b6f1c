"""Define the barriers at which a pass waits for layers that are loaded while it runs (MIRAGE, 4.1).

Rotors implement them; model executors call them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ballast.core.job import SequenceWork


class Barriers(Protocol):
    """Barriers of one model's layers, called by the lane that runs its job, layer by layer in
    order.

    For each layer that `begin_pass` returns, `wait` is called before it runs, and `used` after.
    """

    def begin_pass(self, work: Sequence[SequenceWork]) -> Collection[int]:
        """Begin a pass that computes `work`; returns the layers that rotate or are still absent."""

    def wait(self, layer: int) -> None:
        """Wait until a layer is present. Raises DeviceError if it cannot be loaded."""

    def used(self, layer: int) -> None:
        """Mark a layer as used: its memory may be overwritten."""

    def stalled(self) -> float:
        """Return the seconds that passes have waited since the last call."""
