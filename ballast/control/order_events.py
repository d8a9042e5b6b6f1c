"""Define what goes into the state machine of orders and what comes out, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.fleet import FleetAction, LeaseView, Need, Room
from ballast.core.order import CommandOutcome, FleetState, Order, Step
from ballast.core.report import DeviceReport


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


class PolicyState(FleetState, Protocol):
    """What the machine of orders reads of the fleet, for the fleet policy besides."""

    @property
    def rooms(self) -> Sequence[Room]:
        """The devices with their budgets."""

    def homes(self) -> Mapping[str, Sequence[str]]:
        """Return the devices that accept requests, by model; without models whose devices
        operators have named."""

    def needs(self) -> Sequence[Need]:
        """Return the memory that models need of a device."""

    def reports(self) -> Mapping[str, DeviceReport]:
        """Return the last reports of the devices that serve and are not drained."""

    def leases(self) -> Sequence[LeaseView]:
        """Return all that is lent."""

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Return (lender, borrower) of all that can lend, and whose lending is up to policies."""
