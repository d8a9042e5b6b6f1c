"""Await operators' orders on the server's event loop, and carry out those of the fleet policy.

Used by the controller, for the server's admin API. What an order does is in its class
(`core.command`, `core.fleet_orders`); `control.orders` runs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import inf

from ballast.cluster.device import RemoteDevice, outcome_of
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.output_stream import OutputStream
from ballast.cluster.placing import named, need_of, placed
from ballast.control.device_leases import DeviceLeases
from ballast.control.device_orders import DeviceOrders
from ballast.control.order_events import ActionDone
from ballast.control.request_migrations import RequestMigrations
from ballast.control.request_router import RequestRouter
from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.fleet_orders import LendPages, RecallPages
from ballast.core.fleet_state import CommandOutcome
from ballast.core.model import ModelSpec
from ballast.core.order import Order
from ballast.core.settings import FleetSettings, ModelSettings

log = logging.getLogger(__name__)


class FleetCommands(DeviceOrders[RemoteDevice, OutputStream]):
    """Changes which models devices serve, and which pages they lend. All calls on the event
    loop."""

    def __init__(
        self,
        devices: DeviceSet,
        router: RequestRouter[RemoteDevice, OutputStream],
        migrations: RequestMigrations[RemoteDevice, OutputStream],
        leases: DeviceLeases[RemoteDevice],
    ) -> None:
        super().__init__(devices, router, migrations, leases, LoopTimers())
        self._set = devices
        self._choosing: set[asyncio.Task[None]] = set()
        self._needs: tuple[FleetSettings | None, dict[str, tuple[ModelSpec, ModelDemand]]] = (
            None,
            {},
        )
        """Settings, and by model its specification and what it needs, computed from these."""

    async def execute(self, order: Order, device: str | None = None) -> CommandOutcome:
        """Carry out an operator's order, on `device` alone where it is given; returns its outcome.
        The order goes on if its caller does not wait. Raises Unavailable where a device that it
        needs does not serve, or dies before it has answered."""
        return await outcome_of(lambda ended: self.order(order, ended, device))

    async def lend(self, lender: str, borrower: str, n_bytes: int) -> CommandOutcome:
        """Have a device lend `n_bytes` of free pages, rounded down to whole pages. As `execute`."""
        page = self._page(borrower)
        if lender not in self._devices or page is None:
            return CommandOutcome("refused", f"there is no lending from {lender!r} to {borrower!r}")
        if n_bytes < page:
            return CommandOutcome("invalid", f"{n_bytes} bytes are less than a page")
        return await self.execute(LendPages(lender, borrower, n_bytes // page, "by an operator"))

    async def recall(
        self, lender: str, borrower: str, n_bytes: int | None, seconds: float
    ) -> CommandOutcome:
        """Have a device recall `n_bytes` of the pages that it has lent (None: all). Returns when
        they are back; a borrower that keeps them for longer than `seconds` is killed."""
        page = self._page(lender)
        if page is None:
            return CommandOutcome("refused", f"there is no device {lender!r}")
        pages = None if n_bytes is None else max(1, n_bytes // page)
        why = "by an operator"
        return await self.execute(RecallPages(lender, borrower, pages, seconds, why))

    async def release(self, lender: str, borrower: str) -> CommandOutcome:
        """Leave what a device lends to another to the fleet policy again."""
        if not self._lent.release(lender, borrower):
            why = f"no operator has ordered what {lender} lends to {borrower}"
            return CommandOutcome("refused", why)
        return CommandOutcome()

    def _page(self, device: str) -> int | None:
        found = self._devices.get(device)
        return None if found is None or found.report is None else found.report.page_bytes

    # -- `DeviceOrders` ---------------------------------------------------------------------------

    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        async def choose() -> None:
            fleet = self._set.fleet
            homes = {name: self._set.assigned(name) for name in fleet.own_names}
            try:
                names = named(settings, fleet) or homes.get(settings.name)
                if not names:
                    found = await asyncio.to_thread(placed, [settings], fleet, homes)
                    names = found[settings.name]
            except ConfigError as error:
                chosen(CommandOutcome("invalid", str(error)))
            else:
                chosen(names)

        task = asyncio.ensure_future(choose())
        self._choosing.add(task)
        task.add_done_callback(self._choosing.discard)

    def rooms(self) -> list[DeviceCapacity]:
        return [replace(room, host=self._set[room.device].host) for room in super().rooms()]

    def network(self) -> float:
        hosts = self._set.fleet.hosts
        return inf if hosts is None or hosts.network is None else hosts.network

    def needs(self) -> list[ModelDemand]:
        fleet = self._set.fleet
        if fleet is not self._needs[0]:
            self._needs = fleet, {}
        # Where operators have placed a model, pages can still be lent for it.
        specs = self._set.specs
        models = specs if self._set.fleet_policy.lends else self._set.placements()
        return [self._need(specs[model], fleet) for model in models]

    def _need(self, spec: ModelSpec, fleet: FleetSettings) -> ModelDemand:
        _, needs = self._needs
        found = needs.get(spec.name)
        if found is None or found[0] is not spec:
            devices = [device for device, _ in fleet.devices.values()]
            found = needs[spec.name] = spec, need_of(spec, devices, {})
        return found[1]

    def action_done(self, done: ActionDone) -> None:
        """Record an action among the decisions, with the reason if it was refused."""
        kind = type(done.action).__name__
        what = {"action": kind, **asdict(done.action), "by": "the fleet's policy"}
        what["epoch"] = done.epoch
        if done.refused is not None:
            what["refused"] = done.refused
        log.info("%s: %s", kind, done.refused or done.action.why)
        self._set.decisions.append((done.decided_at, what))
