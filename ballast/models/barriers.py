"""Define the barriers at which a pass waits for layers whose weights or KV stream (MIRAGE, 4.1).

The drivers of layer streams implement them (`live.host_stream`, `live.event_stream`); model
executors call them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ballast.core.job import SequenceWork
from ballast.kernels.paged_attention import LayerPlaces


class Barriers(Protocol):
    """Barriers of one model's layers, called by the lane that runs its job, layer by layer in
    order.

    For each layer that `begin_pass` returns, `wait` is called before it runs, and `used` after.
    """

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        """Return where the next pass, which computes `work`, finds staged blocks; None: it reads
        none."""

    def begin_pass(self, work: Sequence[SequenceWork]) -> Collection[int]:
        """Begin a pass that computes `work`; returns the layers, ascending, at which it stops."""

    def wait(self, layer: int) -> None:
        """Wait until a layer is present. Raises DeviceError if it cannot be loaded."""

    def used(self, layer: int) -> None:
        """Mark a layer as used: its KV is stored, and its memory may be overwritten."""

    def finish(self) -> None:
        """End a pass, also one that broke off: none of its KV is in flight when the job ends.
        Raises DeviceError if some could not be stored."""

    def move(self) -> None:
        """Move blocks of KV in a job that computes nothing, as `finish` at its end."""

    def stalled(self) -> float:
        """Return the seconds that passes have waited since the last call."""


@dataclass(frozen=True, slots=True)
class HostReads:
    """What the kernels of a pass read in host memory (C2CServe, 5)."""

    units: frozenset[int] = frozenset()
    """Segments of weights; the others are in device memory."""
    os_share: float = 0.0
    """Part of the columns of their products that is computed output-stationary."""


ALL_ON_DEVICE = HostReads()


@runtime_checkable
class ReadsHost(Protocol):
    """Barriers of passes whose kernels may read host memory."""

    def host_reads(self) -> HostReads:
        """Return what the pass that has begun reads there."""


def host_reads(barriers: Barriers | None) -> HostReads:
    """Return the same of any barriers."""
    return barriers.host_reads() if isinstance(barriers, ReadsHost) else ALL_ON_DEVICE


@runtime_checkable
class Carries(Protocol):
    """Barriers that know for how long links carried what passes read and wrote elsewhere."""

    def carried(self) -> tuple[float, float]:
        """Return these seconds since the last call: to the device, and from it."""


def carried(barriers: Barriers | None) -> tuple[float, float]:
    """Return the same of any barriers; none where they do not know."""
    return barriers.carried() if isinstance(barriers, Carries) else (0.0, 0.0)
