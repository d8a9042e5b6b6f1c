"""Route requests and carry out the fleet policy's actions in virtual time.

The simulated counterpart of the controller in `ballast.cluster`. `SimController` chooses a device
for each request, runs the fleet policy, and moves models between devices. Used by `sim.cluster`
and `sim.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ballast.cluster.fleet_book import FleetBook
from ballast.control.device_leases import command_of
from ballast.core.actions import ActivateCommand
from ballast.core.cost import StepCosts
from ballast.core.fleet import FleetAction, LendingAction, Place, PlacementAction
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.engine.report import report
from ballast.policy.fleet.replica_choice import Replica
from ballast.sim.device import SimDevice
from ballast.sim.lending import WAY, SimLeases
from ballast.sim.migration import Homes, SimMigrations
from ballast.sim.roles import replica_of

SETTLING = 0.1
"""Seconds between two checks whether moves have ended."""
OnMove = Callable[[float, FleetAction, str | None], None]
"""Called with (time, action, reason of its refusal; None: it was done)."""
CostsOn = Callable[[str, ModelSpec], StepCosts]
"""Returns job costs of (device, model)."""


class SimController:
    """The controller in virtual time: routes requests, runs the fleet policy and its actions."""

    def __init__(
        self,
        devices: Mapping[str, SimDevice],
        book: FleetBook,
        specs: Sequence[ModelSpec],
        costs: CostsOn,
        on_move: OnMove = lambda at, action, refused: None,
        migrations_of: Callable[[Homes], Sequence[SimMigrations]] = lambda homes: (),
        leases: Sequence[SimLeases] = (),
    ) -> None:
        """`on_move` is called with every action of the fleet's policy; `migrations_of` makes the
        migrations between devices that reach each other."""
        self.devices, self.book = devices, book
        self._specs = {spec.name: spec for spec in specs}
        self._bases = {served.name: spec.name for spec in specs for served in spec.served}
        """By model or adapter, the model."""
        self._costs, self._on_move = costs, on_move
        self.migrations = tuple(migrations_of(self._homes))
        self.leases = tuple(leases)
        for each in self.leases:
            each.on_crash += [migrations.lose for migrations in self.migrations]

    def choose(self, submission: Submission) -> str:
        """Choose the device for a request that arrives now; devices that serve its model are
        advanced to that time first."""

        def look_at(name: str) -> Replica:
            device = self.devices[name]
            device.advance(submission.arrival)
            return replica_of(name, device, submission)

        return self.book.choose(self._bases[submission.model], look_at)

    def decide(self, now: float) -> None:
        """Advance every device to `now`, run the fleet policy, and carry out its actions."""
        reports = {}
        for name, device in self.devices.items():
            device.advance(now)
            if not device.down:
                reports[name] = report(device.state, name)
        standing = [lease for each in self.leases for lease in each.standing]
        pairs = [pair for each in self.leases for pair in each.pairs()]
        for action in self.book.decide(now, reports, standing, pairs):
            if isinstance(action, LendingAction):
                self._order_lending(now, action)
                continue
            refused = self.book.objection(action) or self._do(now, action)
            if refused is None:
                self.book.settle(action)
            self._on_move(now, action, refused)

    def settle(self, now: float) -> float:
        """Advance until no request will move between devices any more; returns that time."""
        for device in self.devices.values() if self.migrations else ():
            device.advance(math.nextafter(now, math.inf))  # what arrives now has arrived
        while any(each.busy for each in self.migrations):
            now += SETTLING
            for device in self.devices.values():
                device.advance(now)
        return now + 2 * WAY if self.migrations else now  # what has just left arrives within `WAY`

    @property
    def moved(self) -> int:
        """Number of requests that have moved with their KV."""
        return sum(each.moved for each in self.migrations)

    def _homes(self, served: str) -> Sequence[str]:
        """Devices of a model or adapter."""
        return self.book.homes[self._bases[served]]

    def _order_lending(self, now: float, action: LendingAction) -> None:
        ended = partial(self._on_move, now, action)
        leases = next((each for each in self.leases if each.serves(action.lender)), None)
        if leases is None:
            ended(f"{action.lender} lends to no device")
        else:
            leases.order(now, action.lender, command_of(action), ended)

    def _do(self, now: float, action: PlacementAction) -> str | None:
        """Carry out one action; returns the reason if it is refused, else None."""
        device = self.devices[action.device]
        if not isinstance(action, Place):
            device.leave(now, action.model)
            for migrations in self.migrations:
                migrations.move_all(now, action.device, action.model)
            return None
        spec = self._specs[action.model]
        refused = device.join(now, spec, self._costs(action.device, spec))
        if refused is None and action.activate:
            device.order(
                now, f"activate-{action.model}-{now!r}", ActivateCommand(action.model, action.why)
            )
        return refused
