"""What policies are: pure questions, asked by a device's loop and by the fleet's controller."""

from __future__ import annotations

from typing import Protocol

from ballast.core.actions import Decision
from ballast.core.compute import ComputeDecision, ComputeView
from ballast.core.fleet import FleetDecision, FleetView
from ballast.core.view import DeviceView


class DevicePolicy(Protocol):
    """Memory and residency of one device.

    Asked on arrivals, finishes, shortages and timers, not on every step. Equal views and memos
    give equal decisions.
    """

    def __call__(self, view: DeviceView, memo: object) -> Decision: ...


class ComputePolicy(Protocol):
    """Which model's job runs next on an idle lane. Equal views and memos give equal decisions."""

    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision: ...


class FleetPolicy(Protocol):
    """Which devices serve which models, as time goes on. Asked when it wished to be."""

    def __call__(self, view: FleetView, memo: object) -> FleetDecision: ...
