"""What a pass over the layers has to heed while some of them come and go (MIRAGE, 4.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ballast.core.job import SequenceWork


class Barriers(Protocol):
    """Of one model; called by the lane that runs its job. A pass goes through all layers, in order.

    Each layer that `begin_pass` names is waited for before it is run, and `used` after.
    """

    def begin_pass(self, work: Sequence[SequenceWork]) -> Collection[int]:
        """Layers that rotate, or are not there yet, for a pass that computes `work`."""

    def wait(self, layer: int) -> None:
        """Returns when it is there. Raises DeviceError if it cannot be brought."""

    def used(self, layer: int) -> None:
        """The pass is done with it."""

    def stalled(self) -> float:
        """Seconds that passes have waited since this was last asked."""
