"""What `sim_fidelity` serves: its trace at a rate, begun anew where it is too short."""

from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.fidelity_runs import repeated


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
