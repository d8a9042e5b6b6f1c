"""Define an order to a fleet: its whole life in one class, as steps between which it waits.

An order is given by an operator or by the fleet policy. Its class says how it begins and what ends
it (`steps`); a command that concerns several devices says as well what refuses it, what undoes it,
and which settings it changes (`core.fleet_state.Command`). `control.orders` runs the steps of many
orders, live and in virtual time.

`steps` is a generator: it yields a `Step`, or several that are done at once, and is sent their
answers. It reads `FleetState`, which is as of now after every answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ballast.core.fleet_state import Command, CommandOutcome, FleetDevice, FleetState
from ballast.core.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Have a device carry out a command; the answer is its `CommandOutcome`."""

    device: str
    command: Command
    awaited: bool = True
    """False: the answer is None, at once."""
    undoes: bool = False
    """Whether it undoes a part of an order of which another part was refused."""


@dataclass(frozen=True, slots=True)
class ChooseDevices:
    """Choose devices for a model that joins the fleet; the answer: their names, or a
    `CommandOutcome` where it fits nowhere."""

    settings: ModelSettings


@dataclass(frozen=True, slots=True)
class MoveRequests:
    """Migrate a model's running requests off a device, with their KV; the answer: how many have
    left. `bring`, `target`: as of `control.migration_events.MigrateEvent`."""

    device: str
    model: str
    bring: bool = False
    target: str | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send the open requests of a device elsewhere without their KV; the answer: how many."""

    device: str
    model: str | None = None
    """The model that leaves it, of which those go that its worker has not got; None: all go."""


@dataclass(frozen=True, slots=True)
class OrderLease:
    """Have a device lend pages or recall them; the answer is a `CommandOutcome`, at the end."""

    lender: str
    command: Command
    """`Lend` or `Recall`."""


Step = SendCommand | ChooseDevices | MoveRequests | HandOver | OrderLease
Steps = Generator[Step | tuple[Step, ...], Any, CommandOutcome]
"""The steps of an order; the generator returns how the order has ended."""
Fleet = FleetState[FleetDevice]
DONE = CommandOutcome()


def refused(why: str) -> CommandOutcome:
    """Return the outcome of an order that the fleet's state does not allow."""
    return CommandOutcome("refused", why)


class Order(ABC):
    """Base class of all orders, which are frozen dataclasses."""

    __slots__ = ()

    exclusive: ClassVar[bool] = False
    """Whether it changes which devices serve which models: of these one is under way at a time."""

    @abstractmethod
    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        """Carry it out, on `device` alone where one is given."""


class ModelOrder(Command, Order):
    """An order about one model, carried out by all devices that it concerns, or by none."""

    __slots__ = ()

    model: str

    def concerned(self, fleet: Fleet) -> Generator[Step, Any, Sequence[str] | CommandOutcome]:
        """Return the devices that have to carry it out, or why there are none."""
        yield from ()  # `Add` has a step here
        return fleet.serving(self.model) or list(fleet)

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        if device is not None:
            if device not in fleet.serving(self.model):
                return refused(f"{self.model} is not on {device!r}")
            outcome: CommandOutcome = yield SendCommand(device, self)
            return outcome
        objection = self.refusal(fleet.fleet, fleet.specs)
        if objection is not None:
            return refused(objection)
        concerned = yield from self.concerned(fleet)
        if isinstance(concerned, CommandOutcome):
            return concerned
        for name in concerned:
            down = fleet[name].down
            if down is not None:
                return CommandOutcome("unavailable", down)
        done: list[tuple[str, Command | None]] = []
        outcome = DONE
        for name in concerned:
            undo = self.undoing(fleet[name].fleet)
            outcome = yield SendCommand(name, self)
            if outcome.code is not None:
                for before, back in done:
                    if back is not None:
                        yield SendCommand(before, back, undoes=True)
                break
            done.append((name, undo))
        return outcome
