"""Declare what a policy requires of its devices, and refuse devices that lack it.

Presets check it when a fleet is configured (`ballast.policy.presets.preset_of`), before anything is
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.settings import DeviceSettings


@dataclass(frozen=True, slots=True)
class Requirements:
    """Abilities that a policy requires of every device."""

    rotation: bool = False
    """Layers of weights can rotate."""
    in_place: bool = False
    """Passes read all weights in host memory: models take pages for KV alone."""
    kv_staging: bool = False
    """KV blocks of running requests can be staged on the host: passes bring them layer by layer."""
    following: bool = False
    """Models can be activated on and removed from the device as the load changes."""

    def refusal(self, device: DeviceSettings) -> str | None:
        """Return why a device does not meet the requirements, or None."""
        if self.rotation and not device.rotates:
            return "its layers of weights must rotate, which those spread over ranks cannot so far"
        if self.in_place and device.tensor_parallel > 1:
            return "weights must be read in host memory, which devices of one rank can so far"
        if self.kv_staging and device.tensor_parallel > 1:
            return "KV blocks must be staged on the host, which devices of one rank can so far"
        if self.following and device.tensor_parallel > 1:
            return "models cannot follow the load to devices that share them over ranks"
        return None
