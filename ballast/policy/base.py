"""What policies are: pure questions, asked by a device's loop and by the fleet's controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ballast.core.actions import Decision
from ballast.core.fleet import FleetDecision, FleetView
from ballast.core.view import Candidate, DeviceView


class DevicePolicy(Protocol):
    """Memory and residency of one device.

    Asked on arrivals, finishes, shortages and timers, not on every step. Equal views and memos
    give equal decisions.
    """

    def __call__(self, view: DeviceView, memo: object) -> Decision: ...


class OrderPolicy(Protocol):
    """Which model runs next on an idle lane. `candidates` is never empty."""

    def __call__(self, candidates: Sequence[Candidate]) -> str: ...


class FleetPolicy(Protocol):
    """Which devices serve which models, as time goes on. Asked when it wished to be."""

    def __call__(self, view: FleetView, memo: object) -> FleetDecision: ...
