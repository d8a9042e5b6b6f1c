"""A goal is met or missed by the figure alone; noise stands beside it, nothing is nothing."""

from __future__ import annotations

import pytest

from benchmarks.common import MET, MISSED, NOT_STATED, verdict
from benchmarks.fidelity_runs import capacity_errors
from benchmarks.sim_fidelity import Cell, Point, same_order, summary_of

NOISY = 1.0, 3.0, 5.0
"""Live runs whose spread, 4/3 of their median, is larger than any error below."""


def cell(
    metric: str, live: tuple[float, ...], virtual: float, preset: str = "swap", rate: float = 0.5
) -> Cell:
    return Cell(Point(preset, rate), metric, live, (virtual,) * len(live))


def cells(error: float, live: tuple[float, ...] = NOISY) -> list[Cell]:
    metrics = ("output_tokens_per_second", "ttft_p50", "tpot_p50", "ttft_p99", "tpot_p99")
    return [cell(m, live, sorted(live)[1] * (1 + error)) for m in metrics]


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0.1, {"at_most": 0.1}, MET),
        (0.146, {"at_most": 0.1}, MISSED),
        (1.9, {"at_least": 2.0}, MISSED),
        (2.0, {"at_least": 2.0}, MET),
        (None, {"at_most": 0.1}, NOT_STATED),
    ],
)
def test_a_verdict_follows_from_the_goal(
    value: float | None, bounds: dict[str, float], expected: str
) -> None:
    assert verdict(value, **bounds) == expected


def test_noise_never_makes_a_pass() -> None:
    """The figures that were called met: 0.146 against 0.1, and 0.408 against 0.2."""
    missed = summary_of([*cells(0.146)[:3], *cells(0.408)[3:]], [0.5])
    assert missed["median_error_max"] == pytest.approx(0.146)
    assert missed["p99_error_max"] == pytest.approx(0.408)
    assert (missed["median_error"], missed["p99_error"]) == (MISSED, MISSED)
    assert (missed["median_cells_met"], missed["p99_cells_met"]) == ("0 of 3", "0 of 2")
    assert missed["live_spread_max"] == pytest.approx(4 / 3)
    within = summary_of([*cells(0.09)[:3], *cells(0.19)[3:]], [0.5])
    assert (within["median_error"], within["p99_error"]) == (MET, MET)
    assert cells(0.15)[3].to_json()["verdict"] == MET
    assert cells(0.15)[0].to_json()["verdict"] == MISSED


def test_an_order_of_no_pair_is_not_stated() -> None:
    assert summary_of(cells(0.0), [0.5])["same_order"] == NOT_STATED
    fast = cell("ttft_p50", (1.0, 1.1, 1.2), 1.1)
    slow = cell("ttft_p50", (2.0, 2.1, 2.2), 2.1, preset="static")
    assert same_order([fast, slow], [0.5]) == (1, 1)
    assert summary_of([*cells(0.0), fast, slow], [0.5])["same_order"] is True
    swapped = cell("ttft_p50", (2.0, 2.1, 2.2), 1.0, preset="static")
    assert summary_of([*cells(0.0), fast, swapped], [0.5])["same_order"] is False
    overlapping = cell("ttft_p50", (1.1, 2.1, 2.2), 1.0, preset="static")
    assert same_order([fast, overlapping], [0.5]) == (0, 0)


def test_capacity_in_virtual_time_is_held_against_the_live_one() -> None:
    """As seen: 2.26 live, 4.27 in virtual time."""
    found = capacity_errors({"weights": 2.26, "one": 1.0}, {"weights": 4.27, "one": 1.05}, 0.1)
    assert found["capacity_error_max"] == pytest.approx(4.27 / 2.26 - 1)
    assert found["capacity"] == MISSED
    assert capacity_errors({"one": 1.0}, {"one": 1.05}, 0.1)["capacity"] == MET
    for live in ({}, {"one": 0.0}, {"one": 1.0, "weights": 0.0}):
        found = capacity_errors(live, {"one": 1.0, "weights": 1.0}, 0.1)
        assert found["capacity"] == NOT_STATED
