"""Fleet policies, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ballast.policy.base import FleetPolicy
from ballast.policy.follow import Follow
from ballast.policy.migrate import LeastPressure
from ballast.policy.stay import FixedPlacement

PLACEMENTS: Mapping[str, FleetPolicy] = {
    "weights": FixedPlacement(),
    "work": FixedPlacement(by_work=True),
    "follow": Follow(),
    "both": Follow(by_work=True),
    "kvpr": LeastPressure(),
}
"""By the name that `placement` gives them."""
