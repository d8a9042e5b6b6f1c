"""Follow the layers that one transfer brings home, while a pass may already run behind it.

Part of a `Buffer`'s state. The transfer is the link's, not the stream's: it is counted in bytes,
and what it fails to bring is not tried again (decision 051).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """Order in which one transfer loads a model's weights: layers last and in order."""

    layers: Mapping[int, int]
    """By layer, the bytes of the transfer after which it and all layers before it are present."""
    opens: int
    """Bytes after which the first job may begin."""


class Arrival:
    """A transfer under way that brings layers to places of their own."""

    def __init__(self, plan: ArrivalPlan) -> None:
        self.missing = dict(plan.layers)
        """Layers that have not landed, with the bytes after which each has."""
        self.error: str | None = None
        """Why the missing layers will not come; None: they may."""
        self._opens: int | None = plan.opens

    def land(self, n_bytes: int) -> list[int]:
        """Return the layers that the first `n_bytes` of the transfer complete; each once."""
        landed = [layer for layer, after in self.missing.items() if after <= n_bytes]
        for layer in landed:
            del self.missing[layer]
        return landed

    def opens(self, n_bytes: int) -> bool:
        """Return whether the first job may begin from now on; true once."""
        if self._opens is None or n_bytes < self._opens:
            return False
        self._opens = None
        return True
