"""Record a simulated device as the controller knows it, and carry out its commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Protocol

from ballast.core.actions import Leave, LoopCommand
from ballast.core.command import Add, Remove
from ballast.core.cost import StepCosts
from ballast.core.fleet_state import OPERATOR, Command, CommandOutcome, FleetDevice
from ballast.core.levels import at_levels
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import AdapterSettings, DeviceSettings, FleetSettings, ModelSettings
from ballast.engine.report import report
from ballast.sim.device import SimDevice

GONE = "the worker is gone"
CostsOn = Callable[[str, ModelSpec], StepCosts]
"""Returns job costs of (device, model)."""


class ControllerTime(Protocol):
    """The time of a controller, and what happens in it; `SimController` provides it."""

    def now(self) -> float: ...

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` at that time."""

    def ready_at(self, device: str, spec: ModelSpec) -> float:
        """Return when the weights of a model that joins a device now are on its host."""


class SimFleetDevice(FleetDevice):
    """One simulated device: the models that it serves, and whether it takes requests."""

    def __init__(
        self,
        device: SimDevice,
        fleet: FleetSettings,
        specs: Mapping[str, ModelSpec],
        costs: CostsOn,
        time: ControllerTime,
    ) -> None:
        """`fleet`: with its own models and its name; `specs`: of all models."""
        super().__init__(fleet.device.name)
        self.device, self.fleet = device, fleet
        self._all, self._costs = specs, costs
        self._time = time
        self.specs = {m.name: specs[m.name] for m in fleet.models}
        self.down = None
        self._numbers = itertools.count(1)

    def last_report(self) -> DeviceReport:
        return report(self.device.state, self.name)

    def count_open(self, base: ModelSpec) -> int:
        self.device.advance(self._time.now())
        names = {s.name for s in base.served}
        return sum(model in names for model in self.device.open_models())

    def order(
        self,
        command: Command,
        answered: Callable[[CommandOutcome], object],
        by: str = OPERATOR,
    ) -> None:
        now, device = self._time.now(), self.device

        def end(refused: str | None) -> None:
            if refused is None:
                answered(self._carried_out(command))
            else:
                answered(CommandOutcome("unavailable" if self.down else "refused", refused))

        match command:
            case _ if self.down is not None:
                end(self.down)
            case Add(settings):
                spec = self._all[settings.name]
                ready = self._time.ready_at(self.name, spec)

                def join() -> None:
                    here = self._time.now(), spec, self._costs(self.name, spec), by
                    end(device.join(*here) if self.down is None else self.down)

                if ready > now:
                    self._time.at(ready, join)
                else:
                    join()
            case Remove(model, patience):
                device.leave(now, model, end, by)
                if patience < inf:
                    self._time.at(now + patience, lambda: self._end_requests(model))
            case _:
                assert isinstance(command, LoopCommand), "nothing else is a command to a device"
                device.order(now, self._next, command, end, by)

    def _end_requests(self, model: str) -> None:
        """Fail the open requests of a model whose time to leave is over, unless it has left."""
        if self.down is None and self.device.is_leaving(model):
            self.device.order(self._time.now(), self._next, Leave(model, at_once=True))

    def _carried_out(self, command: Command) -> CommandOutcome:
        self.fleet = command.applied(self.fleet)
        self.specs = {m.name: at_levels(self._all[m.name], m) for m in self.fleet.models}
        self.leaving &= self.specs.keys()
        return CommandOutcome(specs=dict(self.specs))

    @property
    def _next(self) -> str:
        return f"{self.name}-{next(self._numbers)}"


def settings_of(specs: Iterable[ModelSpec], device: DeviceSettings) -> FleetSettings:
    """Return the settings of a fleet that serves `specs`, which come from no files."""
    models = []
    for spec in specs:
        adapters = (at_levels(AdapterSettings(name=a.name, path=""), a) for a in spec.adapters)
        own = ModelSettings(name=spec.name, path="", adapters=tuple(adapters))
        models.append(at_levels(own, spec))
    return FleetSettings(models=tuple(models), device=device)
