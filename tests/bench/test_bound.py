"""Bounds that no preset may exceed, and worlds that are the same for every preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bound import PREEMPTIONS, STALL, WORST_MODEL, Kept, Outcome, world

GOOD = Outcome(
    requests=100,
    attained=0.5,
    answered=1.0,
    stall=STALL,
    preemptions=PREEMPTIONS,
    loaded_bytes=0.0,
    worst_model=WORST_MODEL,
    unanswered=0,
)


@pytest.mark.parametrize(
    ("change", "beyond"),
    [
        ({}, []),
        ({"stall": STALL * 1.01}, ["stall"]),
        ({"preemptions": PREEMPTIONS + 0.01}, ["preemptions"]),
        ({"worst_model": WORST_MODEL - 0.01}, ["worst model"]),
        ({"unanswered": 1, "stall": 9.0}, ["stall", "lost"]),
    ],
)
def test_what_is_beyond_a_bound_is_named(change: dict[str, float], beyond: list[str]) -> None:
    assert replace(GOOD, **change).beyond == beyond  # type: ignore[arg-type]


def test_outcomes_that_were_kept_are_there_for_a_later_call(tmp_path: Path) -> None:
    assert Kept(None).outcomes() == {}
    kept = Kept(tmp_path / "outcomes.jsonl")
    assert kept.outcomes() == {}
    worse = replace(GOOD, preemptions=3.0)
    kept.add("lru", 4, GOOD)
    Kept(None).add("lru", 5, worse)
    kept.add("swap", 4, worse)
    assert kept.outcomes() == {("lru", 4): GOOD, ("swap", 4): worse}


def test_a_seed_draws_the_same_world_and_another_one_another() -> None:
    assert world(3) == world(3)
    assert world(3).workload.requests != world(4).workload.requests
    assert {world(seed).planned for seed in range(8)} == {True, False}
    for seed in range(8):
        drawn = world(seed)
        assert 2 <= len(drawn.specs) <= 10
        assert {r.model for r in drawn.workload.requests} <= {s.name for s in drawn.specs}
