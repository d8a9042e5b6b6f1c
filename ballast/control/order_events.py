"""Define what goes into the state machine of orders and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.fleet import FleetAction
from ballast.core.fleet_state import CommandOutcome
from ballast.core.order import Order, Step


@dataclass(frozen=True, slots=True)
class OrderEvent:
    """An operator orders something; `OrderDone` follows."""

    number: int
    """Number of the order, unique; `OrderDone` has it too."""
    order: Order
    device: str | None = None
    """The only device to carry it out; None: all that it concerns."""


@dataclass(frozen=True, slots=True)
class StepAnsweredEvent:
    """A step of an order has been done; `answer`: as the step's class says."""

    number: int
    answer: object


OrdersEvent = OrderEvent | StepAnsweredEvent | DeviceLostEvent | LookEvent


@dataclass(frozen=True, slots=True)
class DoStep:
    """Do a step of an order; `StepAnsweredEvent` follows, unless the device of it dies."""

    number: int
    step: Step
    by_operator: bool


@dataclass(frozen=True, slots=True)
class OrderDone:
    """An operator's order has ended."""

    number: int
    outcome: CommandOutcome


@dataclass(frozen=True, slots=True)
class ActionDone:
    """An action of the fleet policy has ended."""

    decided_at: float
    action: FleetAction
    epoch: int
    """Number of changes of which model is where, when it was decided."""
    refused: str | None
    """None: it was done."""


OrdersInstruction = DoStep | OrderDone | ActionDone
