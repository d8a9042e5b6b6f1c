"""Start the devices of one fleet, and compose the parts that route requests and change the fleet.

Used by the server's process (`server.service`, `server.serve`). The controller holds no state of
its own: devices, routing, commands and lending are in the modules that it composes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from ballast.cluster.device import STANDBY, RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.fleet_commands import FleetCommands
from ballast.cluster.kept_kv import KeptKv
from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.lending.awaited_leases import AwaitedLeases
from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.output_stream import OutputStream
from ballast.cluster.placing import Homes, homes_of, part_of
from ballast.cluster.standby_devices import StandbyDevices
from ballast.cluster.worker.worker_link import WorkerSource
from ballast.control.device_observer import DeviceObserver
from ballast.control.request_migrations import RequestMigrations
from ballast.control.request_router import RequestRouter
from ballast.control.suspicion import Suspicions
from ballast.core.command import Remove
from ballast.core.fleet_orders import Rehome
from ballast.core.fleet_state import Command, CommandOutcome
from ballast.core.settings import FleetSettings, ServerSettings

log = logging.getLogger(__name__)


class SegmentKeeper(Protocol):
    """What keeps segments of models; `SegmentBroker` is one, `HostedWorkers` another."""

    def forget(self, model: str) -> None: ...


class _Leaving(DeviceObserver[RemoteDevice]):
    """Has the broker keep models no longer that have left the fleet."""

    def __init__(self, devices: DeviceSet, broker: SegmentKeeper | None) -> None:
        self._devices, self._broker = devices, broker

    def command_done(self, device: RemoteDevice, command: Command) -> None:
        if self._broker is None or not isinstance(command, Remove):
            return
        if not self._devices.assigned(command.model):
            self._broker.forget(command.model)


class _HostLosses(DeviceObserver[RemoteDevice]):
    """Has models served elsewhere that were on a host that is gone."""

    def __init__(self, commands: FleetCommands) -> None:
        self._commands = commands

    def worker_died(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        if device.worker.in_flight() is None:
            self._commands.order(Rehome(device.name), _log_refusal)


def _log_refusal(outcome: CommandOutcome) -> None:
    if outcome.code is not None:
        log.warning("models of a lost host are not served elsewhere: %s", outcome.reason)


class Controller:
    """Composes one server's devices, request router, leases, migrations and fleet commands.

    These parts observe the devices directly (`DeviceObserver`); none calls back to the controller.
    """

    def __init__(
        self,
        workers: WorkerSource,
        broker: SegmentKeeper | None = None,
        kv_broker: KvBroker | None = None,
    ) -> None:
        """`workers`: of the devices; `broker`: keeps the segments of models that have been loaded,
        until they leave; `kv_broker`: keeps KV in tiers below the devices."""
        self.workers = workers
        """Where the devices' workers come from, and on which hosts they are."""
        self._suspicions = Suspicions()
        self.devices = DeviceSet()
        """The devices, their fleet, and what they report."""
        self.router = RequestRouter(self.devices, OutputStream)
        """Sends requests to devices."""
        self.leases = AwaitedLeases(self.devices, self.devices.lending_objection, LoopTimers())
        """Lends pages between devices."""
        self._leaving = _Leaving(self.devices, broker)
        self.kept_kv = KeptKv(self.devices, kv_broker)
        """KV in tiers below the devices."""
        self.migrations = RequestMigrations(self.devices, self.router, LoopTimers())
        """Moves running requests between devices."""
        self.commands = FleetCommands(self.devices, self.router, self.migrations, self.leases)
        """Carries out operators' orders and those of the fleet policy."""

    def prepare(self, fleet: FleetSettings) -> None:
        """List the devices of a fleet; `start` starts them."""
        self.devices.fleet = fleet
        # What a dead worker lent or borrowed is settled before its requests go on elsewhere.
        observers = (
            self.leases,
            self.migrations,
            self.router,
            self.commands,
            self.devices,
            self._leaving,
            self.kept_kv,
            _HostLosses(self.commands),
            StandbyDevices(fleet.standby, self.devices, self.workers, self.commands),
        )
        for name in fleet.devices:
            device = RemoteDevice(name, self.workers, self._suspicions, observers)
            device.fleet = part_of(fleet, name, (), 1)
            self.devices.add(device)
            device.down = STANDBY if name in fleet.standby else device.down

    async def start(self, fleet: FleetSettings) -> None:
        """Start all devices; returns when they serve. Raises Unavailable if one cannot start, and
        ConfigError where no device has room for a model."""
        self.prepare(fleet)
        await self.start_devices(await asyncio.to_thread(homes_of, fleet))
        await self.note_loaded()

    async def start_devices(self, homes: Homes) -> None:
        """Start all devices, each with the models whose `homes` name it. Raises as `start`."""
        fleet, cores = self.devices.fleet, len(os.sched_getaffinity(0))
        starting = []
        for name, device in self.devices.items():
            models = {model for model, at in homes.items() if name in at}
            part = part_of(fleet, name, models, cores)
            if name in fleet.standby:
                device.stand_by(part)
                continue
            starting.append(asyncio.ensure_future(device.start(part)))
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()

    async def kept_homes(self, fleet: FleetSettings) -> dict[str, list[str]]:
        """Return the devices of models that serve since before this server, where these are not
        pinned to others; what the fleet has no longer is removed. Raises Unavailable."""
        kept = [device for device in self.devices.values() if device.kept]
        await asyncio.gather(*(device.remove_others(fleet) for device in kept))
        homes: dict[str, list[str]] = {}
        for model in fleet.models:
            at = [d.name for d in kept if model.name in d.specs]
            if at and not model.devices:
                homes[model.name] = at
        return homes

    async def note_loaded(self) -> None:
        """Prepare the spare worker and start the fleet policy, once the fleet has been loaded."""
        fleet = self.devices.fleet
        self.kept_kv.fleet_loaded()
        if fleet.server.spare_worker:
            await self.workers.prepare(fleet.server)
        if fleet.others:
            self.commands.follow_policy()

    def configure(self, server: ServerSettings) -> None:
        """Replace the server's settings; their limits apply to workers that are started later."""
        self.kept_kv.configure(self.devices.fleet.server, server)
        self.devices.fleet = replace(self.devices.fleet, server=server)
        for device in self.devices.values():
            device.fleet = replace(device.fleet, server=server)

    def fail_waiting(self) -> bool:
        """Fail the requests of devices that wait for a host, for which nobody can say how long they
        wait; returns whether all devices do."""
        down = (d for d in self.devices.values() if d.down)
        waiting = [d for d in down if d.waits_for_host or d.stands_by]
        for device in waiting:
            device.requests.fail_all("unavailable", "no host has room for its device")
        return len(waiting) == len(self.devices)

    async def close(self, patience: float) -> None:
        """End all workers: open requests finish within `patience` seconds, or fail."""
        self.commands.close()
        self.migrations.close()
        self.leases.close()
        await asyncio.gather(*(d.close(patience) for d in self.devices.values()))
        await self.workers.close()
