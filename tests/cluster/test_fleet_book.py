"""The book of who serves what: actions end as they are settled, objections say why not."""

from __future__ import annotations

from dataclasses import replace

from ballast.cluster.fleet_book import FleetBook
from ballast.core.cost import Traffic
from ballast.core.fleet import FleetDecision, FleetView, Need, Place, Room, Withdraw
from ballast.core.report import DeviceReport, ModelReport
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import Replica

MODEL = ModelReport(
    name="a",
    residency="resident",
    weight_pages=1,
    kv_pages=1,
    cached_pages=0,
    waiting=2,
    running=3,
    late=1,
    lane_seconds=4.0,
    activations=1,
    evictions=0,
    preemptions=0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    traffic=Traffic(0.5, 100.0, 20.0),
)
REPORT = DeviceReport(
    device="x",
    now=0.0,
    page_bytes=4096,
    total=10,
    free=8,
    reclaiming=0,
    owners={},
    models=(MODEL,),
    jobs=0,
    draining=False,
)


class Asked(FleetPolicy):
    """A policy that remembers what it saw, and wants `wanted`."""

    def __init__(self, *wanted: Place | Withdraw) -> None:
        self.wanted = wanted
        self.seen: list[tuple[FleetView, object]] = []

    @property
    def moves(self) -> bool:
        return True

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        self.seen.append((view, memo))
        return FleetDecision(self.wanted, len(self.seen), view.now + 2.0)


def test_work_is_that_since_the_view_before() -> None:
    policy = Asked()
    book = FleetBook({"a": ["x"]}, [Need("a", 1, 1)], [Room("x", 10), Room("y", 10)], policy)
    book.decide(8.0, {"x": REPORT})
    later = replace(REPORT, models=(replace(MODEL, lane_seconds=5.0, waiting=0, late=0),))
    assert book.wake_at == 10.0
    book.decide(10.0, {"x": later, "y": replace(REPORT, models=())})
    (first, none), (second, memo) = policy.seen
    assert (none, memo) == (None, 1)
    assert [(h.work, h.open_requests, h.late) for h in first.devices[0].hosting] == [(0.5, 5, 1)]
    assert first.devices[0].hosting[0].traffic == MODEL.traffic
    assert [d.name for d in first.devices] == ["x"]  # nothing has been heard of y
    assert [(h.work, h.open_requests, h.late) for h in second.devices[0].hosting] == [(0.5, 3, 0)]
    assert [d.name for d in second.devices] == ["x", "y"]


def test_what_is_settled_is_in_the_book() -> None:
    book = FleetBook({"a": ["x"]})
    assert book.objection(Place("a", "y")) is None
    book.settle(Place("a", "y"))
    assert book.homes == {"a": ("x", "y")}
    assert book.objection(Withdraw("a", "x")) is None
    book.settle(Withdraw("a", "x"))
    assert book.homes == {"a": ("y",)}
    assert book.epoch == 2


def test_what_came_too_late_is_refused() -> None:
    book = FleetBook({"a": ["x"]})
    assert book.objection(Place("a", "x")) == "x serves a already"
    assert book.objection(Withdraw("a", "x")) == "a is served by x"
    assert book.objection(Withdraw("a", "y")) == "a is served by x"
    assert book.objection(Place("b", "x")) == "there is no model 'b'"


def test_a_request_goes_where_its_prefix_is() -> None:
    held = {"x": 0, "y": 64}
    book = FleetBook({"a": ["x", "y"], "b": ["x"]})
    assert book.choose("a", lambda name: Replica(name, 0, held[name])) == "y"

    def never(name: str) -> Replica:
        raise AssertionError(name)

    assert book.choose("b", never) == "x"


def test_a_policy_is_asked_only_where_there_is_one() -> None:
    book = FleetBook({"a": ["x"]})
    assert book.wake_at is None
    assert book.decide(0.0, {"x": REPORT}) == ()
