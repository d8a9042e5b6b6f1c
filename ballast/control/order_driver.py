"""Drive the machine of orders (`control.orders`) over a fleet's devices, live and in virtual time.

Commands go to the devices' records (`core.fleet_state`), which differ between the two worlds; so
does what moves requests and lends pages, which subclasses provide: `control.device_orders` for the
server, `sim.controller` for the simulator.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, cast

from ballast.control.fleet_view import FleetBook, FleetViews
from ballast.control.order_events import (
    ActionDone,
    DoStep,
    OrderDone,
    OrderEvent,
    OrdersEvent,
    OrdersInstruction,
    StepAnsweredEvent,
)
from ballast.control.orders import Orders
from ballast.core.actions import Lend, Recall
from ballast.core.fleet_state import OPERATOR, POLICY, CommandOutcome, D, FleetState
from ballast.core.order import (
    ChooseDevices,
    Fleet,
    HandOver,
    MoveRequests,
    Order,
    OrderLease,
    SendCommand,
)
from ballast.core.settings import ModelSettings
from ballast.policy.base import FleetPolicy

log = logging.getLogger(__name__)

Answered = Callable[[object], object]


class OrderDriver(ABC, Generic[D]):
    """Carries out operators' orders, and those of the fleet policy once it has begun."""

    def __init__(self, fleet: FleetState[D]) -> None:
        self._fleet = fleet
        self._machine = Orders(cast(Fleet, fleet))
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[CommandOutcome], object]] = {}
        """By order, what to call when it has ended."""
        self._undone: deque[OrdersInstruction] = deque()
        """Instructions that have not been carried out; an answer may come while one is."""
        self._doing = False

    def order(
        self, order: Order, ended: Callable[[CommandOutcome], object], device: str | None = None
    ) -> None:
        """Carry out an operator's order; `ended` is called with its outcome."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(OrderEvent(number, order, device))

    def begin_policy(self, policy: FleetPolicy, book: FleetBook) -> None:
        """Call the fleet policy from now on."""
        self._machine.begin(policy, FleetViews(cast(Fleet, self._fleet), book))

    @property
    def busy(self) -> bool:
        """As of `Orders`."""
        return self._machine.busy

    # -- what differs between the worlds ----------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds."""

    @abstractmethod
    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        """Choose devices for a model that joins the fleet; `chosen` is called with their names."""

    @abstractmethod
    def move_requests(self, step: MoveRequests, ended: Callable[[int], object]) -> None:
        """Do the step; `ended` is called with its answer."""

    @abstractmethod
    def hand_over(self, device: str, model: str | None) -> int:
        """Do the step `HandOver`; returns its answer."""

    @abstractmethod
    def order_lease(
        self,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object],
        by_operator: bool,
    ) -> None:
        """Have a device lend pages or recall them."""

    @abstractmethod
    def action_done(self, done: ActionDone) -> None:
        """An action of the fleet policy has ended."""

    # -- instructions -----------------------------------------------------------------------------

    def _handle(self, event: OrdersEvent) -> None:
        self._undone += self._machine.handle(self.now(), event)
        if self._doing:
            return
        self._doing = True
        try:
            while self._undone:
                self._do(self._undone.popleft())
        finally:
            self._doing = False

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

    def _step(self, instruction: DoStep, answered: Answered) -> None:
        match instruction.step:
            case SendCommand(device, command, awaited, undoes):
                ended = answered if awaited else lambda outcome: None
                if undoes:
                    ended = partial(_warn, device, answered)
                by = OPERATOR if instruction.by_operator else POLICY
                self._fleet[device].order(command, ended, by)
                if not awaited:
                    answered(None)
            case ChooseDevices(settings):
                self.choose_devices(settings, answered)
            case MoveRequests():
                self.move_requests(instruction.step, answered)
            case HandOver(device, model):
                answered(self.hand_over(device, model))
            case OrderLease(lender, command):
                assert isinstance(command, Lend | Recall), "nothing else is about pages"
                self.order_lease(lender, command, answered, instruction.by_operator)


def _warn(device: str, answered: Answered, outcome: CommandOutcome) -> None:
    if outcome.code is not None:
        why = outcome.reason
        log.error("%s: what another device did not do stays done: %s", device, why)
    answered(outcome)
