"""Route requests in virtual time, and drive the fleet's orders there.

The driver (`control.order_driver`) and the machine under it are the server's: they carry out the
orders of operators and of the fleet policy. `SimController` does what differs: time, and what moves
requests and lends pages. Used by `sim.cluster` and `sim.simulate`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.order_driver import OrderDriver
from ballast.control.order_events import ActionDone, OrdersEvent, StepAnsweredEvent
from ballast.control.orders import POLL_SECONDS
from ballast.core.actions import Lend, Recall
from ballast.core.event import ArrivalEvent
from ballast.core.fleet import DeviceCapacity, LeaseView, ModelDemand
from ballast.core.fleet_state import CommandOutcome, FleetState
from ballast.core.model import ModelSpec
from ballast.core.order import MoveRequests, Order
from ballast.core.request import Submission
from ballast.core.settings import ModelSettings
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import for_prefill
from ballast.sim.device import SimDevice
from ballast.sim.fleet_device import GONE, CostsOn, SimFleetDevice, settings_of
from ballast.sim.lending import SimLeases
from ballast.sim.migration import Homes, SimMigrations
from ballast.sim.operator_orders import TimedOrder
from ballast.sim.roles import replica_of

SETTLING = 0.1
"""Seconds between two checks whether moves have ended."""
OnMove = Callable[[float, Order, str | None], None]
"""Called with (time, order of the fleet policy or of an operator, reason of its refusal; None: it
was done)."""
ReadyAt = Callable[[float, str, ModelSpec], float]
"""Returns, of (time, device, model), when the model's weights are on the device's host."""


@dataclass(frozen=True, slots=True)
class FleetStart:
    """A fleet as it starts: which devices serve which models, its policy, and what operators will
    order."""

    homes: Mapping[str, Sequence[str]]
    needs: Sequence[ModelDemand] = ()
    """Memory that models need of a device."""
    rooms: Sequence[DeviceCapacity] = ()
    """Budgets of the devices, and their hosts."""
    policy: FleetPolicy = field(default_factory=FixedPlacement)
    orders: Sequence[TimedOrder] = ()
    ready_at: ReadyAt = lambda at, device, spec: at
    network: float = math.inf
    """As of `FleetView`."""


class SimController(OrderDriver[SimFleetDevice]):
    """The controller in virtual time. Implements `control.fleet_view.FleetBook`."""

    def __init__(
        self,
        devices: Mapping[str, SimDevice],
        start: FleetStart,
        specs: Sequence[ModelSpec],
        costs: CostsOn,
        on_move: OnMove = lambda at, order, refused: None,
        migrations_of: Callable[[Homes], Sequence[SimMigrations]] = lambda homes: (),
        leases: Sequence[SimLeases] = (),
    ) -> None:
        """`on_move` is called with every order that has ended; `migrations_of` makes the
        migrations between devices that reach each other."""
        fleet: FleetState[SimFleetDevice] = FleetState()
        super().__init__(fleet)
        self.devices, self._start, self._on_move = devices, start, on_move
        by_name = {spec.name: spec for spec in specs}
        for name, device in devices.items():
            here = [spec for spec in specs if name in start.homes.get(spec.name, ())]
            own = settings_of(here, replace(device.state.settings, name=name))
            fleet.add(SimFleetDevice(device, own, by_name, costs, self))
            device.on_restart.append(partial(self._restarted, name))
        fleet.fleet = settings_of(specs, next(iter(fleet.values())).fleet.device)
        self._now = 0.0
        self._inbox: deque[OrdersEvent] = deque()
        """Answers of devices, and deaths, that the machine has not handled."""
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        """What is to be called, by time."""
        self._sequence = itertools.count()
        self._routes: dict[str, list[str]] = {}
        """By model or adapter, the devices that take its requests; cleared at each `look`."""
        self.migrations = tuple(migrations_of(fleet.taking))
        self._leases = tuple(leases)
        for each in self._leases:
            each.on_crash += [migrations.lose for migrations in self.migrations]
            each.on_crash.append(self._crashed)
        for given in start.orders:
            self.at(given.at, partial(self._ordered, given))
        self.begin_policy(start.policy, self)

    def choose(self, submission: Submission) -> str:
        """Choose the device for a request that arrives now; devices that serve its model are
        advanced to that time first."""
        model = submission.model
        homes = self._routes.get(model)
        if homes is None:
            homes = self._routes[model] = [d.name for d in self._fleet.routes(model)]
        if len(homes) == 1:
            return homes[0]
        for name in homes:
            self.devices[name].advance(submission.arrival)
        return self._choose(submission, homes)

    def _choose(self, submission: Submission, homes: Sequence[str]) -> str:
        replicas = [replica_of(name, self.devices[name], submission) for name in homes]
        return self._start.policy.route(for_prefill(replicas))

    # -- time -------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` at that time."""
        heapq.heappush(self._calls, (seconds, next(self._sequence), call))

    def ready_at(self, device: str, spec: ModelSpec) -> float:
        return self._start.ready_at(self._now, device, spec)

    @property
    def due(self) -> float:
        """Time of the next `look`; inf: none is needed."""
        polled = self._now + POLL_SECONDS if self._machine.awaits or self._inbox else math.inf
        return min(self._machine.due, polled, self._calls[0][0] if self._calls else math.inf)

    def look(self, now: float) -> None:
        """Handle all that is due at `now`: operators' orders, answers, the fleet policy, models
        that leave. Before that, every device is advanced to `now`."""
        self._now = now
        calls = bool(self._calls) and self._calls[0][0] <= now
        if calls or self._machine.wake_at <= now or self._machine.awaits:
            for device in self.devices.values():
                device.advance(now)
        while self._calls and self._calls[0][0] <= now:
            heapq.heappop(self._calls)[2]()
        self._inbox.append(LookEvent())
        while self._inbox:
            self._handle(self._inbox.popleft())
        self._routes.clear()

    def settle(self, now: float) -> float:
        """Advance until no model and no request will move between devices any more, by what has
        been decided until now; returns that time."""
        self._machine.wake_at = math.inf
        for device in self.devices.values() if self.migrations else ():
            device.advance(math.nextafter(now, math.inf))  # what arrives now has arrived
        while self._moves or (self._calls and any(d.open_requests for d in self.devices.values())):
            now += SETTLING
            for device in self.devices.values():
                device.advance(now)
            if self.due <= now:
                self.look(now)
        way = max((each.way for each in self.migrations), default=0.0)
        return now + 2 * way  # what has just left arrives within a message's time

    @property
    def _moves(self) -> bool:
        """Whether a model, or a request with its KV, may yet move."""
        return self.busy or any(each.busy for each in self.migrations)

    @property
    def moved(self) -> int:
        """Number of requests that have moved with their KV."""
        return sum(each.moved for each in self.migrations)

    def homes(self) -> Mapping[str, Sequence[str]]:
        """Return the devices that take requests, by model."""
        return {model: tuple(at) for model, at in self._fleet.placements().items()}

    # -- events -----------------------------------------------------------------------------------

    def _answered(self, number: int, answer: object) -> None:
        # A device may answer while another one, of another world, has not been advanced so far.
        self._inbox.append(StepAnsweredEvent(number, answer))

    def _ordered(self, given: TimedOrder) -> None:
        def ended(outcome: CommandOutcome) -> None:
            refused = None if outcome.code is None else outcome.reason or outcome.code
            self._on_move(given.at, given.order, refused)

        self.order(given.order, ended, given.device)

    def _crashed(self, at: float, device: str) -> None:
        self._fleet[device].down = GONE
        self._inbox.append(DeviceLostEvent(device))

    def _restarted(self, device: str) -> None:
        self._fleet[device].down = None

    # -- `OrderDriver` ----------------------------------------------------------------------------

    def choose_devices(
        self, settings: ModelSettings, chosen: Callable[[Sequence[str] | CommandOutcome], object]
    ) -> None:
        chosen(CommandOutcome("refused", "no model joins a simulated fleet"))

    def move_requests(self, step: MoveRequests, ended: Callable[[int], object]) -> None:
        for each in self.migrations:
            if each.serves(step.device):
                each.move_requests(self._now, step, ended)
                return
        ended(0)

    def hand_over(self, device: str, model: str | None) -> int:
        here, moved = self._fleet[device], 0
        if model is not None:
            return moved  # devices have got all of their requests
        for base in here.specs.values():
            others = [d.name for d in self._fleet.others(here, base.name)]
            for submission in here.device.take_back(self._now, base) if others else ():
                chosen = self.devices[self._choose(submission, others)]
                chosen.receive(math.nextafter(self._now, math.inf), ArrivalEvent(submission))
                moved += 1
        return moved

    def order_lease(
        self,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object],
        by_operator: bool,
    ) -> None:
        leases = next((each for each in self._leases if each.serves(lender)), None)
        if leases is None:
            ended(CommandOutcome("refused", f"{lender} lends to no device"))
        else:
            leases.order(self._now, lender, command, ended, by_operator=by_operator)

    def action_done(self, done: ActionDone) -> None:
        self._on_move(done.decided_at, done.action, done.refused)

    def rooms(self) -> Sequence[DeviceCapacity]:
        return self._start.rooms

    def network(self) -> float:
        return self._start.network

    def needs(self) -> Sequence[ModelDemand]:
        return self._start.needs

    def leases(self) -> Sequence[LeaseView]:
        return [lease for each in self._leases for lease in each.standing]

    def pairs(self) -> Sequence[tuple[str, str]]:
        return [pair for each in self._leases for pair in each.pairs()]
