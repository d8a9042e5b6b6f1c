"""The fleet policy's view: what has come since the view before."""

from __future__ import annotations

from dataclasses import replace

from ballast.control.fleet_view import FleetViews
from ballast.core.cost import Traffic
from ballast.core.fleet import ModelDemand
from ballast.core.report import DeviceReport, ModelReport
from tests.control.order_fleet import OrderFleet

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


def test_work_is_that_since_the_view_before() -> None:
    fleet = OrderFleet({"a": ["x"]}, ["x", "y"])
    fleet.needed = [ModelDemand("a", 1, 1)]
    views = FleetViews(fleet.fleet, fleet)  # type: ignore[arg-type]
    fleet.fleet["x"].report = REPORT  # nothing has been heard of y
    first = views.view(8.0)
    later = replace(REPORT, models=(replace(MODEL, lane_seconds=5.0, waiting=0, late=0),))
    fleet.fleet["x"].report, fleet.fleet["y"].report = later, replace(REPORT, models=())
    second = views.view(10.0)
    assert [(h.work, h.open_requests, h.late) for h in first.devices[0].hosting] == [(0.5, 5, 1)]
    assert first.devices[0].hosting[0].traffic == MODEL.traffic
    assert first.devices[0].hosting[0].homed
    assert [d.name for d in first.devices] == ["x"]
    assert [(h.work, h.open_requests, h.late) for h in second.devices[0].hosting] == [(0.5, 3, 0)]
    assert [d.name for d in second.devices] == ["x", "y"]
    assert second.needs == (ModelDemand("a", 1, 1),)
