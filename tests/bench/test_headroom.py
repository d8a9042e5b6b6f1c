"""The bound of `headroom` holds for every schedule; the runs are not made here."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import StepCosts
from ballast.core.settings import Slo
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.headroom import Job, bound, unavoidable

COSTS = {"m": StepCosts(0.5, 0.1, 0.01, 0.0, 0.0)}
SLO = Slo(ttft=1.0, tpot=0.1)


def can_all_be_done(jobs: tuple[Job, ...]) -> bool:
    """Whether one lane does all of them in time: the earliest deadline first, in small steps."""
    left = {i: round(job.seconds * 4) for i, job in enumerate(jobs)}
    for tick in range(200):
        now = tick / 4
        able = [i for i, n in left.items() if n and jobs[i].start <= now]
        if able:
            first = min(able, key=lambda i: jobs[i].due)
            if now + 0.25 > jobs[first].due:
                return False
            left[first] -= 1
    return True


quarters = st.integers(1, 8).map(lambda n: n / 4)
jobs = st.lists(st.tuples(quarters, quarters, quarters), min_size=1, max_size=5)


@given(jobs)
def test_no_schedule_misses_fewer_than_are_unavoidable(
    made: list[tuple[float, float, float]],
) -> None:
    found = sorted(Job(start, start + length, seconds) for start, length, seconds in made)
    n = len(found)
    most = max(k for k in range(n + 1) if any(map(can_all_be_done, combinations(found, k))))
    assert unavoidable(found, 1) <= n - most


def test_a_crowd_must_miss_and_two_lanes_halve_it() -> None:
    crowd = [Job(0.0, 1.0, 0.3)] * 10
    assert unavoidable(crowd, 1) == 7
    assert unavoidable(crowd, 2) == 4  # by work alone: 3 jobs a lane, and a third of one
    assert unavoidable([Job(0.0, 1.0, 1.5)], 2) == 1, "one job has one lane"
    assert unavoidable([*crowd, *(job._replace(start=9.0, due=10.0) for job in crowd)], 1) == 14


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload.of("w", requests, "made")


def asked(at: float, prompt: int, output: int = 1, blocks: int = 0) -> WorkloadRequest:
    return WorkloadRequest(
        id=round(100 * at),
        at=at,
        model="m",
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_blocks=tuple(range(blocks)) or None,
        block_tokens=4 if blocks else 0,
    )


def test_prompts_and_answers_bound_what_can_be_attained() -> None:
    assert bound(workload(asked(0.0, 11)), COSTS, 1, SLO) == 0.0
    assert bound(workload(asked(0.0, 9)), COSTS, 1, SLO) == 1.0
    same = [asked(0.0, 9, blocks=2), asked(0.1, 9, blocks=2)]
    assert bound(workload(*same), COSTS, 1, SLO) == 1.0, "its blocks are cached"
    assert bound(workload(*(replace(r, prefix_blocks=None) for r in same)), COSTS, 1, SLO) == 0.5
    slow = {"m": replace(COSTS["m"], per_sequence=0.2)}
    assert bound(workload(asked(0.0, 9, output=30)), slow, 1, SLO) == 0.0, "0.2 s for 0.1"
