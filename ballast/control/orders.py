"""Carry out the orders of operators and of the fleet policy, and call the policy when it is due.

A pure state machine, driven by `control.order_driver` for the server and the simulator. What an
order does is in its class (`core.order`): a generator of steps, which this machine resumes with
their answers.

::

    OrderEvent          operator's   ┐                       ┌─DoStep─> device, migrations, leases
    LookEvent -> policy -> actions   ┴─> one at a time, those ┤
                                         that are exclusive   └<─StepAnsweredEvent─

Of exclusive orders, which change where models are, operators' come first. An action of the policy
that was decided before an operator's change is refused: it was decided for another fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from ballast.control.fleet_view import FleetViews
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.order_events import (
    ActionDone,
    DoStep,
    OrderDone,
    OrderEvent,
    OrdersEvent,
    OrdersInstruction,
    StepAnsweredEvent,
)
from ballast.core.fleet import FleetAction, PlacementAction, Withdraw
from ballast.core.fleet_orders import FinishLeaving
from ballast.core.fleet_state import CommandOutcome
from ballast.core.order import Fleet, Order, SendCommand, Step, Steps
from ballast.policy.base import FleetPolicy

POLL_SECONDS = 0.5
"""Interval of looking whether a model's last request on a device has ended."""


@dataclass(slots=True)
class _Decision:
    """A decision of the fleet policy, some of whose actions have not ended."""

    at: float
    epoch: int


@dataclass(slots=True, eq=False)
class _Run:
    """An order that waits for its turn, or for answers."""

    order: Order
    number: int | None = None
    """Of an operator's order."""
    device: str | None = None
    decision: _Decision | None = None
    """Of an action of the fleet policy."""
    epoch: int = 0
    """When it began."""
    steps: Steps | None = None
    awaited: dict[int, Step] = field(default_factory=dict)
    """Steps that have not been answered, by number."""
    answers: dict[int, object] = field(default_factory=dict)
    several: bool = False
    """Whether several steps are done at once."""


