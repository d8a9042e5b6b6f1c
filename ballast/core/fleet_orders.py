"""Define the orders by which operators and fleet policies place models and move requests.

Each class is an order (`core.order`); a fleet policy returns some of them as its actions. Those
about the memory of devices are commands to them (`core.command`, `core.actions`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from ballast.core.actions import RECALL_SECONDS, ActivateCommand, EvictCommand, Lend, Recall
from ballast.core.command import Remove
from ballast.core.order import (
    DONE,
    CommandOutcome,
    FleetState,
    HandOver,
    MoveRequests,
    Order,
    OrderLease,
    SendCommand,
    ServeModel,
    SetCordoned,
    SetLeaving,
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

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        if self.device not in fleet.names or not fleet.known(self.model):
            there = self.device in fleet.names
            what = f"no model {self.model!r}" if there else f"there is no device {self.device!r}"
            return refused(f"{what}; devices: {', '.join(fleet.names)}")
        if fleet.cordoned(self.device):
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

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        here = fleet.taking(self.model)
        if self.device not in here:
            return refused(f"{self.model} is not on {self.device!r}")
        if len(here) < 2:
            return refused(f"{self.model} is on no other device")
        yield SetLeaving(self.device, self.model, True)
        if self.seconds is None:
            return DONE
        return (yield from _remove(self.model, self.device, self.seconds))


@dataclass(frozen=True, slots=True)
class FinishLeaving(Order):
    """Remove a model from a device that it is leaving, if its requests have moved or ended. It
    stays if no other device can serve it by now."""

    model: str
    device: str

    exclusive = True

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        if self.model not in fleet.leaving(self.device):
            return DONE  # an operator has placed it there again
        if not set(fleet.taking(self.model)) - {self.device}:
            yield SetLeaving(self.device, self.model, False)
            return DONE
        yield MoveRequests(self.device, self.model)
        there = fleet.down(self.device) is None and self.model in fleet.models_on(self.device)
        if there and not fleet.open_requests(self.device, self.model):
            return (yield from _remove(self.model, self.device, LEAVING_SECONDS, move=False))
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

    exclusive = True

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        if self.device not in fleet.names:
            return _unknown(self.device, fleet)
        failed = yield from self._place_elsewhere(fleet)
        if failed is not None:
            return failed
        yield SetCordoned(self.device, True)
        models = fleet.models_on(self.device)
        yield tuple(MoveRequests(self.device, model, bring=True) for model in models)
        yield HandOver(self.device)
        for model in models:
            yield SendCommand(self.device, EvictCommand(model, "its device is drained"))
        return DONE

    def _place_elsewhere(self, fleet: FleetState) -> Generator[Step, Any, CommandOutcome | None]:
        """Place each model that only this device serves on another one. On failure undo that and
        return the outcome; else return None."""
        others = [
            d
            for d in fleet.names
            if d != self.device and fleet.down(d) is None and not fleet.cordoned(d)
        ]
        placed: list[tuple[str, str]] = []
        for model in fleet.models_on(self.device):
            if set(fleet.taking(model)) & set(others):
                continue
            outcome = refused("there is no other device")
            why = outcome.reason
            for name in sorted(others, key=fleet.filled):
                outcome = yield from _serve(fleet, model, name)
                if outcome.code is None:
                    placed.append((model, name))
                    break
                why = f"{name}: {outcome.reason}"
            else:
                for undone, name in placed:
                    yield SetLeaving(name, undone, True)
                    yield from _remove(undone, name, UNDO_SECONDS)
                code = "unavailable" if outcome.code == "unavailable" else "refused"
                return CommandOutcome(code, f"{model} stays on {self.device}: {why}")
        return None


@dataclass(frozen=True, slots=True)
class Uncordon(Order):
    """Send requests again to a drained device, for the models that it still serves."""

    device: str

    exclusive = True

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        if self.device not in fleet.names:
            return _unknown(self.device, fleet)
        yield SetCordoned(self.device, False)
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

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        serving = fleet.serving(self.model)
        for name in (self.device, self.to):
            if name is not None and name not in serving:
                return refused(f"{self.model} is not on {name!r}")
        if self.to == self.device or len(serving) < 2:
            return refused(f"{self.model} is on no other device")
        yield MoveRequests(self.device, self.model, bring=True, target=self.to)
        return DONE


@dataclass(frozen=True, slots=True)
class LendPages(Order):
    """Have a device lend free pages to another, which may use them for KV."""

    lender: str
    borrower: str
    pages: int
    why: str = ""

    @property
    def command(self) -> Lend | Recall:
        """The lender's command."""
        return Lend(self.borrower, self.pages, self.why)

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        outcome: CommandOutcome = yield OrderLease(self.lender, self.command)
        return outcome


@dataclass(frozen=True, slots=True)
class RecallPages(Order):
    """Have a device recall pages that it has lent; a borrower that keeps them is killed."""

    lender: str
    borrower: str
    pages: int | None
    """None: all."""
    seconds: float = RECALL_SECONDS
    why: str = ""

    @property
    def command(self) -> Lend | Recall:
        """The lender's command."""
        return Recall(self.borrower, self.pages, self.seconds, self.why)

    def steps(self, fleet: FleetState, device: str | None = None) -> Steps:
        outcome: CommandOutcome = yield OrderLease(self.lender, self.command)
        return outcome


def _unknown(device: str, fleet: FleetState) -> CommandOutcome:
    return refused(f"no device {device!r}; devices: {', '.join(fleet.names)}")


def _serve(fleet: FleetState, model: str, device: str) -> Generator[Step, Any, CommandOutcome]:
    """Have a device serve a model, or keep one that is leaving it."""
    if model in fleet.leaving(device):
        yield SetLeaving(device, model, False)
        return DONE
    down = fleet.down(device)
    if down is not None:
        return CommandOutcome("unavailable", down)
    return (yield ServeModel(device, model))  # type: ignore[no-any-return]


def _remove(
    model: str, device: str, seconds: float, *, move: bool = True
) -> Generator[Step, Any, CommandOutcome]:
    """Remove a model from a device that it is leaving; it stays if that is refused."""
    if move:
        yield MoveRequests(device, model)
    outcome: CommandOutcome = yield SendCommand(device, Remove(model, seconds))
    if outcome.code is not None:
        yield SetLeaving(device, model, False)
    return outcome
