"""What `arbiter_ablation` switches off, and what it makes of runs; the runs are not made here."""

from __future__ import annotations

import pytest

from ballast.policy.presets import option_names
from ballast.sim.distorted_traffic import Distortion
from benchmarks import arbiter_ablation


def test_every_ablation_is_an_option_of_the_preset_or_an_estimate() -> None:
    for given in arbiter_ablation.ablations().values():
        factors = {name: value for name, value in given if name not in option_names("ballast")}
        assert not factors or Distortion(**factors) != Distortion()


def test_points_lost_are_means_over_seeds_compared_by_workload() -> None:
    whole = {"a": [0.9, 0.7], "b": [0.5, 0.5]}
    found = arbiter_ablation.lost(whole, {"a": [0.8, 0.6], "b": [0.6, 0.5]})
    assert found["mean"] == pytest.approx((10 - 5) / 2)
    assert found["most"] == pytest.approx(10)
