"""A fleet that does the steps of orders at once, or when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ballast.control.order_events import (
    ActionDone,
    DoStep,
    OrderDone,
    OrderEvent,
    OrdersEvent,
    StepAnsweredEvent,
)
from ballast.control.orders import Orders
from ballast.core.command import Add, Remove
from ballast.core.fleet import LeaseView, Need, Room
from ballast.core.order import (
    DONE,
    ChooseDevices,
    CommandOutcome,
    MoveRequests,
    Order,
    SendCommand,
    ServeModel,
    SetCordoned,
    SetLeaving,
    Step,
)
from ballast.core.report import DeviceReport
from ballast.policy.base import FleetPolicy


class OrderFleet:
    """Implements `PolicyState`, and drives the machine of orders over devices that only know which
    models they serve."""

    def __init__(
        self,
        homes: Mapping[str, Sequence[str]],
        names: Sequence[str],
        policy: FleetPolicy | None = None,
    ) -> None:
        self.names = list(names)
        self.on = {name: [m for m, at in homes.items() if name in at] for name in names}
        self.away: dict[str, set[str]] = {name: set() for name in names}
        """Models that leave."""
        self.drained: set[str] = set()
        self.dead: dict[str, str] = {}
        self.open: dict[tuple[str, str], int] = {}
        self.refusing: dict[str, str] = {}
        """By device, why it refuses models that are to join."""
        self.held: Callable[[Step], bool] = lambda step: False
        """Whether a step is not answered until `answer`."""
        self.reported: Mapping[str, DeviceReport] = {}
        self.needed: Sequence[Need] = ()
        self.now = 0.0
        self.did: list[Step] = []
        self.waiting: list[DoStep] = []
        self.ended: dict[int, CommandOutcome] = {}
        self.actions: list[ActionDone] = []
        self.machine = Orders(self)
        if policy is not None:
            self.machine.begin(policy)

    def order(self, number: int, order: Order, device: str | None = None) -> None:
        self.handle(OrderEvent(number, order, device))

    def handle(self, event: OrdersEvent) -> None:
        for instruction in self.machine.handle(self.now, event):
            match instruction:
                case DoStep(_, step):
                    self.did.append(step)
                    if self.held(step):
                        self.waiting.append(instruction)
                    else:
                        self.answer(instruction)
                case OrderDone(number, outcome):
                    self.ended[number] = outcome
                case ActionDone():
                    self.actions.append(instruction)

    def answer(self, step: DoStep) -> None:
        self.handle(StepAnsweredEvent(step.number, self._do(step.step)))

    def release(self) -> None:
        """Answer the steps that wait."""
        waiting, self.waiting = self.waiting, []
        for step in waiting:
            self.answer(step)

    def _do(self, step: Step) -> object:
        match step:
            case ServeModel(device, model):
                if device in self.refusing:
                    return CommandOutcome("refused", self.refusing[device])
                self.on[device].append(model)
                return DONE
            case SendCommand(device, Add(settings)):
                if device in self.refusing:
                    return CommandOutcome("refused", self.refusing[device])
                self.on[device].append(settings.name)
                return DONE
            case SendCommand(device, Remove(model)):
                self.on[device].remove(model)
                self.away[device].discard(model)
                return DONE
            case SendCommand(device):
                return (
                    CommandOutcome("unavailable", self.dead[device])
                    if device in self.dead
                    else DONE
                )
            case SetLeaving(device, model, leaving):
                (self.away[device].add if leaving else self.away[device].discard)(model)
            case SetCordoned(device, cordoned):
                (self.drained.add if cordoned else self.drained.discard)(device)
            case ChooseDevices():
                return self.names
            case MoveRequests():
                return 0
        return None

    # -- `PolicyState` ----------------------------------------------------------------------------

    @property
    def rooms(self) -> Sequence[Room]:
        return [Room(name, 1) for name in self.names]

    def down(self, device: str) -> str | None:
        return self.dead.get(device)

    def serving(self, model: str) -> Sequence[str]:
        return [d for d in self.names if model in self.on[d]]

    def taking(self, model: str) -> Sequence[str]:
        able = (d for d in self.serving(model) if d not in self.drained)
        return [d for d in able if model not in self.away[d]]

    def assigned(self, model: str) -> Sequence[str]:
        return self.serving(model)

    def models_on(self, device: str) -> Sequence[str]:
        return list(self.on[device])

    def leaving(self, device: str) -> Collection[str]:
        return self.away[device]

    def cordoned(self, device: str) -> bool:
        return device in self.drained

    def filled(self, device: str) -> float:
        return len(self.on[device])

    def open_requests(self, device: str, model: str) -> int:
        return self.open.get((device, model), 0)

    def known(self, model: str) -> bool:
        return any(model in models for models in self.on.values())

    def objection(self, order: Order) -> str | None:
        return None

    def undoing(self, device: str, order: Order) -> Order | None:
        return Remove(order.model, 0.0) if isinstance(order, Add) else None

    def homes(self) -> Mapping[str, Sequence[str]]:
        return {m: self.taking(m) for models in self.on.values() for m in models}

    def needs(self) -> Sequence[Need]:
        return self.needed

    def reports(self) -> Mapping[str, DeviceReport]:
        return self.reported

    def leases(self) -> Sequence[LeaseView]:
        return ()

    def pairs(self) -> Sequence[tuple[str, str]]:
        return ()
