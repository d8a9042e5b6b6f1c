"""Route requests in virtual time, and drive the fleet's machine of orders there.

The machine (`control.orders`) is the server's: it calls the fleet policy and carries out its
actions. `SimController` does their steps on simulated devices, and chooses a device for each
request. Used by `sim.cluster` and `sim.simulate`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.order_events import (
    ActionDone,
    DoStep,
    OrderDone,
    OrdersEvent,
    OrdersInstruction,
    StepAnsweredEvent,
)
from ballast.control.orders import POLL_SECONDS, Orders
from ballast.core.actions import ActivateCommand, EvictCommand, Lend, Recall
from ballast.core.command import Remove
from ballast.core.cost import StepCosts
from ballast.core.fleet import FleetAction, LeaseView, Need, Room
from ballast.core.model import ModelSpec
from ballast.core.order import (
    ChooseDevices,
    CommandOutcome,
    HandOver,
    MoveRequests,
    Order,
    OrderLease,
    SendCommand,
    ServeModel,
    SetCordoned,
    SetLeaving,
)
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.engine.report import report
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import for_prefill
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
Answered = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class FleetStart:
    """A fleet as it starts: which devices serve which models, and its policy."""

    homes: Mapping[str, Sequence[str]]
    needs: Sequence[Need] = ()
    """Memory that models need of a device."""
    rooms: Sequence[Room] = ()
    """Budgets of the devices."""
    policy: FleetPolicy = field(default_factory=FixedPlacement)


class SimController:
    """The controller in virtual time. Implements `control.order_events.PolicyState`."""

    def __init__(
        self,
        devices: Mapping[str, SimDevice],
        start: FleetStart,
        specs: Sequence[ModelSpec],
        costs: CostsOn,
        on_move: OnMove = lambda at, action, refused: None,
        migrations_of: Callable[[Homes], Sequence[SimMigrations]] = lambda homes: (),
        leases: Sequence[SimLeases] = (),
    ) -> None:
        """`on_move` is called with every action of the fleet's policy; `migrations_of` makes the
        migrations between devices that reach each other."""
        self.devices, self._start = devices, start
        self._homes = {model: list(on) for model, on in start.homes.items()}
        self._specs = {spec.name: spec for spec in specs}
        self._bases = {served.name: spec.name for spec in specs for served in spec.served}
        """By model or adapter, the model."""
        self._costs, self._on_move = costs, on_move
        self._leaving: dict[str, set[str]] = {name: set() for name in devices}
        self._cordoned: set[str] = set()
        self._now = 0.0
        self._events: deque[OrdersEvent] = deque()
        """Answers of devices, and deaths, that the machine has not handled."""
        self._awaited = 0
        """Steps that devices have not answered."""
        self.migrations = tuple(migrations_of(lambda served: self._homes[self._bases[served]]))
        self._leases = tuple(leases)
        for each in self._leases:
            each.on_crash += [migrations.lose for migrations in self.migrations]
            each.on_crash.append(lambda at, name: self._events.append(DeviceLostEvent(name)))
        self._machine = Orders(self)
        self._machine.begin(start.policy)

    def choose(self, submission: Submission) -> str:
        """Choose the device for a request that arrives now; devices that serve its model are
        advanced to that time first."""
        homes = self._homes[self._bases[submission.model]]
        if len(homes) == 1:
            return homes[0]
        for name in homes:
            self.devices[name].advance(submission.arrival)
        replicas = [replica_of(name, self.devices[name], submission) for name in homes]
        return self._start.policy.route(for_prefill(replicas))

    @property
    def due(self) -> float:
        """Time of the next `look`; inf: none is needed."""
        polled = self._now + POLL_SECONDS if self._awaited or self._events else math.inf
        return min(self._machine.due, polled)

    def look(self, now: float) -> None:
        """Let the machine handle all that is due at `now`: answers, the fleet policy, models that
        leave. Before the policy decides, every device is advanced to `now`."""
        self._now = now
        if self._machine.wake_at <= now or self._awaited:
            for device in self.devices.values():
                device.advance(now)
        self._handle(LookEvent())

    def settle(self, now: float) -> float:
        """Advance until no model and no request will move between devices any more, by what has
        been decided until now; returns that time."""
        self._machine.wake_at = math.inf
        for device in self.devices.values() if self.migrations else ():
            device.advance(math.nextafter(now, math.inf))  # what arrives now has arrived
        while self._machine.busy or any(each.busy for each in self.migrations):
            now += SETTLING
            for device in self.devices.values():
                device.advance(now)
            if self.due <= now:
                self.look(now)
        return now + 2 * WAY if self.migrations else now  # what has just left arrives within `WAY`

    @property
    def moved(self) -> int:
        """Number of requests that have moved with their KV."""
        return sum(each.moved for each in self.migrations)

    # -- `PolicyState` ----------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        return list(self.devices)

    @property
    def rooms(self) -> Sequence[Room]:
        return self._start.rooms

    def down(self, device: str) -> str | None:
        return "the worker is gone" if self.devices[device].down else None

    def serving(self, model: str) -> Sequence[str]:
        base = self._bases.get(model, model)
        leaving = [name for name, models in self._leaving.items() if base in models]
        return [*self._homes.get(base, ()), *leaving]

    def taking(self, model: str) -> Sequence[str]:
        homes = self._homes.get(self._bases.get(model, model), ())
        return [name for name in homes if name not in self._cordoned]

    def assigned(self, model: str) -> Sequence[str]:
        return self.serving(model)

    def models_on(self, device: str) -> Sequence[str]:
        return [model for model in self._specs if device in self.serving(model)]

    def leaving(self, device: str) -> Collection[str]:
        return self._leaving[device]

    def cordoned(self, device: str) -> bool:
        return device in self._cordoned

    def filled(self, device: str) -> float:
        weights = sum(sum(self._specs[m].segment_bytes) for m in self.models_on(device))
        return weights / self.devices[device].state.settings.budget_bytes

    def open_requests(self, device: str, model: str) -> int:
        self.devices[device].advance(self._now)
        return self.devices[device].open_requests_of(model)

    def known(self, model: str) -> bool:
        return model in self._specs

    def objection(self, order: Order) -> str | None:
        return None

    def undoing(self, device: str, order: Order) -> Order | None:
        return None

    def homes(self) -> Mapping[str, Sequence[str]]:
        return {model: tuple(on) for model, on in self._homes.items()}

    def needs(self) -> Sequence[Need]:
        return self._start.needs

    def reports(self) -> Mapping[str, DeviceReport]:
        able = {n: d for n, d in self.devices.items() if not d.down and n not in self._cordoned}
        return {name: report(device.state, name) for name, device in able.items()}

    def leases(self) -> Sequence[LeaseView]:
        return [lease for each in self._leases for lease in each.standing]

    def pairs(self) -> Sequence[tuple[str, str]]:
        return [pair for each in self._leases for pair in each.pairs()]

    # -- steps ------------------------------------------------------------------------------------

    def _handle(self, event: OrdersEvent) -> None:
        self._events.append(event)
        while self._events:
            for instruction in self._machine.handle(self._now, self._events.popleft()):
                self._do(instruction)

    def _do(self, instruction: OrdersInstruction) -> None:
        match instruction:
            case DoStep(number):
                self._step(instruction, partial(self._answered, number))
            case ActionDone(at, action, _, refused):
                self._on_move(at, action, refused)
            case OrderDone():
                """Nobody gives orders."""

    def _answered(self, number: int, answer: object) -> None:
        self._events.append(StepAnsweredEvent(number, answer))

    def _step(self, instruction: DoStep, answered: Answered) -> None:
        match instruction.step:
            case ServeModel(device, model):
                spec = self._specs[model]
                why = self.devices[device].join(self._now, spec, self._costs(device, spec))
                if why is None:
                    self._homes[model].append(device)
                answered(_outcome(why))
            case SendCommand(device, command, awaited):
                self._send(device, command, answered if awaited else None)
                if not awaited:
                    answered(None)
            case MoveRequests(device, model, bring, target):
                answer = self._counted(answered)
                for each in self.migrations:
                    if each.serves(device):
                        each.move_all(self._now, device, model, answer, bring, target)
                        return
                answer(0)
            case HandOver():
                answered(0)  # those that do not run end where they are
            case SetLeaving(device, model, leaving):
                (self._leaving[device].add if leaving else self._leaving[device].discard)(model)
                (self._homes[model].remove if leaving else self._homes[model].append)(device)
                answered(None)
            case SetCordoned(device, cordoned):
                (self._cordoned.add if cordoned else self._cordoned.discard)(device)
                answered(None)
            case OrderLease(lender, command):
                self._order_lease(lender, command, answered, instruction.by_operator)
            case ChooseDevices():
                answered(CommandOutcome("refused", "no model joins a simulated fleet"))

    def _send(self, device: str, command: Order, answered: Answered | None) -> None:
        end = (lambda why: None) if answered is None else self._counted(answered)
        to = self.devices[device]
        if isinstance(command, Remove):
            to.leave(self._now, command.model, partial(self._removed, device, command.model, end))
        else:
            assert isinstance(command, ActivateCommand | EvictCommand), (
                "nothing else is sent to one device"
            )
            id = f"{command.verb}-{command.model}-{self._now!r}"
            to.order(self._now, id, command, lambda why: end(_outcome(why)))

    def _removed(self, device: str, model: str, end: Answered, why: str | None) -> None:
        if why is None:
            self._leaving[device].discard(model)
        end(_outcome(why))

    def _counted(self, answered: Answered) -> Answered:
        """Count an answer that may come later."""
        self._awaited += 1

        def answer(value: object) -> None:
            self._awaited -= 1
            answered(value)

        return answer

    def _order_lease(
        self, lender: str, command: Order, answered: Answered, by_operator: bool
    ) -> None:
        leases = next((each for each in self._leases if each.serves(lender)), None)
        if leases is None:
            answered(_outcome(f"{lender} lends to no device"))
            return
        assert isinstance(command, Lend | Recall), "nothing else is about pages"
        end = lambda why: answered(_outcome(why))  # noqa: E731
        leases.order(self._now, lender, command, end, by_operator=by_operator)


def _outcome(refused: str | None) -> CommandOutcome:
    return CommandOutcome() if refused is None else CommandOutcome("refused", refused)
