"""Keep each model on the devices where it was placed at the start.

The fleet policies of placements `weights`, `work` and `random`; no model moves but by an operator's
command.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import fitting, spread


@dataclass(frozen=True, slots=True)
class FixedPlacement(FleetPolicy):
    """Place models by their weights and, with `by_work`, by their expected work, where that is
    known: a model too busy for one device gets several. Never moves a model afterwards."""

    by_work: bool = False

    @property
    def replicates(self) -> bool:
        return self.by_work

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return spread(needs, rooms, by_work=self.by_work)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)


@dataclass(frozen=True, slots=True)
class RandomPlacement(FleetPolicy):
    """Place each model on one of the devices that can serve it, whatever else is there, as
    baselines do (C2CServe, 7.4). The draw follows from `seed` and the model's name, so that further
    models change no other's."""

    seed: float = 0

    options: ClassVar = ("seed",)

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {
            need.model: [
                random.Random(f"{self.seed:g} {need.model}").choice(fitting(need, rooms)).device
            ]
            for need in needs
        }

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)
