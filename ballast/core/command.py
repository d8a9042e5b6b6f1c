"""Define the commands that change which models a device serves, and the unions of commands.

Sent through the controller to a worker, as plain data. Those about one model are orders as well
(`core.order`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.core.actions import ActivateCommand, Change, EvictCommand, MemoryCommand
from ballast.core.fleet_state import CommandOutcome as CommandOutcome
from ballast.core.order import ChooseDevices, Fleet, ModelOrder, Step
from ballast.core.settings import FleetSettings, ModelSettings


@dataclass(frozen=True, slots=True)
class Add(ModelOrder):
    """Load a model beside those that are served, and serve it with its adapters."""

    settings: ModelSettings
    at_start: bool = False
    """Whether the model belongs to the fleet of a server that starts: it is loaded as fast as the
    machine can, not behind those that serve."""

    exclusive = True

    @property
    def model(self) -> str:  # type: ignore[override]
        return self.settings.name

    def refusal(self, fleet: FleetSettings, served: Collection[str]) -> str | None:
        for model in fleet.models:
            both = self.settings.names & model.names
            if both and model.name != self.model:
                return f"there is a model {min(both)!r} already"
        # A single device knows what it serves.
        if fleet.others and self.model in served:
            return f"there is a model {self.model!r} already"
        return None

    def undoing(self, fleet: FleetSettings) -> Remove:
        return Remove(self.model, 0.0)

    def applied(self, fleet: FleetSettings) -> FleetSettings:
        # A model that could not be loaded may have the same name.
        others = (m for m in fleet.models if m.name != self.model)
        return replace(fleet, models=(*others, self.settings))

    def concerned(self, fleet: Fleet) -> Generator[Step, Any, Sequence[str] | CommandOutcome]:
        chosen: Sequence[str] | CommandOutcome = yield ChooseDevices(self.settings)
        return chosen


@dataclass(frozen=True, slots=True)
class Remove(ModelOrder):
    """Remove a model, with its adapters, from the device and from host memory.

    New requests are refused at once; open ones have `patience` seconds to end, then they fail.
    """

    model: str
    patience: float

    exclusive = True

    def refusal(self, fleet: FleetSettings, served: Collection[str]) -> str | None:
        if set(served) == {self.model}:
            return f"{self.model!r} is the only model that is served; add another one first"
        return None

    def applied(self, fleet: FleetSettings) -> FleetSettings:
        return replace(fleet, models=tuple(m for m in fleet.models if m.name != self.model))

    def concerned(self, fleet: Fleet) -> Generator[Step, Any, Sequence[str] | CommandOutcome]:
        yield from ()
        return fleet.assigned(self.model) or (fleet.serving(self.model) or list(fleet))[:1]


ModelCommand = Add | Remove | Change | ActivateCommand | EvictCommand
"""Commands about a model."""
DeviceCommand = ModelCommand | MemoryCommand
"""Commands to one device."""
