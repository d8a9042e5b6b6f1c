"""Hold a server's devices by name, with the policy that chooses among them."""

from __future__ import annotations

from typing import TypeVar

from ballast.control.device_record import DeviceRecord
from ballast.core.fleet_state import FleetState
from ballast.core.model import ModelSpec
from ballast.policy.base import FleetPolicy

D = TypeVar("D", bound=DeviceRecord)


class RoutedDevices(FleetState[D]):
    """The devices by name, in the fleet's order."""

    fleet_policy: FleetPolicy
    """The fleet part of the preset, which never changes while a server runs."""

    def full(self, base: ModelSpec) -> bool:
        """Return whether all devices of a model would refuse another request, by their reports."""
        return all(device.full(base) for device in self.routes(base.name))