class Orders:
    """The orders to one fleet; `handle` has to be called with `LookEvent` at `due`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._policy: tuple[FleetPolicy, FleetViews] | None = None
        self.wake_at = inf
        """Time of the next call of the policy, seconds; inf: never."""
        self._memo: object = None
        self._leave_at = inf
        """When leaving models are looked at again."""
        self._waiting: list[_Run] = []
        """Exclusive orders that wait for their turn."""
        self._current: _Run | None = None
        """The exclusive order that is under way."""
        self._awaited: dict[int, _Run] = {}
        """By step that has not been answered."""
        self._steps = 0
        self._epoch = 0
        """Number of changes of which model is where."""
        self._now = 0.0
        self._out: list[OrdersInstruction] = []

    @property
    def due(self) -> float:
        """Time of the next `LookEvent`; inf: none is needed."""
        return min(self._leave_at, inf if self._deciding else self.wake_at)

    @property
    def busy(self) -> bool:
        """Whether an exclusive order has not ended, or a model has yet to leave a device."""
        return bool(self._current or self._waiting) or self._leave_at < inf

    @property
    def _deciding(self) -> bool:
        """Whether actions of the last decision, about where models are, have not ended."""
        runs = self._waiting if self._current is None else [*self._waiting, self._current]
        return any(run.decision is not None for run in runs)

    @property
    def awaits(self) -> bool:
        """Whether a step has not been answered."""
        return bool(self._awaited)

    def begin(self, policy: FleetPolicy, views: FleetViews) -> None:
        """Call a policy from now on, if it decides anything after the start."""
        self._policy = policy, views
        self.wake_at = 0.0 if policy.decides else inf

    def handle(self, now: float, event: OrdersEvent) -> list[OrdersInstruction]:
        """Handle an event at `now`, in seconds of any clock that does not go back."""
        self._now, self._out = now, []
        match event:
            case OrderEvent(number, order, device):
                self._add(_Run(order, number, device))
            case StepAnsweredEvent(number, answer):
                self._answered(number, answer)
            case DeviceLostEvent(device):
                self._lose(device)
            case LookEvent():
                self._look()
        return self._out

    # -- the policy -------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._leave_at <= self._now:
            self._leave_at = inf
            for model, device in self._leaving:
                self._add(_Run(FinishLeaving(model, device)))
        if self.wake_at <= self._now and not self._deciding:
            self._decide()

    def _decide(self) -> None:
        assert self._policy is not None, "it has begun"
        policy, views = self._policy
        decision = policy(views.view(self._now), self._memo)
        self._memo = decision.memo
        self.wake_at = inf if decision.wake_at is None else decision.wake_at
        of = _Decision(self._now, self._epoch)
        for action in decision.actions:
            self._add(_Run(action, decision=of))

    def _objection(self, run: _Run) -> str | None:
        """Return why an action of the policy is not carried out; operators' orders are."""
        decision, action = run.decision, run.order
        if decision is None or not isinstance(action, PlacementAction):
            return None
        if decision.epoch != self._epoch:
            return f"it was decided in epoch {decision.epoch}, and this is {self._epoch}"
        known = action.model in self._fleet.placements()
        return None if known else f"there is no model {action.model!r}"

    @property
    def _leaving(self) -> list[tuple[str, str]]:
        """(model, device) of all that serve until their open requests have ended."""
        devices = self._fleet.items()
        return [(m, name) for name, d in devices for m in sorted(d.leaving) if d.still_serves(m)]

    # -- the life of an order ---------------------------------------------------------------------

    def _add(self, run: _Run) -> None:
        if run.order.exclusive:
            self._waiting.append(run)
            self._next()
        else:
            self._begin(run)

    def _next(self) -> None:
        """Begin the next exclusive order, unless one is under way."""
        while self._current is None and self._waiting:
            run = min(self._waiting, key=lambda r: r.number is None)  # the first of operators
            self._waiting.remove(run)
            self._current = run
            self._begin(run)

    def _begin(self, run: _Run) -> None:
        run.epoch = self._epoch
        objection = self._objection(run)
        if objection is not None:
            self._end(run, CommandOutcome("refused", objection))
            return
        run.steps = run.order.steps(self._fleet, run.device)
        self._resume(run, None)

    def _resume(self, run: _Run, answer: object) -> None:
        """Let an order go on until it awaits answers, or has ended."""
        assert run.steps is not None, "it has begun"
        while not run.awaited:
            try:
                wanted = run.steps.send(answer)
            except StopIteration as end:
                self._end(run, end.value)
                return
            run.several = isinstance(wanted, tuple)
            steps: Sequence[Step] = wanted if isinstance(wanted, tuple) else (wanted,)
            for step in steps:
                self._steps += 1
                run.awaited[self._steps] = step
                self._awaited[self._steps] = run
                self._out.append(DoStep(self._steps, step, run.number is not None))
            answer = ()  # of no steps at all

    def _answered(self, number: int, answer: object) -> None:
        run = self._awaited.pop(number, None)
        if run is None:
            return  # its device died before
        del run.awaited[number]
        run.answers[number] = answer
        if not run.awaited:
            answers = tuple(run.answers[n] for n in sorted(run.answers))
            run.answers.clear()
            self._resume(run, answers if run.several else answers[0])

    def _lose(self, device: str) -> None:
        """Answer the commands that a dead worker will not answer."""
        for number, run in list(self._awaited.items()):
            step = run.awaited.get(number)
            if isinstance(step, SendCommand) and step.device == device:
                why = f"{step.command.verb} was not done: {self._fleet[device].down}"
                self._answered(number, CommandOutcome("unavailable", why))

    def _end(self, run: _Run, outcome: CommandOutcome) -> None:
        if run.order.exclusive:
            self._current = None
        refused = None if outcome.code is None else outcome.reason or outcome.code
        if run.number is not None:
            self._epoch += run.order.exclusive and refused is None
            self._out.append(OrderDone(run.number, outcome))
        elif run.decision is not None:
            self._end_action(run, run.decision, refused)
        elif run.order.exclusive and self._leaving:
            self._leave_at = min(self._leave_at, self._now + POLL_SECONDS)
        self._next()

    def _end_action(self, run: _Run, decision: _Decision, refused: str | None) -> None:
        action = run.order
        assert isinstance(action, FleetAction), "policies decide on nothing else"
        self._out.append(ActionDone(decision.at, action, run.epoch, refused))
        if run.order.exclusive and refused is None:
            self._epoch += 1
            decision.epoch += 1
        if isinstance(action, Withdraw) and refused is None:
            self._leave_at = self._now
