"""The order of admission: late requests last, and none of them behind others for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Action, Reorder
from ballast.core.cost import UNMEASURED, StepCosts
from ballast.core.event import Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.core.view import DeviceView, RequestView
from ballast.policy.admission.late_last import (
    IN_TIME,
    LATE,
    MARGIN,
    PROMOTED,
    LateLast,
    Overtaken,
    is_late,
)
from ballast.policy.market.offers import oldest
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.policy.worlds import device, model, request
from tests.sim.test_enough_memory import world

NOW = 100.0


def queue(*waiting: RequestView) -> DeviceView:
    return replace(device(model("a", waiting=waiting), free=0), now=NOW)


def waits(sequence: int, seconds: float, place: int = IN_TIME) -> RequestView:
    """A request that has waited for so long; its first token is due after 1 s."""
    return request(sequence, arrival=NOW - seconds)._replace(place=place)


def moves(actions: tuple[Action, ...]) -> dict[str, int]:
    return {id: a.place for a in actions if isinstance(a, Reorder) for id in a.requests}


def test_late_requests_go_behind_those_that_can_be_in_time() -> None:
    view = queue(waits(1, 3.0), waits(2, 1.5), waits(3, 0.2))
    decision = LateLast()(view, None)
    assert moves(decision.actions) == {"r1": LATE, "r2": LATE}
    assert decision.wake_at == NOW + LONGEST_WAIT


def test_without_the_option_the_order_is_first_come_first_served() -> None:
    assert LateLast(late_last=0)(queue(waits(1, 3.0), waits(2, 0.2)), None).actions == ()


def test_nothing_is_asked_for_twice() -> None:
    view = queue(waits(3, 0.2), waits(1, 3.0, LATE), waits(2, 1.5, LATE))
    assert LateLast()(view, None).actions == ()


def test_a_queue_of_late_requests_alone_keeps_its_order_and_needs_no_timer() -> None:
    decision = LateLast()(queue(waits(1, 3.0, LATE), waits(2, 1.5, LATE)), None)
    assert (decision.actions, decision.wake_at) == ((), None)


def test_the_oldest_late_request_comes_first_after_a_while() -> None:
    view = queue(waits(3, 0.2), waits(1, 30.0, LATE), waits(2, 20.0, LATE))
    before = Overtaken({"a": NOW - LONGEST_WAIT + 1})
    assert LateLast()(view, before).actions == ()
    assert LateLast()(view, before).wake_at == NOW + 1
    decision = LateLast()(view, Overtaken({"a": NOW - LONGEST_WAIT}))
    assert moves(decision.actions) == {"r1": PROMOTED}
    first = queue(waits(1, 30.0, PROMOTED), waits(3, 0.2), waits(2, 20.0, LATE))
    later = replace(first, now=NOW + 2 * LONGEST_WAIT)
    assert PROMOTED not in moves(LateLast()(later, decision.memo).actions).values(), "one at a time"


def test_of_late_requests_the_tenant_whose_turn_it_is_comes_first() -> None:
    """Else one tenant's many late requests hold another's up for ten seconds each."""
    flood = [waits(n, 30.0 - n, LATE)._replace(turn=50 + n) for n in range(8)]
    other = waits(9, 12.0, LATE)._replace(turn=42)
    decision = LateLast()(queue(waits(10, 0.2), *flood, other), Overtaken({"a": 0.0}))
    assert moves(decision.actions) == {"r9": PROMOTED}


def test_a_request_is_late_when_its_prefill_would_end_too_late() -> None:
    costs = StepCosts(0.25, 0.0, 0.0, 0.0, 0.0)
    slow, ready = replace(model("a"), costs=costs), replace(model("a"), costs=UNMEASURED)
    r = request(1, arrival=0.0)
    last = 1.0 - MARGIN
    assert not is_late(last - 0.01, ready, r)
    assert is_late(last + 0.01, ready, r)
    assert is_late(last - 0.2, slow, r)
    assert not is_late(last - 0.3, slow, r)


def test_a_preempted_request_is_late_when_its_pace_is_lost() -> None:
    """It has 10 of 20 tokens, and 0.1 s for each after the first."""
    m, r = model("a"), request(1, generated=10, max_tokens=20)
    assert not is_late(1.9, m, r)
    assert is_late(2.1, m, r)
    assert is_late(0.0, m, r._replace(first=1.5)), "its first token was"


@pytest.mark.parametrize("preset", ["static", "recompute", "balloon"])
def test_in_an_overload_more_requests_are_in_time_and_all_are_answered(preset: str) -> None:
    """Two at a time, each for 0.1 s or so: 20 a second can be served, and 40 come."""
    fleet, (spec, *_), _ = world(1, preset)
    one = replace(spec, max_running=2, slo=Slo(ttft=0.5, tpot=1.0))
    arrivals = {f"r{i}": i / 40 for i in range(200)}
    asked = [
        Submission(
            id=id,
            model=one.name,
            prompt=(1,) * 8,
            max_tokens=8,
            arrival=at,
            ignore_eos=True,
            priority=int(id == "r150"),
        )
        for id, at in arrivals.items()
    ]
    costs = StepCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    profile = MachineProfile(costs={one.name: costs}, link=LinkRates.even(1e9), overhead=1e-3)
    in_time = {}
    for late_last in (0.0, 1.0):
        first: dict[str, float] = {}

        def hear(now: float, output: Output, first: dict[str, float] = first) -> None:
            if isinstance(output, TokenOutput):
                first.setdefault(output.request_id, now)

        option = replace(fleet, options={"late_last": late_last})
        simulate(option, [one], asked, profile, hear)
        assert first.keys() == arrivals.keys()
        assert first["r150"] < arrivals["r150"] + 0.5, "it is more important than all others"
        in_time[late_last] = sum(at < arrivals[id] + 0.5 for id, at in first.items())
    assert in_time[1.0] > 2 * in_time[0.0]


def test_a_model_is_as_old_as_its_oldest_request_wherever_that_waits() -> None:
    m = model("a", waiting=(waits(2, 0.2), waits(1, 30.0, LATE)))
    assert oldest(m) == waits(1, 30.0).order
