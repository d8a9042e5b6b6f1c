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
from ballast.core.model import AdapterSpec
from ballast.core.request import Precedence, Request, Submission
from ballast.core.settings import Slo
from ballast.core.view import RequestView
from ballast.engine.waiting import Waiting
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.policy import worlds
from tests.sim.test_enough_memory import world

SPEC = worlds.spec()


def request(rank: int, arrival: float, sequence: int) -> Request:
    id = f"r{sequence}"
    submission = Submission(id=id, model="m", prompt=(1,) * (1 + sequence), max_tokens=4)
    return Request(submission, [*submission.prompt], Precedence(rank, arrival, sequence), "m")


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
        seen = [(v.id, v.order, v.tokens, v.computed, v.pages) for v in waiting.snapshot(SPEC)]
        assert seen == [(r.id, r.order, len(r.tokens), 0, 0) for r in plain]
        assert waiting.snapshot(SPEC) is waiting.snapshot(SPEC)


def of_tenant(tenant: str, sequence: int) -> Request:
    made = request(0, float(sequence), sequence)
    return replace(made, submission=replace(made.submission, tenant=tenant))


def test_tenants_take_turns_whatever_one_of_them_has_waiting() -> None:
    waiting = Waiting()
    for n in range(100):
        waiting.add(of_tenant("flood", n))
    for _ in range(10):
        waiting.admit(waiting.first)
    for n in range(100, 103):
        waiting.add(of_tenant("other", n))
    waiting.remove(list(waiting)[-1])  # who leaves from the end moves nobody's turn
    waiting.add(of_tenant("third", 103))
    admitted = []
    for _ in range(8):
        first = waiting.first
        waiting.admit(first)
        admitted.append((first.submission.tenant, first.order.sequence))
    others = [("other", 100), ("third", 103), ("other", 101), ("other", 102)]
    assert [a for a in admitted if a[0] != "flood"] == others
    assert admitted[:3] == [("other", 100), ("third", 103), ("flood", 10)]
    assert [n for tenant, n in admitted if tenant == "flood"] == [10, 11, 12, 13]


def test_preempted_requests_keep_their_turn() -> None:
    waiting = Waiting()
    for n in range(3):
        waiting.add(of_tenant("a", n))
    preempted = waiting.first
    waiting.admit(preempted)
    waiting.add(of_tenant("b", 3))
    waiting.add(preempted)
    assert waiting.first is preempted


def test_a_request_that_was_elsewhere_comes_in_the_order_of_its_tenant() -> None:
    waiting = Waiting()
    for n in (0, 2, 4):
        waiting.add(of_tenant("a", n))
    waiting.add(of_tenant("b", 5))
    waiting.add(of_tenant("a", 1))
    assert [r.order.sequence for r in waiting if r.submission.tenant == "a"] == [0, 1, 2, 4]


def test_deadlines_follow_the_spec_and_the_adapter() -> None:
    """Whenever a request came, its deadlines are those of the spec that the snapshot is made by."""
    tuned = AdapterSpec(name="tuned", fingerprint="1", rank=1, slo=Slo(ttft=5.0, tpot=0.5))
    spec = replace(SPEC, slo=Slo(ttft=1.0, tpot=0.25), adapters=(tuned,))
    hasty = replace(spec, slo=Slo(ttft=0.5, tpot=0.125))
    waiting, own, adapted = Waiting(), request(0, 2.0, 1), request(0, 3.0, 2)
    own.submission = replace(own.submission, arrival=2.0)
    adapted.submission = replace(adapted.submission, arrival=3.0)
    adapted.adapter = 0
    waiting.add(own)
    assert [(v.due, v.pace) for v in waiting.snapshot(spec)] == [(3.0, 0.25)]
    waiting.add(adapted)
    assert [(v.due, v.pace) for v in waiting.snapshot(spec)] == [(3.0, 0.25), (8.0, 0.5)]
    assert [(v.due, v.pace) for v in waiting.snapshot(hasty)] == [(2.5, 0.125), (8.0, 0.5)]
    own.first_token_at = own.last_token_at = 2.25
    own.tokens += [7, 8]
    waiting.remove(own)
    waiting.add(own)
    seen = waiting.snapshot(hasty)[0]
    assert (seen.generated, seen.max_tokens, seen.left) == (2, 4, 2)
    assert (seen.first, seen.last, seen.next_due) == (2.25, 2.25, 2.5)
    late = waiting.snapshot(replace(spec, slo=Slo(ttft=0.125, tpot=0.25)))[0]
    assert late.next_due == float("-inf")
    waiting.remove(own)
    waiting.remove(adapted)
    assert waiting.snapshot(spec) == ()


def test_places_count_among_requests_of_one_priority() -> None:
    waiting = Waiting()
    requests = [request(rank, float(i), i) for i, rank in enumerate((0, 0, -1, 0))]
    for r in requests:
        waiting.add(r)
    a, b, first, c = requests
    waiting.snapshot(SPEC)
    news = waiting.news.n
    waiting.move(a, 1)
    waiting.move(first, 1)
    waiting.move(c, -1)
    assert list(waiting) == [first, c, b, a]
    assert [(v.id, v.place) for v in waiting.snapshot(SPEC)] == [
        ("r2", 1),
        ("r3", -1),
        ("r1", 0),
        ("r0", 1),
    ]
    assert waiting.news.n == news, "a policy that is asked again would ask itself for ever"
    waiting.remove(a)
    waiting.add(a)
    assert list(waiting) == [first, c, b, a], "a preempted request keeps its place"


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
    profile = MachineProfile(costs={spec.name: UNMEASURED}, link=LinkRates.even(1e9), overhead=1e-3)
    done = simulate(fleet, [one], requests, profile, lambda at, output: None)
    assert done.state.models[spec.name].preemptions == 0
    assert made == dict.fromkeys((r.id for r in requests), 1)
