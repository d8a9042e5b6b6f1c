"""What `sim_fidelity` serves: its trace at a rate, begun anew where it is too short."""

import itertools
from pathlib import Path

from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.fidelity_runs import Runs, alike, repeated
from benchmarks.sim_fidelity import COMPARED


def trace() -> Workload:
    times = (0.5, 2.0)
    return Workload.of(
        "two",
        [
            WorkloadRequest(id=i, at=at, model="m", prompt_tokens=1 + i, output_tokens=1)
            for i, at in enumerate(times)
        ],
    )


def test_a_trace_repeats_with_the_same_gaps_and_ids_of_its_own() -> None:
    thrice = repeated(trace(), 4.0, 3)
    assert [r.at for r in thrice.requests] == [0.5, 2.0, 4.5, 6.0, 8.5, 10.0]
    assert [r.prompt_tokens for r in thrice.requests] == [1, 2] * 3
    assert len({r.id for r in thrice.requests}) == 6


def test_a_trace_that_is_long_enough_is_left_as_it_is() -> None:
    assert repeated(trace(), 4.0, 1).requests == trace().requests


def test_every_run_lies_between_two_profiles_that_neighbours_share(tmp_path: Path) -> None:
    runs = Runs(tmp_path, Path("none"), 1.0, 1, COMPARED)
    presets = list(COMPARED.rows)
    for turn, order in ((0, presets), (1, presets[::-1])):
        profiles = [runs.around(preset, turn) for preset in order]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(profiles))
        assert len({name for pair in profiles for name in pair}) == len(presets) + 1


def test_decisions_are_alike_as_far_as_they_have_the_same_order() -> None:
    assert alike(["a", "b", "c"], ["a", "b", "c"]) == 1.0
    assert alike(["a", "b", "c"], ["a", "c"]) == 0.8
    assert alike(["a"], []) == 0.0
    assert alike([], []) is None
