"""The parts that serve one fleet on its devices, and their start and end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.fleet_commands import FleetCommands
from ballast.cluster.fleet_policy_runner import FleetPolicyRunner
from ballast.cluster.lending.lending_pairs import LendingPairs
from ballast.cluster.migrations import Migrations
from ballast.cluster.placing import homes_of, part_of
from ballast.cluster.relocation import Relocation
from ballast.cluster.request_router import RequestRouter
from ballast.cluster.suspicion import Suspicions
from ballast.cluster.worker.spare_worker import SpareWorker
from ballast.cluster.worker.worker_link import WorkerLink
from ballast.core.settings import FleetSettings, ServerSettings


class Controller:
    """Composes the devices of one server with what routes requests to them and changes them.

    Nothing calls back through it: the parts that follow the devices observe them themselves.
    """

    def __init__(self, make_worker: Callable[[], WorkerLink]) -> None:
        self._make_worker = make_worker
        self._spare: SpareWorker[WorkerLink] = SpareWorker(make_worker)
        self._suspicions = Suspicions()
        self.devices = DeviceSet()
        """The devices, their fleet, and what they report."""
        self.router = RequestRouter(self.devices)
        """Where requests are submitted."""
        self._lending_pairs = LendingPairs(self.devices)
        self._migrations = Migrations()
        self.relocation = Relocation(self.devices, self.router, self._migrations)
        """What moves running requests between devices."""
        self.commands = FleetCommands(
            self.devices, self.router, self.relocation, self._lending_pairs
        )
        """What carries out operators' commands."""
        self._policy_task: asyncio.Task[None] | None = None

    async def start(self, fleet: FleetSettings) -> None:
        """Start all devices; returns when they serve. Raises Unavailable if one cannot, and
        ConfigError where there is no place for a model."""
        self.devices.fleet = fleet
        homes = await asyncio.to_thread(homes_of, fleet)
        cores = len(os.sched_getaffinity(0))
        # What a dead worker lent or borrowed is settled before its requests go on elsewhere.
        observers = (
            self._lending_pairs,
            self._migrations,
            self.router,
            self.relocation,
            self.devices,
        )
        starting = []
        for name in fleet.devices:
            device = RemoteDevice(name, self._make_worker, self._spare, self._suspicions, observers)
            self.devices.add(device)
            models = {model for model, at in homes.items() if name in at}
            starting.append(
                asyncio.ensure_future(device.start(part_of(fleet, name, models, cores)))
            )
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        if fleet.server.spare_worker:
            await self._spare.prepare()
        policy = self.devices.fleet_policy
        if policy.moves and fleet.others:
            runner = FleetPolicyRunner(self.devices, self.commands, self.relocation, policy)
            self._policy_task = asyncio.create_task(runner.run())

    def configure(self, server: ServerSettings) -> None:
        """Use other limits of the server; the next workers are watched by the new ones."""
        self.devices.fleet = replace(self.devices.fleet, server=server)
        for device in self.devices.values():
            device.fleet = replace(device.fleet, server=server)

    async def close(self, patience: float) -> None:
        """End the workers: what is open is finished within `patience` seconds, or fails."""
        if self._policy_task is not None:
            self._policy_task.cancel()
            await asyncio.wait({self._policy_task})
        self.relocation.cancel()
        await asyncio.gather(*(d.close(patience) for d in self.devices.values()))
        await self._spare.close()
