"""Keep each model on the devices where it was placed at the start.

The fleet policy of placements `weights` and `work`; no model moves but by an operator's command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.fleet import FleetDecision, FleetView, Need, Room
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import spread


@dataclass(frozen=True, slots=True)
class FixedPlacement(FleetPolicy):
    """Place models by their weights and, with `by_work`, by their expected work, where that is
    known: a model too busy for one device gets several. Never moves a model afterwards."""

    by_work: bool = False

    @property
    def replicates(self) -> bool:
        return self.by_work

    def place(self, needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
        return spread(needs, rooms, by_work=self.by_work)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)
