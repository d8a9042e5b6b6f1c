"""Orders of operators and of a fleet policy in `benchmarks.fault_world`, drawn by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ballast.control.device_orders import DeviceOrders
from ballast.control.order_events import ActionDone
from ballast.control.request_router import S
from ballast.control.routed_devices import D
from ballast.core.actions import ActivateCommand, EvictCommand
from ballast.core.fleet import (
    FleetAction,
    FleetDecision,
    FleetView,
    Migrate,
    ModelDemand,
    Place,
    Withdraw,
)
from ballast.core.fleet_orders import Drain, Uncordon
from ballast.core.fleet_state import CommandOutcome
from ballast.core.order import Order
from ballast.core.settings import ModelSettings
from ballast.policy.base import FleetPolicy

DECIDES_FOR = 6.0
"""Virtual seconds in which the policy decides."""


def drawn_action(rng: random.Random, models: Sequence[str], names: Sequence[str]) -> FleetAction:
    """Return some action of a fleet policy; it may be one that cannot be carried out."""
    model, device = rng.choice(models), rng.choice(names)
    place = Place(model, device, "by chance", activate=rng.random() < 0.5)
    actions: list[FleetAction] = [place, Withdraw(model, device), Migrate(model, device)]
    return rng.choice(actions)


def drawn_order(
    rng: random.Random, models: Sequence[str], names: Sequence[str]
) -> tuple[Order, str | None]:
    """Return some order of an operator, and the only device to carry it out."""
    model, device = rng.choice(models), rng.choice(names)
    match rng.randrange(7):
        case 0:
            return Drain(device), None
        case 1:
            return Uncordon(device), None
        case 2:
            return Withdraw(model, device, "by an operator", 1000.0), None
        case 3:
            return EvictCommand(model), rng.choice([device, None])
        case 4:
            return ActivateCommand(model), rng.choice([device, None])
        case _:
            return drawn_action(rng, models, names), None


class RandomMoves(FleetPolicy):
    """Decides on drawn actions."""

    def __init__(self, rng: random.Random, models: Sequence[str]) -> None:
        self._rng, self._models = rng, models

    @property
    def moves(self) -> bool:
        return True

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        rng, names = self._rng, [d.name for d in view.devices]
        n = rng.randrange(3) if names else 0
        actions = tuple(drawn_action(rng, self._models, names) for _ in range(n))
        again = view.now + rng.uniform(0.2, 1.0)
        return FleetDecision(actions, None, again if again < DECIDES_FOR else None)


class FaultOrders(DeviceOrders[D, S]):
    """The machine of orders; a model that joins goes to all devices."""

    actions = 0
    """Actions of the policy that have been carried out."""

    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        chosen(list(self._fleet))

    def needs(self) -> Sequence[ModelDemand]:
        return ()

    def action_done(self, done: ActionDone) -> None:
        self.actions += done.refused is None
