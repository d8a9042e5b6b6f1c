"""Define the devices and homes that placement algorithms work on.

Shared by `kv_pressure`, `mux_placement` and `optimal_placement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Homes = Mapping[str, tuple[str, ...]]
"""Devices of each model, one for each of its parts."""


@dataclass(frozen=True, slots=True)
class PlacementDevice:
    """A device on which models, or parts of them, may be placed."""

    name: str
    memory: float
    """Bytes for weights and KV."""
