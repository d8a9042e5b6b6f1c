"""Define an order to a fleet: its whole life in one class, as steps between which it waits.

An order is given by an operator or by the fleet policy. Its class says what refuses it, how it
begins and what ends it (`steps`), what undoes it (`undoing`), and which settings it changes
(`applied`). `control.orders` runs the steps of many orders, live and in virtual time.

`steps` is a generator: it yields a `Step`, or several that are done at once, and is sent their
answers. It reads `FleetState`, which is as of now after every answer.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, ModelSettings


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How an order, or a command to one device, ended."""

    code: str | None = None
    """None: it was done. Else `refused` (the device's state does not allow it), `invalid` (the
    command itself is wrong), `unavailable` (the device ends) or `broken` (an unexpected error)."""
    reason: str = ""
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    """The models that the device serves now, by name."""
    failed: dict[str, str] = field(default_factory=dict)
    """Adapters of an added model that cannot be served, with the reason."""


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Have a device carry out a command; the answer is its `CommandOutcome`."""

    device: str
    command: Order
    awaited: bool = True
    """False: the answer is None, at once."""
    undoes: bool = False
    """Whether it undoes a part of an order of which another part was refused."""


@dataclass(frozen=True, slots=True)
class ServeModel:
    """Have a device serve a model of the fleet; the answer is a `CommandOutcome`."""

    device: str
    model: str


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


@dataclass(frozen=True, slots=True)
class SetLeaving:
    """Send no new requests of a model to a device, or send them again; the answer is None."""

    device: str
    model: str
    leaving: bool


@dataclass(frozen=True, slots=True)
class SetCordoned:
    """Send no new requests of any model to a device, or send them again; the answer is None."""

    device: str
    cordoned: bool


@dataclass(frozen=True, slots=True)
class OrderLease:
    """Have a device lend pages or recall them; the answer is a `CommandOutcome`, at the end."""

    lender: str
    command: Order
    """`Lend` or `Recall`."""


Step = (
    SendCommand
    | ServeModel
    | ChooseDevices
    | MoveRequests
    | HandOver
    | SetLeaving
    | SetCordoned
    | OrderLease
)
Steps = Generator[Step | tuple[Step, ...], Any, CommandOutcome]
"""The steps of an order; the generator returns how the order has ended."""
DONE = CommandOutcome()


def refused(why: str) -> CommandOutcome:
    """Return the outcome of an order that the fleet's state does not allow."""
    return CommandOutcome("refused", why)


class FleetState(Protocol):
    """What orders read of the fleet, as of now. Devices and models by name."""

    @property
    def names(self) -> Sequence[str]:
        """All devices."""

    def down(self, device: str) -> str | None:
        """Return why no worker serves; None if one does."""

    def serving(self, model: str) -> Sequence[str]:
        """Return the devices that serve a model or adapter, also those that it is leaving."""

    def taking(self, model: str) -> Sequence[str]:
        """Return the devices that accept new requests of a model or adapter."""

    def assigned(self, model: str) -> Sequence[str]:
        """Return the devices whose settings include a model, whether or not they could load it."""

    def models_on(self, device: str) -> Sequence[str]:
        """Return the models that a device serves."""

    def leaving(self, device: str) -> Collection[str]:
        """Return the models that a device serves until their open requests have ended."""

    def cordoned(self, device: str) -> bool:
        """Return whether an operator has drained a device."""

    def filled(self, device: str) -> float:
        """Return the weights that a device serves, as a part of its budget."""

    def open_requests(self, device: str, model: str) -> int:
        """Return the number of a model's open requests at a device."""

    def known(self, model: str) -> bool:
        """Return whether the fleet has a model of that name."""

    def objection(self, order: Order) -> str | None:
        """Return `order.refusal` of the fleet's settings."""

    def undoing(self, device: str, order: Order) -> Order | None:
        """Return `order.undoing` of the settings of one device."""


class Order:
    """Base class of all orders and commands, which are frozen dataclasses."""

    __slots__ = ()

    exclusive: ClassVar[bool] = False
    """Whether it changes which devices serve which models: of these one is under way at a time."""

    @property
    def verb(self) -> str:
        """What it does, in a word for messages."""
        return type(self).__name__.removesuffix("Command").lower()

    def refusal(self, fleet: FleetSettings, served: Collection[str]) -> str | None:
        """Return why it cannot be carried out, judged by the fleet's settings and the models that
        are served; None: the devices decide."""
        return None

    def undoing(self, fleet: FleetSettings) -> Order | None:
        """Return the order that restores `fleet` after this one; None if there is none."""
        return None

    def applied(self, fleet: FleetSettings) -> FleetSettings:
        """Return the settings with which the next worker is started after this order."""
        return fleet

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        """Carry it out, on `device` alone where one is given."""
        raise NotImplementedError


class ModelOrder(Order):
    """An order about one model, carried out by all devices that it concerns, or by none."""

    __slots__ = ()

    model: str

    def concerned(self, fleet: FleetState) -> Generator[Step, Any, Sequence[str] | CommandOutcome]:
        """Return the devices that have to carry it out, or why there are none."""
        yield from ()  # `Add` has a step here
        return fleet.serving(self.model) or fleet.names

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        if device is not None:
            if device not in fleet.serving(self.model):
                return refused(f"{self.model} is not on {device!r}")
            outcome: CommandOutcome = yield SendCommand(device, self)
            return outcome
        objection = fleet.objection(self)
        if objection is not None:
            return refused(objection)
        concerned = yield from self.concerned(fleet)
        if isinstance(concerned, CommandOutcome):
            return concerned
        for name in concerned:
            down = fleet.down(name)
            if down is not None:
                return CommandOutcome("unavailable", down)
        done: list[tuple[str, Order | None]] = []
        outcome = DONE
        for name in concerned:
            undo = fleet.undoing(name, self)
            outcome = yield SendCommand(name, self)
            if outcome.code is not None:
                for before, back in done:
                    if back is not None:
                        yield SendCommand(before, back, undoes=True)
                break
            done.append((name, undo))
        return outcome
