"""Carry out orders on the devices of a server: the driver of `control.orders`.

Turns the machine's steps into commands to devices, migrations and orders to lend. Implements
`order_events.PolicyState`.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf
from typing import Generic

from ballast.control.device_leases import DeviceLeases
from ballast.control.device_observer import DeviceObserver
from ballast.control.lease_events import OrderEnded
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.order_events import (
    ActionDone,
    DoStep,
    OrderDone,
    OrderEvent,
    OrdersEvent,
    OrdersInstruction,
    StepAnsweredEvent,
)
from ballast.control.orders import POLL_SECONDS, Orders
from ballast.control.request_migrations import RequestMigrations
from ballast.control.request_router import RequestRouter, S
from ballast.control.routed_devices import D, RoutedDevices
from ballast.control.timers import Alarm, Timers
from ballast.core.actions import Lend, Recall
from ballast.core.command import DeviceCommand
from ballast.core.fleet import LeaseView, Need, Room
from ballast.core.order import (
    ChooseDevices,
    CommandOutcome,
    HandOver,
    MoveRequests,
    Order,
    OrderLease,
    SendCommand,
    ServeModel,
    SetCordoned,
    SetLeaving,
)
from ballast.core.report import DeviceReport
from ballast.core.settings import ModelSettings

log = logging.getLogger(__name__)


class DeviceOrders(DeviceObserver[D], ABC, Generic[D, S]):
    """Carries out operators' orders, and runs the fleet policy once it has begun."""

    def __init__(
        self,
        devices: RoutedDevices[D],
        router: RequestRouter[D, S],
        migrations: RequestMigrations[D, S],
        leases: DeviceLeases[D],
        timers: Timers,
    ) -> None:
        self._devices, self._router, self._migrations = devices, router, migrations
        self._lent, self._timers = leases, timers
        self._machine = Orders(self)
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[CommandOutcome], object]] = {}
        """By order, what to call when it has ended."""
        self._undone: deque[OrdersInstruction] = deque()
        """Instructions that have not been carried out; an answer may come while one is."""
        self._doing = False
        self._alarm = Alarm(timers, self._look)

    def order(
        self, order: Order, ended: Callable[[CommandOutcome], object], device: str | None = None
    ) -> None:
        """Carry out an operator's order; `ended` is called with its outcome."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(OrderEvent(number, order, device))

    def begin_policy(self) -> None:
        """Call the fleet policy from now on."""
        self._machine.begin(self._devices.fleet_policy)
        self._alarm.set(self._machine.due)

    @property
    def busy(self) -> bool:
        """As of `Orders`."""
        return self._machine.busy

    def close(self) -> None:
        """Await nothing any more."""
        self._alarm.set(inf)

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        self._handle(DeviceLostEvent(device.name))

    @abstractmethod
    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        """Choose devices for a model that joins the fleet; `chosen` is called with their names."""

    @abstractmethod
    def needs(self) -> Sequence[Need]:
        """As of `PolicyState`."""

    @abstractmethod
    def action_done(self, done: ActionDone) -> None:
        """An action of the fleet policy has ended."""

    # -- `PolicyState` ----------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        return list(self._devices)

    @property
    def rooms(self) -> Sequence[Room]:
        return [Room(d.name, d.fleet.device.budget_bytes) for d in self._devices.values()]

    def down(self, device: str) -> str | None:
        return self._devices[device].down

    def serving(self, model: str) -> Sequence[str]:
        return [d.name for d in self._devices.values() if d.serves(model)]

    def taking(self, model: str) -> Sequence[str]:
        return [d.name for d in self._devices.values() if d.takes(model) and d.lost is None]

    def assigned(self, model: str) -> Sequence[str]:
        return [d.name for d in self._devices.assigned(model)]

    def models_on(self, device: str) -> Sequence[str]:
        return list(self._devices[device].specs)

    def leaving(self, device: str) -> Collection[str]:
        return self._devices[device].leaving & self._devices[device].specs.keys()

    def cordoned(self, device: str) -> bool:
        return self._devices[device].cordoned

    def filled(self, device: str) -> float:
        weights = sum(sum(spec.segment_bytes) for spec in self._devices[device].specs.values())
        return weights / self._devices[device].fleet.device.budget_bytes

    def open_requests(self, device: str, model: str) -> int:
        base = self._devices[device].specs.get(model)
        return 0 if base is None else self._devices[device].requests.count(base)

    def known(self, model: str) -> bool:
        return any(m.name == model for m in self._devices.fleet.models)

    def objection(self, order: Order) -> str | None:
        return order.refusal(self._devices.fleet, self._devices.specs)

    def undoing(self, device: str, order: Order) -> Order | None:
        return order.undoing(self._devices[device].fleet)

    def homes(self) -> Mapping[str, Sequence[str]]:
        fixed = {m.name for m in self._devices.fleet.models if m.devices}
        return {m: self.taking(m) for m in self._devices.specs if m not in fixed}

    def reports(self) -> Mapping[str, DeviceReport]:
        able = [d for d in self._devices.values() if d.down is None and not d.cordoned]
        return {d.name: d.report for d in able if d.report is not None}

    def leases(self) -> Sequence[LeaseView]:
        return self._lent.standing

    def pairs(self) -> Sequence[tuple[str, str]]:
        if not self._devices.fleet_policy.lends:
            return ()
        able = [(a, b) for a in self.names for b in self.names if self._lent.can_lend(a, b)]
        return [pair for pair in able if not self._lent.reserved(*pair)]

    # -- instructions -----------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._handle(LookEvent())
        except Exception:  # requests are answered wherever models are
            log.exception("the fleet policy is not followed for now")
            self._alarm.set(self._timers.now() + POLL_SECONDS)

    def _handle(self, event: OrdersEvent) -> None:
        self._undone += self._machine.handle(self._timers.now(), event)
        if self._doing:
            return
        self._doing = True
        try:
            while self._undone:
                self._do(self._undone.popleft())
        finally:
            self._doing = False
        self._alarm.set(self._machine.due)

    def _do(self, instruction: OrdersInstruction) -> None:
        match instruction:
            case DoStep(number):
                self._step(instruction, partial(self._answered, number))
            case OrderDone(number, outcome):
                self._ended.pop(number)(outcome)
            case ActionDone():
                self.action_done(instruction)

    def _answered(self, number: int, answer: object) -> None:
        self._handle(StepAnsweredEvent(number, answer))

    def _step(self, instruction: DoStep, answered: Callable[[object], object]) -> None:
        match instruction.step:
            case SendCommand(device, command, awaited, undoes):
                ended = answered if awaited else lambda outcome: None
                if undoes:
                    ended = partial(_warn, device, answered)
                self._devices[device].order(_command(command), ended)
                if not awaited:
                    answered(None)
            case ServeModel(device, model):
                self._devices[device].order(self._devices.addition(model), answered)
            case ChooseDevices(settings):
                self.choose_devices(settings, answered)
            case MoveRequests(device, model, bring, target):
                self._migrations.move_requests(
                    self._devices[device], model, answered, bring=bring, target=target
                )
            case HandOver(device):
                answered(self._router.hand_over(self._devices[device]))
            case SetLeaving(device, model, leaving):
                models = self._devices[device].leaving
                (models.add if leaving else models.discard)(model)
                answered(None)
            case SetCordoned(device, cordoned):
                self._devices[device].cordoned = cordoned
                answered(None)
            case OrderLease(lender, command):
                assert isinstance(command, Lend | Recall), "nothing else is about pages"
                by_operator = instruction.by_operator
                end = partial(_end_lease, answered)
                self._lent.order(lender, command, end, by_operator=by_operator)


def _command(order: Order) -> DeviceCommand:
    assert isinstance(order, DeviceCommand), "devices carry out nothing else"
    return order


def _warn(device: str, answered: Callable[[object], object], outcome: CommandOutcome) -> None:
    if outcome.code is not None:
        why = outcome.reason
        log.error("%s: what another device did not do stays done: %s", device, why)
    answered(outcome)


def _end_lease(answered: Callable[[object], object], ended: OrderEnded) -> None:
    code = None if ended.refused is None else "unavailable" if ended.lost else "refused"
    answered(CommandOutcome(code, ended.refused or ""))
