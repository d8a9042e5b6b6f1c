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


def test_each_estimate_is_wrong_either_way_in_half_of_the_workloads() -> None:
    cases = arbiter_ablation.wrong_cases(40, ["a", "b"])
    assert len({(workload, seed) for workload, seed, _ in cases}) == 40
    for i, name in enumerate(arbiter_ablation.ESTIMATES):
        assert {given[i][0] for *_, given in cases} == {name}
        factors = [given[i][1] for *_, given in cases]
        assert factors.count(3.0) == factors.count(1 / 3) == 20
    assert len({given for *_, given in cases}) > 8, "they are drawn apart"


def test_wrong_estimates_are_judged_by_the_worst_kind_of_workload() -> None:
    cases = arbiter_ablation.wrong_cases(4, ["a", "b"])
    found = arbiter_ablation.wrong_summary(
        cases, [0.9, 0.5, 0.8, 0.6], [0.9, 0.7, 0.8, 0.6], [0.8, 0.6, 0.7, 0.6]
    )
    assert found["wrong.mean"] == pytest.approx((10 - 10 + 10 + 0) / 4)
    assert found["wrong.kinds"] == pytest.approx({"a": 10.0, "b": -5.0})
    assert found["worst_wrong"] == pytest.approx(-5.0)
    assert found["wrong.lost"] == pytest.approx(5.0)
    assert found["wrong.below"] == pytest.approx(0.25)
