"""Brings rotating layers to their slots, one just before another is run (MIRAGE, 4.1 and 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.model import ModelSpec
from ballast.core.rotation import Rotation
from ballast.memory.copies import Copy

NOBODY = -1
"""In place of a layer: what a slot holds is of no account."""


@dataclass(slots=True)
class Loads:
    """What the rotation of a model has cost since start."""

    n: int = 0
    """Layers brought, those included that came back to stay."""
    n_bytes: int = 0
    copy_seconds: float = 0.0
    """Of the copies on their link."""
    stall_seconds: float = 0.0
    """In which jobs waited for layers."""


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """Weights that are brought by one transfer, layers last and in order."""

    layers: Mapping[int, int]
    """By layer of the transfer, the bytes after which it is there, and all before it."""
    opens: int
    """Bytes after which the first job may begin."""


class Rotor(Protocol):
    """Of one model. While it has turned, its jobs and this agree on when each layer is there."""

    @property
    def loads(self) -> Loads: ...

    @property
    def held(self) -> Sequence[int]:
        """By slot of the rotation in force, the layer whose bytes are there; while settled."""

    def settle(self) -> None:
        """Bring nothing more for a job to come; as soon as nothing is on its way, a
        `RotationSettledEvent` is posted. No job of the model runs or begins until `turn` or
        `forget`."""

    def turn(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        """`rotation` is in force, and its slots mapped beneath its layers.

        `held`: by slot, the layer whose bytes are there, or -1; `missing`: layers that do not
        rotate, and have memory again, but no bytes. Brings these, and to each slot its first layer.
        """

    def forget(self) -> None:
        """The weights are gone; nothing is on its way."""

    def bring(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Start the transfer that brings the model's weights, and post `FirstJobReadyEvent` while
        it goes on: from then on jobs wait for the layers that they come to. Its end is posted as
        `TransferDoneEvent`, before any job can have passed the last layer, or failed for want of
        one.

        False, and nothing is started: jobs of this model wait for the whole load.
        """


MakeRotor = Callable[[ModelSpec, Sequence[Copy]], Rotor]
"""For a model, and the copy that brings each of its layers."""
