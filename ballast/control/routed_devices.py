"""Hold a fleet's devices by name, and find those to which requests of a model can be sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from ballast.control.device_record import DeviceRecord
from ballast.core.command import Add
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.policy.base import FleetPolicy

D = TypeVar("D", bound=DeviceRecord)


class RoutedDevices(Mapping[str, D]):
    """The devices by name, in the fleet's order."""

    fleet: FleetSettings
    """Settings of all models and devices; set when they are known."""
    fleet_policy: FleetPolicy
    """The fleet part of the preset, which never changes while a server runs."""

    def __init__(self) -> None:
        self._devices: dict[str, D] = {}

    def __getitem__(self, name: str) -> D:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def add(self, device: D) -> None:
        """Append a device."""
        self._devices[device.name] = device

    @property
    def specs(self) -> Mapping[str, ModelSpec]:
        """Models that some device serves, by name, in the fleet's order."""
        devices = list(self._devices.values())
        found = {name: spec for d in reversed(devices) for name, spec in d.specs.items()}
        return {m.name: found[m.name] for m in self.fleet.models if m.name in found}

    def addition(self, model: str) -> Add:
        """Return the command that has a device serve a model of the fleet."""
        return Add(next(m for m in self.fleet.models if m.name == model))

    def assigned(self, model: str) -> list[D]:
        """Return the devices whose settings include a model, whether or not they could load it."""
        return [d for d in self._devices.values() if any(m.name == model for m in d.fleet.models)]

    def full(self, base: ModelSpec) -> bool:
        """Return whether all devices of a model would refuse another request, by their reports."""
        return all(device.full(base) for device in self.serving(base.name))

    def serving(self, model: str) -> list[D]:
        """Return the devices that accept requests of a model or adapter; else those that serve it;
        else all devices, which report why they do not."""
        devices = list(self._devices.values())
        if len(devices) == 1:
            return devices
        here = [d for d in devices if d.serves(model)]
        return [d for d in here if d.takes(model)] or here or devices

    def others(self, device: DeviceRecord, model: str) -> list[D]:
        """Return the other devices to which requests of a model can be sent now."""
        return [d for d in self.serving(model) if d is not device and d.down is None]
