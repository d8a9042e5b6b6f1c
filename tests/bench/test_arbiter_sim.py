"""What `arbiter_sim` says of runs; the runs themselves are not made here."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import ballast.policy
from benchmarks import arbiter_sim
from benchmarks.arbiter_workloads import ALL, ELSEWHERE, WORKLOADS


def shares(ours: float, **others: float) -> dict[str, list[float]]:
    rest = dict.fromkeys(arbiter_sim.RIVALS, 0.5) | others
    return {arbiter_sim.OURS: [ours], **{p: [share] for p, share in rest.items()}}


def test_the_worst_cell_and_the_headroom_are_of_the_best_other() -> None:
    found = arbiter_sim.summary(
        {
            ("a", 4.0): {**shares(0.9, prism=0.8), arbiter_sim.AMPLE: [1.0]},
            ("b", 4.0): {**shares(0.6, balloon=0.7), arbiter_sim.AMPLE: [0.7]},
        }
    )
    assert found["worst_vs_best_other"] == pytest.approx(-10.0)
    assert found["headroom_closed"] == pytest.approx(0.5)  # of the first alone
    assert found["closed_of_sums"] == pytest.approx(0.5)
    assert found["closed_interval"] is None
    assert found["mean_vs_unseen_best"] is None
    assert found["cells"]["b.4"]["best_other"] == "balloon"


def test_rivals_have_the_better_of_both_orders_and_are_dropped_ten_points_behind() -> None:
    by_row = {
        "prism+round-robin": 0.9,
        "prism+deadline": 0.8,
        "balloon+round-robin": 0.7,
        "balloon+deadline": 0.85,
        arbiter_sim.OURS: 0.6,
        f"{arbiter_sim.AMPLE} balloon+deadline": 1.0,
    }
    asked = []

    class Measured:
        def run(self, wanted: list[tuple[str, float, str, int]]) -> list[float]:
            asked.extend(wanted)
            return [by_row.get(row, 0.3) - 0.01 * seed for _, _, row, seed in wanted]

    bench = cast(arbiter_sim.Bench, Measured())
    better = arbiter_sim.better_rows(bench, "steady", 4.0, ["prism", "balloon", "lru"])
    found = arbiter_sim.cell(bench, "steady", 4.0, 2, better)
    assert found[arbiter_sim.AMPLE] == [1.0, 0.99]
    assert found["prism"] == pytest.approx([0.9, 0.89])
    assert found["balloon"] == pytest.approx([0.85, 0.84])
    assert found["lru"] == pytest.approx([0.3])
    assert found[arbiter_sim.OURS] == pytest.approx([0.6, 0.59])
    assert {row for *_, row, seed in asked if seed} == {
        arbiter_sim.OURS,
        "prism+round-robin",
        "balloon+deadline",
        f"{arbiter_sim.AMPLE} balloon+deadline",
    }


def test_a_small_denominator_moves_the_mean_of_parts_but_not_the_part_of_sums() -> None:
    cells = {
        (name, 4.0): {**shares(ours, prism=0.8), arbiter_sim.AMPLE: [ample]}
        for name, ours, ample in (("a", 0.86, 0.9), ("b", 0.86, 0.9), ("c", 0.74, 0.82))
    }
    found = arbiter_sim.summary(cells)
    assert found["headroom_closed"] == pytest.approx((0.6 + 0.6 - 3.0) / 3)
    assert found["closed_of_sums"] == pytest.approx(6 / 22)


def test_an_interval_of_cells_that_are_alike_has_no_width() -> None:
    assert arbiter_sim.drawn_again([(2.0, 4.0)] * 5) == pytest.approx((0.5, 0.5))
    low, high = arbiter_sim.drawn_again([(0.0, 4.0), (4.0, 4.0)] * 5) or (0, 0)
    assert 0.0 < low < 0.5 < high < 1.0


def test_the_best_other_on_unseen_seeds_is_chosen_without_the_seed_it_is_compared_on() -> None:
    of = {arbiter_sim.OURS: [0.5, 0.5], "prism": [0.7, 0.4], "lru": [0.3, 0.6]}
    assert arbiter_sim.beside_unseen(of) == pytest.approx([20.0, 10.0])


def test_rivals_are_presets_of_their_own_or_with_an_option() -> None:
    for row in (row for rows in arbiter_sim.ROWS.values() for row in rows):
        assert arbiter_sim.preset_of(row).order == row.partition("+")[2]
    assert arbiter_sim.preset_of("aegaeon+deadline").values["preemptive"] == 1.0
    assert arbiter_sim.preset_of("warmserve+deadline").values["restore"] == 1.0
    assert arbiter_sim.preset_of("superinfer+deadline").name.startswith("superinfer")


def test_kept_runs_of_rivals_depend_on_no_code_of_ours() -> None:
    """No policy of a rival imports a file whose changes keep the runs of rivals."""
    policy = Path(ballast.policy.__file__).parent
    names = [own.removesuffix(".py").rstrip("/").replace("/", ".") for own in arbiter_sim.OWN]
    for file in policy.rglob("*.py"):
        if not arbiter_sim.is_own(f"ballast/policy/{file.relative_to(policy).as_posix()}"):
            text = file.read_text()
            assert not [name for name in names if f"import ballast.policy.{name}" in text]
            assert not [name for name in names if f"from ballast.policy.{name}" in text], file


def test_paired_differences_have_an_interval() -> None:
    low, high = arbiter_sim.interval([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((10.0, 10.0))
    assert arbiter_sim.interval([0.9], [0.8]) is None


@pytest.mark.parametrize("name", ALL)
def test_workloads_are_drawn_by_seed(name: str) -> None:
    of = ALL[name]
    one, again, other = (of.make(4.0, 10.0, seed) for seed in (1, 1, 2))
    assert one.requests == again.requests != other.requests
    assert {r.model for r in one.requests} <= set(of.names)


def test_three_workloads_run_on_other_devices_too_at_as_many_requests_a_device() -> None:
    assert len(ELSEWHERE) == 9
    asked: list[float] = []

    class Measured:
        def run(self, wanted: list[tuple[str, float, str, int]]) -> list[float]:
            asked.extend(rate for _, rate, _, _ in wanted)
            return [1.0 for _ in wanted]

    bench = cast(arbiter_sim.Bench, Measured())
    assert arbiter_sim.knee(bench, "arena@8xA100", rates=(1.0, 2.0, 4.0)) == 32.0
    assert set(asked) == {16.0, 32.0}
    assert ELSEWHERE["long_tail@4xH20"].scale == 2.0, "it has two devices already"
    for name, of in ELSEWHERE.items():
        assert of.models == WORKLOADS[name.partition("@")[0]].models
