"""What profiles say of published runs is what a simulation of these runs finds."""

from __future__ import annotations

import pytest

from ballast.sim.profile import device_profile
from benchmarks.published_runs import DEVICE, RUNS
from benchmarks.sim_published import served


@pytest.mark.parametrize("n", [0, 2])
def test_a_run_is_as_far_off_as_its_profile_says(n: int) -> None:
    run, profile = RUNS[n], device_profile(DEVICE)
    (held,) = (row for row in profile.held if (row.engine, row.tp) == (profile.engine, run.tp))
    ttft, tpot = served(run, profile)
    assert abs(ttft / run.ttft - 1) <= abs(held.ttft_worst) + 5e-4
    assert abs(tpot / run.tpot - 1) <= abs(held.tpot_worst) + 5e-4


def test_each_group_size_of_the_runs_is_in_the_profile() -> None:
    held = {row.tp: row.runs for row in device_profile(DEVICE).held}
    assert held == {tp: sum(run.tp == tp for run in RUNS) for tp in (1, 2, 4)}
    assert all(0.005 < run.tpot < 0.03 for run in RUNS)
