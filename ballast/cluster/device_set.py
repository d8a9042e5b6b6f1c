"""Hold the devices of one server, their combined state, and which of them serve which model.

Used by the controller's parts to look up devices and by the server's routes for state and metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ballast.cluster.combined_report import combined
from ballast.cluster.device import RemoteDevice
from ballast.control.device_observer import DeviceObserver
from ballast.control.routed_devices import RoutedDevices
from ballast.core.capability import Capability
from ballast.core.command import Add, Remove
from ballast.core.fleet_state import Command
from ballast.core.report import DeviceReport
from ballast.policy.base import FleetPolicy
from ballast.policy.presets import preset_of

DECISIONS_KEPT = 2000


class DeviceSet(RoutedDevices[RemoteDevice], DeviceObserver[RemoteDevice]):
    """The devices by name, in the fleet's order, and the fleet that they serve."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: list[DeviceReport] = []
        self._combined: DeviceReport | None = None
        """The sum of `_reports`."""
        self.unreadable: Mapping[str, str] = {}
        """Models that the server itself could not take in, with the reason: their tokenizer could
        not be loaded, or a fleet file that was read again names them and no device could."""
        self.decisions: deque[tuple[float, dict[str, Any]]] = deque(maxlen=DECISIONS_KEPT)
        """Recent policy decisions of all devices, oldest first, each with its time on the event
        loop's clock."""

    # -- what they have in all --------------------------------------------------------------------

    @property
    def failed(self) -> dict[str, str]:
        """Models of the fleet that no device could load, or whose tokenizer could not be loaded,
        with the reason."""
        found = {n: why for d in self._devices.values() for n, why in d.failed.items()}
        served = {s.name for base in self.specs.values() for s in base.served}
        return {**self.unreadable, **{n: why for n, why in found.items() if n not in served}}

    @property
    def set_aside(self) -> dict[str, str]:
        """Models and adapters that serve, but refuse requests on all of their devices since their
        last ones failed, with the reason."""
        models = () if self.report is None else self.report.models
        return {name: why for m in models for name, why in m.set_aside.items()}

    @property
    def report(self) -> DeviceReport | None:
        """Sum of the devices' last reports; None before the first one."""
        reports = [d.report for d in self._devices.values() if d.report is not None]
        if not reports:
            return None
        if [*map(id, reports)] != [*map(id, self._reports)]:
            self._reports, self._combined = reports, combined(reports)
        return self._combined

    @cached_property
    def fleet_policy(self) -> FleetPolicy:  # type: ignore[override]
        """The fleet part of the preset, which never changes while a server runs."""
        return preset_of(self.fleet).fleet

    @property
    def lending(self) -> tuple[Capability, ...]:
        """Pairs of devices, each with whether the first can lend pages to the second, by their
        workers' reports."""
        reaches = {name: d.reach for name, d in self._devices.items()}
        return self.fleet.lending(reaches, {name: d.host for name, d in self._devices.items()})

    def lending_objection(self, lender: str, borrower: str) -> str | None:
        """Return why a device can never lend to another; None if it can."""
        ways = {(c.lender, c.borrower): c for c in self.lending}
        way = ways.get((lender, borrower))
        if way is None:
            return f"there is no lending from {lender!r} to {borrower!r}"
        return None if way.means else f"{lender} cannot lend to {borrower}: {way.why}"

    @property
    def open_requests(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return sum(len(d.requests) for d in self._devices.values())

    @property
    def restarts(self) -> int:
        """Workers that were started in place of one that died."""
        return sum(d.restarts for d in self._devices.values())

    @property
    def missing(self) -> dict[str, str]:
        """Devices without a worker that serves, with the reason, but for those on standby."""
        devices = self._devices.items()
        return {name: d.down for name, d in devices if d.down is not None and not d.stands_by}

    @property
    def down(self) -> str | None:
        """Why no device serves; None if one does."""
        missing = self.missing
        if any(d.down is None for d in self._devices.values()):
            return None
        return next(iter(missing.values()), "the worker starts")

    @property
    def lost(self) -> str | None:
        """Why requests fail instead of waiting for a worker; None unless all devices are lost."""
        reasons = [d.lost for d in self._devices.values() if not d.stands_by]
        return reasons[0] if reasons and None not in reasons else None

    @property
    def replacing(self) -> bool:
        """Whether a worker is about to take the place of one that died."""
        down = (d for d in self._devices.values() if d.down is not None and d.lost is None)
        return any(not d.stands_by for d in down)

    # -- where models are -------------------------------------------------------------------------

    def homes(self, model: str) -> list[str]:
        """Return the names of a model's assigned devices, without those that it is leaving."""
        return [n for n in self.assigned(model) if model not in self._devices[n].leaving]

    # -- changes of the fleet ---------------------------------------------------------------------

    def set_homes(self, model: str, devices: Sequence[str]) -> None:
        """Pin a model to `devices`, as if the fleet file named them."""
        models = (
            replace(m, devices=tuple(devices)) if m.name == model else m for m in self.fleet.models
        )
        self.fleet = replace(self.fleet, models=tuple(models))

    def set_aliases(self, aliases: Mapping[str, tuple[str, ...]]) -> None:
        """Replace the aliases of all models and adapters. `aliases`: by own name; models that are
        missing there have none."""
        models = (
            replace(
                m,
                aliases=aliases.get(m.name, ()),
                adapters=tuple(replace(a, aliases=aliases.get(a.name, ())) for a in m.adapters),
            )
            for m in self.fleet.models
        )
        self.fleet = replace(self.fleet, models=tuple(models))

    def command_done(self, device: RemoteDevice, command: Command) -> None:
        """Apply a command that a device has carried out to the fleet's settings."""
        if isinstance(command, Remove) and self.assigned(command.model):
            return
        if isinstance(command, Add) and command.settings in self.fleet.models:
            return  # on one more device
        left = self.fleet.own_names
        self.fleet = command.applied(self.fleet)
        left -= self.fleet.own_names
        self.keep_unreadable(self.unreadable.keys() - left)

    def keep_unreadable(self, names: Collection[str]) -> None:
        """Forget why other models than `names` could not be taken in."""
        self.unreadable = {n: why for n, why in self.unreadable.items() if n in names}

    def decision_made(self, device: RemoteDevice, moment: float, decision: dict[str, Any]) -> None:
        """Append a device's policy decision to `decisions`."""
        named = {**decision, "device": device.name} if len(self) > 1 else decision
        self.decisions.append((moment, named))
