"""Define the orders by which operators and fleet policies place models and move requests.

Each class is an order (`core.order`); a fleet policy returns some of them as its actions. Those
about the memory of devices are commands to them (`core.command`, `core.actions`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ballast.core.actions import RECALL_SECONDS, ActivateCommand, EvictCommand, Lend, Recall
from ballast.core.command import Add, Remove
from ballast.core.fleet_state import CommandOutcome
from ballast.core.order import (
    DONE,
    Fleet,
    HandOver,
    MoveRequests,
    Order,
    OrderLease,
    SendCommand,
    Step,
    Steps,
    refused,
)

UNDO_SECONDS = 30.0
"""Time given to requests that came to a device during a drain, when the drain is undone."""
LEAVING_SECONDS = 30.0
"""Time for a model without open requests to leave a device."""


@dataclass(frozen=True, slots=True)
class Place(Order):
    """Serve a model on one more device, or go on with one that it was leaving."""

    model: str
    device: str
    why: str = ""
    activate: bool = False
    """Whether to activate it there at once, before a request arrives."""

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        if self.device not in fleet or fleet.settings_of(self.model) is None:
            there = self.device in fleet
            what = f"no model {self.model!r}" if there else f"there is no device {self.device!r}"
            return refused(f"{what}; devices: {', '.join(fleet)}")
        if fleet[self.device].cordoned:
            return refused(f"{self.device} is drained; uncordon it first")
        if self.device in fleet.taking(self.model):
            return refused(f"{self.device} serves {self.model} already")
        outcome = yield from _serve(fleet, self.model, self.device)
        if outcome.code is None and self.activate:
            yield SendCommand(self.device, ActivateCommand(self.model, self.why), awaited=False)
        return outcome


@dataclass(frozen=True, slots=True)
class Withdraw(Order):
    """Send no new requests of a model to a device, and remove it there. Its running requests move
    to other devices that have its weights."""

    model: str
    device: str
    why: str = ""
    seconds: float | None = None
    """Time for requests that stay to end; None: the order ends at once, and the model leaves when
    they have ended (`FinishLeaving`)."""

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        here = fleet.taking(self.model)
        if self.device not in here:
            return refused(f"{self.model} is not on {self.device!r}")
        if len(here) < 2:
            return refused(f"{self.model} is on no other device")
        fleet[self.device].leaving.add(self.model)
        if self.seconds is None:
            return DONE
        return (yield from _remove(fleet, self.model, self.device, self.seconds))


@dataclass(frozen=True, slots=True)
class FinishLeaving(Order):
    """Remove a model from a device that it is leaving, if its requests have moved or ended. It
    stays if no other device can serve it by now."""

    model: str
    device: str

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        leaves = fleet[self.device]
        if not leaves.still_serves(self.model):
            return DONE  # an operator has placed it there again
        if not set(fleet.taking(self.model)) - {self.device}:
            leaves.leaving.discard(self.model)
            return DONE
        yield MoveRequests(self.device, self.model)
        base = leaves.specs.get(self.model)
        if leaves.down is None and base is not None and not leaves.count_open(base):
            yield from _remove(fleet, self.model, self.device, LEAVING_SECONDS, move=False)
        return DONE


@dataclass(frozen=True, slots=True)
class Drain(Order):
    """Empty a device for maintenance, until it is `Uncordon`ed.

    Models that no other device serves are placed on others first, on the least filled that accepts
    each; if none does, nothing changes. Then the device's open requests move to other devices:
    running ones with their KV, once their model's weights are resident there; waiting ones, and
    those whose KV cannot be moved, continue after the tokens that their clients have. Finally the
    device's weights are evicted.
    """

    device: str
    beside: tuple[str, ...] = ()
    """Devices that are drained with it, as those of its host: nothing comes to them."""

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        if self.device not in fleet:
            return _unknown(self.device, fleet)
        failed = yield from self._place_elsewhere(fleet)
        if failed is not None:
            return failed
        fleet[self.device].cordoned = True
        models = list(fleet[self.device].specs)
        yield tuple(MoveRequests(self.device, model, bring=True) for model in models)
        yield HandOver(self.device)
        for model in models:
            yield SendCommand(self.device, EvictCommand(model, "its device is drained"))
        return DONE

    def _place_elsewhere(self, fleet: Fleet) -> Generator[Step, Any, CommandOutcome | None]:
        """Place each model that only this device serves on another one. On failure undo that and
        return the outcome; else return None."""
        others = [n for n in fleet.able if n != self.device and n not in self.beside]
        placed: list[tuple[str, str]] = []
        for model in list(fleet[self.device].specs):
            if set(fleet.taking(model)) & set(others):
                continue
            name, outcome = yield from _serve_on_one(fleet, model, others)
            if name is not None:
                placed.append((model, name))
                continue
            for undone, name in placed:
                fleet[name].leaving.add(undone)
                yield from _remove(fleet, undone, name, UNDO_SECONDS)
            code = "unavailable" if outcome.code == "unavailable" else "refused"
            return CommandOutcome(code, f"{model} stays on {self.device}: {outcome.reason}")
        return None


@dataclass(frozen=True, slots=True)
class DrainHost(Order):
    """Drain all devices of a host, or none of them."""

    devices: tuple[str, ...]

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        drained: list[str] = []
        for name in self.devices:
            if fleet[name].cordoned:
                continue
            outcome = yield from Drain(name, self.devices).steps(fleet)
            if outcome.code is not None:
                for one in drained:
                    fleet[one].cordoned = False
                return outcome
            drained.append(name)
        return DONE


@dataclass(frozen=True, slots=True)
class Rehome(Order):
    """Serve on other devices, each on the least filled that accepts it, what only a device served
    whose host is gone, models with most requests first. The requests of each go on as soon as it is
    served; those of models that no other device accepts wait for the device."""

    device: str

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        lost = fleet[self.device]
        yield HandOver(self.device)
        for base in sorted(lost.specs.values(), key=lost.count_open, reverse=True):
            if lost.down is None:
                break  # it serves again
            others = [name for name in fleet.able if name != self.device]
            if not set(fleet.taking(base.name)) & set(others):
                name, _ = yield from _serve_on_one(fleet, base.name, others)
                if name is not None:
                    yield HandOver(self.device)
        return DONE


@dataclass(frozen=True, slots=True)
class Uncordon(Order):
    """Send requests again to a drained device, for the models that it still serves."""

    device: str

    exclusive = True

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        yield from ()
        if self.device not in fleet:
            return _unknown(self.device, fleet)
        fleet[self.device].cordoned = False
        return DONE


@dataclass(frozen=True, slots=True)
class Migrate(Order):
    """Move a model's running requests off a device, with their KV, to devices that have its
    weights."""

    model: str
    device: str
    to: str | None = None
    """Where they go; None: to any other device of the model."""
    why: str = ""

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        serving = fleet.serving(self.model)
        for name in (self.device, self.to):
            if name is not None and name not in serving:
                return refused(f"{self.model} is not on {name!r}")
        if self.to == self.device or len(serving) < 2:
            return refused(f"{self.model} is on no other device")
        yield MoveRequests(self.device, self.model, bring=True, target=self.to)
        return DONE


class LeaseOrder(Order):
    """Base class of the orders about pages that one device lends to another."""

    __slots__ = ()

    lender: str

    @property
    @abstractmethod
    def command(self) -> Lend | Recall:
        """The lender's command."""

    def steps(self, fleet: Fleet, device: str | None = None) -> Steps:
        outcome: CommandOutcome = yield OrderLease(self.lender, self.command)
        return outcome


