"""Run the fleet policy in the server: place models on further devices and withdraw them.

Started by the controller for presets whose fleet policy moves models, on fleets of several devices.
Never moves a model whose devices the operator has named.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from ballast.cluster.awaited_moves import Moves, move_requests
from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.fleet_book import FleetBook
from ballast.cluster.fleet_commands import FleetCommands
from ballast.cluster.lending.awaited_leases import AwaitedLeases
from ballast.cluster.placing import need_of
from ballast.control.device_leases import command_of
from ballast.control.lease_events import OrderEnded
from ballast.core.actions import ActivateCommand
from ballast.core.command import Remove
from ballast.core.errors import Unavailable
from ballast.core.fleet import (
    FleetAction,
    LendingAction,
    Need,
    Place,
    PlacementAction,
    Room,
)
from ballast.policy.base import FleetPolicy

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Interval of looking whether a model's last request on a device has ended."""
LEAVING_SECONDS = 30.0
"""Time for a model without open requests to leave a device."""


class FleetPolicyRunner:
    """Calls the fleet policy when it is due and carries out its actions; `run` is its only task.

    An action is refused if the epoch has changed since it was decided: an operator's command has
    then changed which devices serve which models.
    """

    def __init__(
        self,
        devices: DeviceSet,
        commands: FleetCommands,
        migrations: Moves,
        policy: FleetPolicy,
        leases: AwaitedLeases,
    ) -> None:
        rooms = [Room(d.name, d.fleet.device.budget_bytes) for d in devices.values()]
        self._devices = devices
        self._commands = commands
        self._migrations = migrations
        self._leases, self._lends = leases, policy.lends
        self._book = FleetBook(self._homes(), self._needs(), rooms, policy)

    async def run(self) -> None:
        """Call the policy and carry out its actions until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._leave()
                if self._book.wake_at is not None and clock() >= self._book.wake_at:
                    await self.decide(clock())
            except Exception:  # requests are answered wherever models are
                log.exception("the placement is not followed for now")
            due = POLL_SECONDS if self._book.wake_at is None else self._book.wake_at - clock()
            await asyncio.sleep(min(POLL_SECONDS, max(0.01, due)))

    async def decide(self, now: float) -> None:
        """Call the policy once, and carry out its actions."""
        self._book.follow(self._homes(), self._needs())
        epoch = self._book.epoch
        devices = [d for d in self._devices.values() if d.down is None and not d.cordoned]
        reports = {d.name: d.report for d in devices if d.report is not None}
        pairs = self._pairs() if self._book.policy.lends else ()
        for action in self._book.decide(now, reports, self._leases.standing, pairs):
            if isinstance(action, LendingAction):
                self._order_lending(now, action, epoch)
                continue
            async with self._commands.changing:
                refused = await self._do(action, epoch)
            self._record(now, action, epoch, refused)
            if refused is None:
                self._book.settle(action)
                epoch += 1

    def _homes(self) -> dict[str, list[str]]:
        """Return the devices that accept requests, by model; without models whose devices the
        operator has named."""
        named = {m.name for m in self._devices.fleet.models if m.devices}
        return {
            model: [d.name for d in self._devices.values() if d.takes(model)]
            for model in self._devices.specs
            if model not in named
        }

    def _needs(self) -> list[Need]:
        """Return the memory that models need of a device."""
        devices = [device for device, _ in self._devices.fleet.devices.values()]
        # Where operators have placed a model, pages can still be lent for it.
        models = self._devices.specs if self._lends else self._homes()
        return [need_of(self._devices.specs[model], devices, {}) for model in models]

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the devices that can lend to each other, and whose lending is up to the policy."""
        leases, names = self._leases, list(self._devices)
        able = [(a, b) for a in names for b in names if a != b and leases.can_lend(a, b)]
        return [pair for pair in able if not leases.reserved(*pair)]

    def _order_lending(self, now: float, action: LendingAction, epoch: int) -> None:
        """Order what the policy lends or recalls; how it ended is recorded then."""

        def ended(order: OrderEnded) -> None:
            self._record(now, action, epoch, order.refused)

        self._leases.order(action.lender, command_of(action), ended)

    async def _do(self, action: PlacementAction, epoch: int) -> str | None:
        """Carry out an action; return the reason if it was refused, else None."""
        self._book.follow(self._homes(), self._needs())
        if epoch != self._book.epoch:
            return f"it was decided in epoch {epoch}, and this is {self._book.epoch}"
        objection = self._book.objection(action)
        if objection is not None:
            return objection
        device = self._devices[action.device]
        if not isinstance(action, Place):
            device.leaving.add(action.model)
            return None
        settings = next(m for m in self._devices.fleet.models if m.name == action.model)
        try:
            outcome = await device.join(settings)
            if outcome.code is None and action.activate:
                await device.command(ActivateCommand(action.model, action.why))
        except Unavailable as error:
            return str(error)
        return None if outcome.code is None else outcome.reason

    async def _leave(self) -> None:
        """Remove leaving models from their devices. Running requests move to other devices with
        their KV; those that cannot move end where they are, and the model leaves after them."""
        async with self._commands.changing:
            for device in self._devices.values():
                for model in sorted(device.leaving & device.specs.keys()):
                    others = [d for d in self._devices.values() if d is not device]
                    if not any(d.takes(model) and d.lost is None for d in others):
                        device.leaving.discard(model)  # no other device can serve it by now
                        continue
                    await move_requests(self._migrations, device, model)
                    here = device.specs.get(model)
                    if here and device.down is None and not device.requests.count(here):
                        await self._remove(device, model)

    async def _remove(self, device: RemoteDevice, model: str) -> None:
        outcome = await device.command(Remove(model, LEAVING_SECONDS))
        if outcome.code is not None:
            log.warning("%s stays on %s: %s", model, device.name, outcome.reason)
            device.leaving.discard(model)

    def _record(self, now: float, action: FleetAction, epoch: int, refused: str | None) -> None:
        """Record an action among the decisions, with the reason if it was refused."""
        kind = type(action).__name__
        what = {"action": kind, **asdict(action), "by": "the fleet's policy", "epoch": epoch}
        if refused is not None:
            what["refused"] = refused
        log.info("%s: %s", kind, refused or action.why)
        self._devices.decisions.append((now, what))
