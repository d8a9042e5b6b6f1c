"""A request that admission has left out undoes nobody's work, until its model starves."""

from __future__ import annotations

from ballast.core.view import DeviceView, Residency, Shortage
from ballast.policy.market.claims import BEHIND_ALL, activation_claims, shortage_claims
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.policy.memory.balloon import Balloon
from tests.policy.worlds import activated, device, evicted, model, request

CAME = 2.0
"""When the first request of the absent model came, in seconds."""


def world(now: float) -> DeviceView:
    """An absent model whose only request waits behind all others, and one that runs a younger one
    on pages which the first lacks."""
    left_out = request(1, arrival=CAME)._replace(place=BEHIND_ALL)
    lost = model("lost", Residency.ABSENT, waiting=(left_out,), first=2)
    busy = model("busy", kv=4, running=(request(3, arrival=CAME + 1, pages=4),))
    first = model("first", kv=4, running=(request(0, pages=4),))
    return device(lost, first, busy, free=0, now=now)


def test_a_model_that_starves_comes_though_its_requests_are_left_out() -> None:
    before, after = world(CAME + LONGEST_WAIT - 1), world(CAME + LONGEST_WAIT)
    (claim,), wake = activation_claims(before, 0.5)
    assert not claim.may_preempt
    assert wake == CAME + LONGEST_WAIT, "nothing else wakes the policy then"
    assert Balloon()(before, None).actions == ()
    decision = Balloon()(after, None)
    assert evicted(decision.actions) == {"busy": None}
    assert activated(decision.actions) == ["lost"]


def test_a_left_out_request_of_a_model_that_runs_never_undoes_work() -> None:
    left_out = request(1)._replace(place=BEHIND_ALL)
    m = model("m", waiting=(left_out,), running=(request(2, arrival=1.0, pages=4),), kv=4, first=2)
    lack = Shortage("m", left_out.id, 2, False, 8, 8)
    (claim,), wake = shortage_claims(device(m, free=0, shortages=(lack,), now=1e3), 0.5)
    assert not claim.may_preempt
    assert wake is None