@dataclass(frozen=True, slots=True)
class LendPages(LeaseOrder):
    """Have a device lend free pages to another, which may use them for KV."""

    lender: str
    borrower: str
    pages: int
    why: str = ""

    @property
    def command(self) -> Lend:
        return Lend(self.borrower, self.pages, self.why)


@dataclass(frozen=True, slots=True)
class RecallPages(LeaseOrder):
    """Have a device recall pages that it has lent; a borrower that keeps them is killed."""

    lender: str
    borrower: str
    pages: int | None
    """None: all."""
    seconds: float = RECALL_SECONDS
    why: str = ""

    @property
    def command(self) -> Recall:
        return Recall(self.borrower, self.pages, self.seconds, self.why)


def _unknown(device: str, fleet: Fleet) -> CommandOutcome:
    return refused(f"no device {device!r}; devices: {', '.join(fleet)}")


def _serve_on_one(
    fleet: Fleet, model: str, devices: Sequence[str]
) -> Generator[Step, Any, tuple[str | None, CommandOutcome]]:
    """Serve a model on the least filled of `devices` that accepts it; returns that device, or None
    and the last refusal."""
    outcome = CommandOutcome("refused", "there is no other device")
    for name in sorted(devices, key=lambda name: fleet[name].filled):
        outcome = yield from _serve(fleet, model, name)
        if outcome.code is None:
            return name, outcome
        outcome = CommandOutcome(outcome.code, f"{name}: {outcome.reason}")
    return None, outcome


def _serve(fleet: Fleet, model: str, device: str) -> Generator[Step, Any, CommandOutcome]:
    """Have a device serve a model, or keep one that is leaving it."""
    if fleet[device].still_serves(model):
        fleet[device].leaving.discard(model)
        return DONE
    down, settings = fleet[device].down, fleet.settings_of(model)
    if down is not None or settings is None:
        return CommandOutcome("unavailable", down or f"there is no model {model!r}")
    outcome: CommandOutcome = yield SendCommand(device, Add(settings))
    return outcome


def _remove(
    fleet: Fleet, model: str, device: str, seconds: float, *, move: bool = True
) -> Generator[Step, Any, CommandOutcome]:
    """Remove a model from a device that it is leaving; it stays if that is refused."""
    if move:
        yield MoveRequests(device, model)
        yield HandOver(device, model)
    outcome: CommandOutcome = yield SendCommand(device, Remove(model, seconds))
    if outcome.code is not None:
        fleet[device].leaving.discard(model)
    return outcome
