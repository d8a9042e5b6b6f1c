"""A fleet that does the steps of orders at once, or when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from ballast.control.order_driver import OrderDriver
from ballast.control.order_events import ActionDone, DoStep, OrdersEvent, OrdersInstruction
from ballast.core.actions import Lend, Recall
from ballast.core.command import Add
from ballast.core.fleet import DeviceCapacity, LeaseView, ModelDemand
from ballast.core.fleet_state import Command, CommandOutcome, FleetDevice, FleetState
from ballast.core.model import ModelSpec
from ballast.core.order import DONE, MoveRequests, Order, Step
from ballast.core.report import DeviceReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.policy.base import FleetPolicy
from benchmarks.fault_world import _spec

SETTINGS = DeviceSettings(budget_bytes=1 << 20)


def settings(models: Sequence[str]) -> FleetSettings:
    own = tuple(ModelSettings(name=m, path=m) for m in models)
    return FleetSettings(models=own, device=SETTINGS)


class OrderDevice(FleetDevice):
    """A device that only knows which models it serves."""

    def __init__(self, name: str, models: Sequence[str]) -> None:
        super().__init__(name)
        self.fleet, self.down = settings(models), None
        self.specs = {m: _spec(m) for m in models}
        self.open: dict[str, int] = {}
        self.report: DeviceReport | None = None
        self.ordered_by: list[str] = []
        self.refusing: str | None = None
        """Why it refuses models that are to join."""

    def order(
        self,
        command: Command,
        answered: Callable[[CommandOutcome], object],
        by: str = "operator",
    ) -> None:
        self.ordered_by.append(by)
        if self.down is not None:
            answered(CommandOutcome("unavailable", self.down))
        elif isinstance(command, Add) and self.refusing is not None:
            answered(CommandOutcome("refused", self.refusing))
        else:
            self.fleet = command.applied(self.fleet)
            self.serve([m.name for m in self.fleet.models])
            answered(DONE)

    def serve(self, models: Sequence[str]) -> None:
        self.specs = {m: _spec(m) for m in models}
        self.leaving &= self.specs.keys()

    def last_report(self) -> DeviceReport | None:
        return self.report

    def count_open(self, base: ModelSpec) -> int:
        return self.open.get(base.name, 0)


class OrderFleet(OrderDriver[OrderDevice]):
    """Drives the machine of orders over such devices, and notes the steps."""

    def __init__(
        self,
        homes: Mapping[str, Sequence[str]],
        names: Sequence[str],
        policy: FleetPolicy | None = None,
    ) -> None:
        self.fleet: FleetState[OrderDevice] = FleetState()
        for name in names:
            self.fleet.add(OrderDevice(name, [m for m, at in homes.items() if name in at]))
        self.fleet.fleet = settings(list(homes))
        super().__init__(self.fleet)
        self.machine = self._machine
        self.held: Callable[[Step], bool] = lambda step: False
        """Whether a step is not answered until `release`."""
        self.needed: Sequence[ModelDemand] = ()
        self.time = 0.0
        self.did: list[Step] = []
        self.waiting: list[DoStep] = []
        self.ended: dict[int, CommandOutcome] = {}
        self.actions: list[ActionDone] = []
        if policy is not None:
            self.begin_policy(policy, self)

    def give(self, number: int, order: Order, device: str | None = None) -> None:
        self.order(order, partial(self.ended.__setitem__, number), device)

    def handle(self, event: OrdersEvent) -> None:
        self._handle(event)

    def _do(self, instruction: OrdersInstruction) -> None:
        if isinstance(instruction, DoStep):
            self.did.append(instruction.step)
            if self.held(instruction.step):
                self.waiting.append(instruction)
                return
        super()._do(instruction)

    def release(self) -> None:
        """Do the steps that wait."""
        waiting, self.waiting = self.waiting, []
        for step in waiting:
            super()._do(step)
            while self._undone:
                self._do(self._undone.popleft())

    # -- `OrderDriver` ----------------------------------------------------------------------------

    def now(self) -> float:
        return self.time

    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        self.fleet.fleet = replace(self.fleet.fleet, models=(*self.fleet.fleet.models, settings))
        chosen(list(self.fleet))

    def move_requests(self, step: MoveRequests, ended: Callable[[int], object]) -> None:
        ended(0)

    def hand_over(self, device: str, model: str | None) -> int:
        return 0

    def order_lease(
        self,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object],
        by_operator: bool,
    ) -> None:
        ended(DONE)

    def action_done(self, done: ActionDone) -> None:
        self.actions.append(done)

    def rooms(self) -> Sequence[DeviceCapacity]:
        return [DeviceCapacity(name, 1) for name in self.fleet]

    def network(self) -> float:
        return inf

    def needs(self) -> Sequence[ModelDemand]:
        return self.needed

    def leases(self) -> Sequence[LeaseView]:
        return ()

    def pairs(self) -> Sequence[tuple[str, str]]:
        return ()
