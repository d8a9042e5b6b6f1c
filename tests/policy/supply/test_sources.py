"""Each source of the preset `ballast` is taken where it is cheapest, and not where it is not."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.actions import DropCache, Preempt, Reside, Stage
from ballast.core.cost import StepCosts
from ballast.core.rotation import WHOLE
from ballast.core.view import (
    DeviceView,
    ModelView,
    RequestView,
    Residency,
    Shortage,
    StagingView,
)
from ballast.policy.memory.absences import Absences
from ballast.policy.memory.arbiter import Arbiter
from tests.policy.worlds import device, layered, model, request

NOW = 100.0
FIRST = request(0, pages=2, generated=1)


def running(sequence: int, *, tokens: int = 40, ahead: float = 1.0, pages: int = 2) -> RequestView:
    """A running request that is so many seconds ahead of its pace."""
    r = request(sequence, arrival=50.0, pages=pages, tokens=tokens, generated=20, max_tokens=60)
    return r._replace(first=NOW - 20 * r.pace + ahead, due=200.0)


def short(*models: ModelView, pages: int = 2, link: float = 1e9, tiers: float = 0.0) -> DeviceView:
    """A device whose first request lacks pages."""
    lacking = Shortage(models[0].name, FIRST.id, pages, limited=False)
    view = device(*models, free=0, shortages=(lacking,))
    return replace(view, now=NOW, link_bytes_per_second=link, kv_fetch_bytes_per_second=tiers)


def taken(view: DeviceView, **options: float) -> list[object]:
    policy = Arbiter(**{"streaming": 1, **options})
    return [a for a in policy(view, None).actions if not hasattr(a, "held")]


def preempted(view: DeviceView, **options: float) -> list[str]:
    return [a.request_id for a in taken(view, **options) if isinstance(a, Preempt)]


def test_kv_that_tiers_keep_is_priced_as_fetched() -> None:
    """A long context that is far ahead of its pace costs the lane most to compute again; one that
    is brief may end before it has made up for a delay."""
    long = running(1, tokens=400, ahead=3.0)
    brief = running(2, tokens=24, ahead=0.09)
    view = short(model("m", kv=8, running=(FIRST, long, brief)))
    kept = replace(view, kv_fetch_bytes_per_second=1e9)
    assert preempted(view) == [brief.id]
    assert preempted(kept) == [long.id]
    assert preempted(kept, spilling=0) == [brief.id]
    assert preempted(replace(view, kv_fetch_bytes_per_second=1e4)) == [brief.id]


def test_cached_prefixes_that_tiers_keep_go_before_others_work() -> None:
    m = model("m", kv=20, cached=8, running=(FIRST, running(1, tokens=24)))
    costs = replace(m.costs, per_token=2e-3)
    m = replace(m, costs=costs, traffic=m.traffic.arrived(99.0).ended(40, 20, 40))
    view = short(m)
    assert [type(a) for a in taken(view)] == [Preempt]
    assert [type(a) for a in taken(replace(view, kv_fetch_bytes_per_second=1e9))] == [DropCache]


def lender(*, decode: float) -> ModelView:
    """A model of eight layers of two pages each, which a fast link brings in 1 ms each."""
    m = model("lender", pages=16, kv=4, running=(running(1),))
    return layered(m, decode=decode)


def test_layers_whose_loads_steps_hide_are_lent_before_work_is_undone() -> None:
    view = short(model("first", kv=2, running=(FIRST,)), lender(decode=40e-3))
    (remap,) = taken(view)
    assert isinstance(remap, Reside)
    assert remap.plan.rotation.n_freed == 1
    assert "expected late requests" in remap.why
    assert preempted(view, streaming=0) == ["r1"]


def test_layers_that_every_step_would_wait_for_stay() -> None:
    view = short(model("first", kv=2, running=(FIRST,)), lender(decode=1e-3), link=1e6)
    assert preempted(view) == ["r1"]


def test_layers_come_home_when_nobody_lacks_pages() -> None:
    lent = layered(model("lender", pages=16, kv=4, running=(running(1),)), lent=2)
    free = replace(device(lent, free=60), now=NOW)
    assert [a for a in taken(free) if isinstance(a, Reside) and a.plan.rotation == WHOLE]
    assert taken(replace(free, free=2)) == []


def wanting(**options: float) -> list[object]:
    """What is done for an absent model whose request must begin soon, while all are in a hurry."""
    hurried = model("busy", pages=30, kv=60, running=(FIRST, running(1, ahead=-3.7)))
    urgent = request(9, arrival=NOW - 0.4)
    absent = model("w", Residency.ABSENT, pages=10, waiting=(urgent,), first=1)
    view = replace(device(hurried, absent, free=4), now=NOW, reads_host=True)
    link = options.pop("link", 1e12)
    return taken(replace(view, link_bytes_per_second=link), **options)


def test_weights_are_read_in_place_where_the_link_carries_them_with_each_pass() -> None:
    (came,) = wanting(in_place=1)
    assert isinstance(came, Reside)
    assert came.model == "w"
    assert came.plan.in_place
    assert came.plan.runnable
    assert "host memory" in came.why
    assert wanting(in_place=0) == []
    assert wanting(in_place=1, link=1e6) == []


def test_weights_read_in_place_come_home_when_there_is_room() -> None:
    m = model("w", pages=10, running=(FIRST,))
    there = replace(m, plan=replace(m.plan, in_place=frozenset(range(len(m.plan.units)))))
    (home,) = taken(replace(device(there, free=60), now=NOW), in_place=1)
    assert isinstance(home, Reside)
    assert not home.plan.in_place
    assert taken(replace(device(there, free=12), now=NOW), in_place=1) == []


def test_a_request_is_not_preempted_again_before_it_has_got_on() -> None:
    """It has been computed again, and decoded for longer than that takes."""
    costs = StepCosts(1e-3, 1e-3, 0.0, 0.0, 0.0)  # 40 tokens: as long as 41 steps
    again = running(1, ahead=9.0)
    for since, undone in ((0, []), (40, []), (42, [again.id])):
        back = again._replace(undone=again.tokens, tokens=again.tokens + since)
        m = replace(model("m", kv=8, running=(FIRST, back)), costs=costs)
        assert preempted(short(m)) == undone, since
    never = replace(model("m", kv=8, running=(FIRST, again)), costs=costs)
    assert preempted(short(never)) == [again.id]


def returning(free: int, since: float = 1.0, **options: float) -> list[object]:
    """What is done for a model that made way, whose last request was so many seconds ago."""
    away = model("w", Residency.ABSENT, pages=40)
    traffic = away.traffic
    for at in range(20):
        traffic = traffic.arrived(NOW - since - 2.0 * (19 - at))
    view = replace(device(replace(away, traffic=traffic), free=free), now=NOW)
    policy = Arbiter(**options)
    seen = policy(view, Absences(gone=frozenset("w")))
    assert Arbiter()(view, Absences()).actions == (), "it was never asked for"
    return list(seen.actions)


def test_weights_that_made_way_come_back_where_a_request_is_likely_and_pages_are_free() -> None:
    (came,) = returning(free=90)
    assert isinstance(came, Reside)
    assert came.plan.runnable
    assert "a request is expected" in came.why
    assert returning(free=90, prewarming=0) == []
    assert returning(free=42) == [], "a tenth of all stays free"
    assert returning(free=90, since=600.0) == []


def staging(bytes_per_second: float, **options: float) -> list[object]:
    """What is done where blocks of a running model can go to the host, over a link of such rate."""
    long = running(1, tokens=400, ahead=1.0)
    m = layered(model("m", kv=40, running=(FIRST, long)), decode=40e-3)
    m = replace(m, staging=StagingView(0, 80, 1000, 1, 0, False), rotatable=(), layer_pages=0)
    m = replace(m, costs=replace(m.costs, per_token=2e-3))
    return taken(short(m, link=bytes_per_second), streaming=0, **options)


def test_blocks_whose_copies_steps_hide_go_to_the_host_before_work_is_undone() -> None:
    (staged,) = staging(1e9, staging=1)
    assert isinstance(staged, Stage)
    assert "expected late requests" in staged.why
    assert [type(a) for a in staging(1e9)] == [Preempt]
    assert [type(a) for a in staging(1e6, staging=1)] == [Preempt]
    assert Arbiter(staging=1).requires.kv_staging
    assert not Arbiter().requires.kv_staging
