"""Place each model on a device that is drawn, as baselines do (C2CServe, 7.4).

The fleet policy of placement `random`; no model moves but by an operator's command.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ballast.core.fleet import FleetDecision, FleetView, Need, Room
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import fitting


@dataclass(frozen=True, slots=True)
class RandomPlacement(FleetPolicy):
    """Place each model on one of the devices that can serve it, whatever else is there. The draw
    follows from `seed` and the model's name, so that further models change no other's."""

    seed: float = 0

    options: ClassVar = ("seed",)

    def place(self, needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
        return {
            need.model: [
                random.Random(f"{self.seed:g} {need.model}").choice(fitting(need, rooms)).device
            ]
            for need in needs
        }

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)
