"""`fleet_decision` measures each decision of the controller that runs in the simulator."""

from __future__ import annotations

import pytest

from ballast.control.orders import Orders
from benchmarks.fleet_decision import PLACEMENTS, decisions, preset_of, summary


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_look_of_a_policy_is_measured_once(name: str) -> None:
    before = Orders._decide
    found = decisions(name, 3, 2, 10.0, rate=1.0)
    assert Orders._decide is before
    assert preset_of(name).fleet.decides
    assert len(found) >= 2
    assert min(found) > 0
    assert summary(found)["n"] == len(found)
