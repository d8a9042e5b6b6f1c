"""Define what the controller knows of its devices: the models that each serves, and its requests.

One record in both worlds: the server's (`control.device_record`) and the simulator's
(`sim.fleet_device`) inherit it. Orders (`core.order`) read the fleet and change whether its devices
take requests; only the drivers of `control.orders` send commands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TypeVar

from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import FleetSettings, ModelSettings

OPERATOR, POLICY = "operator", "policy"
"""Who orders commands: an operator, or the fleet policy."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How an order, or a command to one device, ended."""

    code: str | None = None
    """None: it was done. Else `refused` (the device's state does not allow it), `invalid` (the
    command itself is wrong), `unavailable` (the device ends) or `broken` (an unexpected error)."""
    reason: str = ""
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    """The models that the device serves now, by name."""
    failed: dict[str, str] = field(default_factory=dict)
    """Adapters of an added model that cannot be served, with the reason."""
    released: int = 0
    """Bytes that `ReleaseMemory` has given back to the machine."""


class Command:
    """Base class of the commands to one device (`core.command`), which are frozen dataclasses."""

    __slots__ = ()

    @property
    def verb(self) -> str:
        """What it does, in a word for messages."""
        return type(self).__name__.removesuffix("Command").lower()

    def refusal(self, fleet: FleetSettings, served: Collection[str]) -> str | None:
        """Return why it cannot be carried out, judged by the fleet's settings and the models that
        are served; None: the devices decide."""
        return None

    def undoing(self, fleet: FleetSettings) -> Command | None:
        """Return the command that restores `fleet` after this one; None if there is none."""
        return None

    def applied(self, fleet: FleetSettings) -> FleetSettings:
        """Return the settings with which the next worker is started after this command."""
        return fleet


class FleetDevice(ABC):
    """One device: the models that it serves, and whether it takes requests."""

    fleet: FleetSettings
    """Settings with which its workers are started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.specs = {}
        self.leaving: set[str] = set()
        """Models that it serves until their open requests have ended."""
        self.cordoned = False
        """Whether an operator has drained it: it gets no new requests."""
        self.down: str | None = "the worker starts"
        """Why no worker serves; None if one does."""
        self.lost: str | None = None
        """Why requests fail instead of waiting for the next worker; None if they wait."""

    @abstractmethod
    def order(
        self,
        command: Command,
        answered: Callable[[CommandOutcome], object],
        by: str = OPERATOR,
    ) -> None:
        """Have the worker carry out a command; `answered` is called with the outcome, which is
        `unavailable`, or never comes, if the worker dies before. `by`: who ordered it, for the
        story: `operator` or `policy`."""

    @abstractmethod
    def last_report(self) -> DeviceReport | None:
        """Return the device's last report; None before the first one."""

    @abstractmethod
    def count_open(self, base: ModelSpec) -> int:
        """Return the number of a model's open requests here."""

    @property
    def specs(self) -> Mapping[str, ModelSpec]:
        """The models that it serves, by name."""
        return self._specs

    @specs.setter
    def specs(self, specs: Mapping[str, ModelSpec]) -> None:
        self._specs = specs
        self._queues = {s.name: (s, base) for base in specs.values() for s in base.served}

    def base_of(self, name: str) -> ModelSpec | None:
        """Return the model that runs requests for `name`, a model or adapter; None: unknown."""
        found = self._queues.get(name)
        return None if found is None else found[1]

    def serves(self, name: str) -> bool:
        """Return whether it serves `name`, a model or an adapter of one."""
        return name in self._queues

    def takes(self, name: str) -> bool:
        """Return whether it accepts new requests for a model, or an adapter of one."""
        base = self.base_of(name)
        return base is not None and base.name not in self.leaving and not self.cordoned

    def still_serves(self, model: str) -> bool:
        """Return whether it serves a model that is leaving it."""
        return model in self.leaving and model in self._specs

    @property
    def filled(self) -> float:
        """Its models' weights, as a part of its budget."""
        weights = sum(sum(spec.segment_bytes) for spec in self._specs.values())
        return weights / self.fleet.device.budget_bytes


D = TypeVar("D", bound=FleetDevice)


class FleetState(Mapping[str, D]):
    """The devices by name, in the fleet's order, as of now."""

    fleet: FleetSettings
    """Settings of all models and devices; set when they are known."""

    def __init__(self) -> None:
        self._devices: dict[str, D] = {}

    def __getitem__(self, name: str) -> D:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def values(self) -> ValuesView[D]:
        return self._devices.values()

    def items(self) -> ItemsView[str, D]:
        return self._devices.items()

    def add(self, device: D) -> None:
        """Append a device."""
        self._devices[device.name] = device

    @property
    def specs(self) -> Mapping[str, ModelSpec]:
        """Models that some device serves, by name, in the fleet's order."""
        devices = list(self._devices.values())
        found = {name: spec for d in reversed(devices) for name, spec in d.specs.items()}
        return {m.name: found[m.name] for m in self.fleet.models if m.name in found}

    @property
    def able(self) -> dict[str, D]:
        """The devices that serve and are not drained, by name."""
        return {n: d for n, d in self._devices.items() if d.down is None and not d.cordoned}

    def settings_of(self, model: str) -> ModelSettings | None:
        """Return a model's settings; None if the fleet has no such model."""
        return next((m for m in self.fleet.models if m.name == model), None)

    def serving(self, model: str) -> list[str]:
        """Return the devices that serve a model or adapter, also those that it is leaving."""
        return [name for name, d in self._devices.items() if d.serves(model)]

    def taking(self, model: str) -> list[str]:
        """Return the devices that accept new requests of a model or adapter."""
        return [n for n, d in self._devices.items() if d.takes(model) and d.lost is None]

    def assigned(self, model: str) -> list[str]:
        """Return the devices whose settings include a model, whether or not they could load it."""
        devices = self._devices.items()
        return [n for n, d in devices if any(m.name == model for m in d.fleet.models)]

    def placements(self) -> dict[str, list[str]]:
        """Return the devices that accept requests, by model; without models whose devices operators
        have named."""
        found: dict[str, list[str]] = {}
        for name, device in self._devices.items():
            for model in device.specs:
                at = found.setdefault(model, [])
                if device.takes(model) and device.lost is None:
                    at.append(name)
        return {
            m.name: found[m.name] for m in self.fleet.models if m.name in found and not m.devices
        }

    def routes(self, model: str) -> list[D]:
        """Return the devices that accept requests of a model or adapter; else those that serve it;
        else all devices, which report why they do not."""
        devices = list(self._devices.values())
        if len(devices) == 1:
            return devices
        here = [d for d in devices if d.serves(model)]
        return [d for d in here if d.takes(model)] or here or devices

    def others(self, device: FleetDevice, model: str) -> list[D]:
        """Return the other devices to which requests of a model can be sent now."""
        return [d for d in self.routes(model) if d is not device and d.down is None]
