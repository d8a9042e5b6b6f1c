"""The queue of a model: sorted whatever comes and goes, and its snapshot always that of now."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import UNMEASURED
from ballast.core.errors import BrokenPromise
from ballast.core.link import LinkRates
from ballast.core.request import Order, Request, Submission
from ballast.core.view import RequestView
from ballast.engine.waiting import Waiting
from ballast.sim.device import Profile
from ballast.sim.simulate import simulate
from tests.sim.test_enough_memory import world


def request(rank: int, arrival: float, sequence: int) -> Request:
    id = f"r{sequence}"
    submission = Submission(id=id, model="m", prompt=(1,) * (1 + sequence), max_tokens=4)
    return Request(submission, [*submission.prompt], Order(rank, arrival, sequence), "m")


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 1), st.integers(0, 3)), max_size=40))
def test_like_a_sorted_list(steps: list[tuple[bool, int, int]]) -> None:
    waiting, plain = Waiting(), list[Request]()
    for sequence, (comes, rank, arrival) in enumerate(steps):
        if comes or not plain:
            new = request(rank, float(arrival), sequence)
            waiting.add(new)
            plain = sorted([*plain, new], key=lambda r: r.order)
            assert waiting.first is plain[0]
        else:
            waiting.remove(plain.pop(arrival % len(plain)))
        assert list(waiting) == plain
        assert len(waiting) == len(plain)
        seen = [(v.id, v.order, v.tokens, v.computed, v.pages) for v in waiting.snapshot()]
        assert seen == [(r.id, r.order, len(r.tokens), 0, 0) for r in plain]
        assert waiting.snapshot() is waiting.snapshot()


def test_who_does_not_wait_cannot_go() -> None:
    waiting = Waiting()
    waiting.add(request(0, 1.0, 1))
    for other in (request(0, 1.0, 1), request(0, 1.0, 2)):
        with pytest.raises(BrokenPromise):
            waiting.remove(other)
    assert len(waiting) == 1


def test_a_long_queue_costs_no_more_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of requests are made as they come, not whenever a policy is asked."""
    made: Counter[str] = Counter()

    def counted(id: str, *rest: Any, **more: Any) -> RequestView:
        made[id] += 1
        return RequestView(id, *rest, **more)

    monkeypatch.setattr("ballast.engine.waiting.RequestView", counted)
    fleet, (spec, *_), _ = world(1, "balloon")
    requests = [
        Submission(id=f"r{i}", model=spec.name, prompt=(i,), max_tokens=2, ignore_eos=True)
        for i in range(60)
    ]
    one = replace(spec, max_running=1)
    profile = Profile(costs={spec.name: UNMEASURED}, link=LinkRates.even(1e9), overhead=1e-3)
    done = simulate(fleet, [one], requests, profile, lambda at, output: None)
    assert done.state.models[spec.name].preemptions == 0
    assert made == dict.fromkeys((r.id for r in requests), 1)
