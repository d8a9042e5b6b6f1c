"""Define how weights that rotate, or are still loading, stream behind jobs (MIRAGE, 4.1, 5.4).

Implemented by the drivers of layer streams: on CPUs, GPUs, groups of ranks and in virtual time;
called by `WeightsOnDevice` on the engine loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.rotation import Rotation
from ballast.memory.copies import Copy
from ballast.residency.arrival import ArrivalPlan


@dataclass(slots=True)
class Loads:
    """Counts and times of the loads of a model's rotating layers since start."""

    n: int = 0
    """Layers loaded, including those that ceased to rotate."""
    n_bytes: int = 0
    copy_seconds: float = 0.0
    """Seconds that the copies took on their link."""
    stall_seconds: float = 0.0
    """Seconds that jobs waited for layers."""

    def add(self, n_bytes: int, seconds: float) -> None:
        """Count a load that has landed; `seconds` on its link."""
        self.n += 1
        self.n_bytes += n_bytes
        self.copy_seconds += seconds


class WeightStream(Protocol):
    """Loads layers of one model in step with its jobs. Called between them."""

    def add_weights(self, copies: Sequence[Copy]) -> None:
        """Stream weights; `copies` load each layer to its address. Called once, first."""

    @property
    def loads(self) -> Loads: ...

    @property
    def held(self) -> Sequence[int]:
        """By slot of the rotation in force, the layer whose bytes it holds; valid while settled."""

    def settle(self) -> None:
        """Start no more loads; once none is in flight, a `RotationSettledEvent` is posted. No job
        of the model runs or begins until `remap` or `forget`."""

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        """Put `rotation` in force, whose slots have been mapped beneath its layers.

        `held`: by slot, the layer whose bytes it holds, or -1; `missing`: layers that do not rotate
        and have memory of their own again, but no bytes. Loads these, and each slot's first layer.
        """

    def forget(self) -> None:
        """Forget the rotation: the weights were evicted, and no load is in flight."""

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Start the transfer that loads the model's weights, and post `FirstJobReadyEvent` during
        it: from then on jobs wait for each layer that they reach. The end is posted as
        `TransferDoneEvent`, before any job can have passed the last layer, or failed for lack of
        one.

        Returns False, with nothing started, if jobs have to wait for the whole load.
        """
