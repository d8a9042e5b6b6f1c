"""Drive orders on the devices of a server, in real time or in tests' virtual time."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Generic

from ballast.control.device_leases import DeviceLeases
from ballast.control.device_observer import DeviceObserver
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.order_driver import OrderDriver
from ballast.control.order_events import OrdersEvent
from ballast.control.orders import POLL_SECONDS
from ballast.control.request_migrations import RequestMigrations
from ballast.control.request_router import RequestRouter, S
from ballast.control.routed_devices import D, RoutedDevices
from ballast.control.timers import Alarm, Timers
from ballast.core.actions import Lend, Recall
from ballast.core.fleet import DeviceCapacity, LeaseView, ModelDemand
from ballast.core.fleet_state import CommandOutcome
from ballast.core.order import MoveRequests

log = logging.getLogger(__name__)


class DeviceOrders(OrderDriver[D], DeviceObserver[D], Generic[D, S]):
    """Carries out orders by way of the server's router, migrations and leases. Implements
    `control.fleet_view.FleetBook`."""

    def __init__(
        self,
        devices: RoutedDevices[D],
        router: RequestRouter[D, S],
        migrations: RequestMigrations[D, S],
        leases: DeviceLeases[D],
        timers: Timers,
    ) -> None:
        super().__init__(devices)
        self._devices, self._router, self._migrations = devices, router, migrations
        self._lent, self._timers = leases, timers
        self._alarm = Alarm(timers, self._look)

    def follow_policy(self) -> None:
        """Call the fleet policy from now on."""
        self.begin_policy(self._devices.fleet_policy, self)
        self._alarm.set(self._machine.due)

    def close(self) -> None:
        """Await nothing any more."""
        self._alarm.set(inf)

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        self._handle(DeviceLostEvent(device.name))

    def _handle(self, event: OrdersEvent) -> None:
        super()._handle(event)
        self._alarm.set(self._machine.due)

    def _look(self) -> None:
        try:
            self._handle(LookEvent())
        except Exception:  # requests are answered wherever models are
            log.exception("the fleet policy is not followed for now")
            self._alarm.set(self._timers.now() + POLL_SECONDS)

    # -- `OrderDriver` ----------------------------------------------------------------------------

    def now(self) -> float:
        return self._timers.now()

    def move_requests(self, step: MoveRequests, ended: Callable[[int], object]) -> None:
        self._migrations.move_requests(step, ended)

    def hand_over(self, device: str, model: str | None) -> int:
        if model is not None:
            return self._router.hand_over_unsent(self._devices[device], model)
        return self._router.hand_over(self._devices[device])

    def order_lease(
        self,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object],
        by_operator: bool,
    ) -> None:
        self._lent.order(lender, command, ended, by_operator=by_operator)

    # -- `FleetBook` ------------------------------------------------------------------------------

    @abstractmethod
    def needs(self) -> Sequence[ModelDemand]: ...

    def rooms(self) -> Sequence[DeviceCapacity]:
        return [DeviceCapacity(d.name, d.fleet.device.budget_bytes) for d in self._devices.values()]

    def network(self) -> float:
        return inf

    def leases(self) -> Sequence[LeaseView]:
        return self._lent.pairs.standing

    def pairs(self) -> Sequence[tuple[str, str]]:
        lends = self._devices.fleet_policy.lends
        return self._lent.pairs.free_pairs(self._devices) if lends else ()
