"""All models are placed anew by KV pressure, and migrate only where it is worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import Traffic
from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetView,
    ModelDemand,
    ModelLoad,
    Place,
)
from ballast.core.units import GiB
from ballast.policy.fleet.migrate import LeastPressure

NEEDS = tuple(
    ModelDemand(m, 10 * GiB, 8 * GiB, kv_bytes_per_token=1 << 20, tpot=0.1) for m in "abcd"
)
Asked = Mapping[str, float]
"""By model: tokens per second."""


def hosted(model: str, rate: float, *, open_requests: int = 1, weights: int = 8) -> ModelLoad:
    traffic = Traffic(rate / 100, 60, 40)
    return ModelLoad(model, 0.1, open_requests, 0, weights * GiB, traffic=traffic)


def view(now: float, asked: Mapping[str, Asked], gib: int = 80) -> FleetView:
    """`asked`: by device. Who is asked nothing has no requests, and no weights there."""
    devices = tuple(
        DeviceLoad(
            DeviceCapacity(device, gib * GiB, "k"),
            tuple(
                hosted(m, rate) if rate else hosted(m, 0.0, open_requests=0, weights=0)
                for m, rate in models.items()
            ),
        )
        for device, models in asked.items()
    )
    return FleetView(now, devices, NEEDS)


def said(actions: tuple[FleetAction, ...]) -> list[tuple[str, str, str]]:
    return [(type(a).__name__, a.model, a.device) for a in actions]


def test_models_are_placed_by_demand_each_where_pressure_is_least() -> None:
    seen = view(0.0, {"x": {"a": 900.0, "b": 500.0}, "y": {"c": 100.0}})
    decision = LeastPressure()(seen, None)
    assert said(decision.actions) == [("Place", "b", "y")]
    assert decision.wake_at == 10.0
    (place,) = decision.actions
    assert place.why == "KV pressure beside those of greater demand: -68 % of that of x"
    many = {"x": {"a": 900.0, "b": 500.0, "c": 400.0, "d": 300.0}, "y": {}, "z": {}}
    moved = said(LeastPressure()(view(0.0, many), None).actions)
    assert moved == [("Place", "b", "y"), ("Place", "c", "z"), ("Place", "d", "z")]


def test_a_host_that_weights_do_not_reach_in_time_gets_none() -> None:
    many = {"x": {"a": 900.0, "b": 500.0, "c": 400.0}, "y": {}, "z": {}}
    seen = view(0.0, many)
    hosts = {"x": "1", "y": "2", "z": "1"}
    devices = [replace(d, room=replace(d.room, host=hosts[d.name])) for d in seen.devices]
    seen = replace(seen, devices=tuple(devices))

    def moved(seconds: float) -> list[tuple[str, str, str]]:
        network = 8 * GiB / seconds
        return said(LeastPressure(patience=30.0)(replace(seen, network=network), None).actions)

    assert moved(29.0) == [("Place", "b", "y"), ("Place", "c", "z")]
    assert moved(31.0) == [("Place", "b", "z"), ("Place", "c", "z")]


def test_nothing_moves_for_less_than_the_threshold() -> None:
    seen = view(0.0, {"x": {"a": 500.0, "b": 100.0}, "y": {"c": 450.0}})
    assert LeastPressure().threshold == 0.2
    assert LeastPressure()(seen, None).actions == ()
    assert said(LeastPressure(threshold=0.01)(seen, None).actions) == [("Place", "b", "y")]


def test_a_device_without_room_for_kv_is_left_whatever_the_threshold() -> None:
    seen = view(0.0, {"x": {"a": 500.0, "b": 100.0}, "y": {}}, gib=16)
    assert said(LeastPressure(threshold=0.9)(seen, None).actions) == [("Place", "b", "y")]


def test_it_leaves_where_it_was_only_when_it_is_there() -> None:
    policy = LeastPressure()
    seen = view(0.0, {"x": {"a": 900.0, "b": 500.0}, "y": {"c": 100.0}})
    first = policy(seen, None)
    coming = (hosted("c", 100.0), hosted("b", 1.0, weights=0))
    both = replace(seen, devices=(seen.devices[0], replace(seen.devices[1], hosting=coming)))
    second = policy(replace(both, now=10.0), first.memo)
    assert second.actions == (), "its weights are on their way, and nothing else moves meanwhile"
    there = (hosted("c", 100.0), hosted("b", 1.0))
    both = replace(seen, devices=(seen.devices[0], replace(seen.devices[1], hosting=there)))
    third = policy(replace(both, now=20.0), second.memo)
    assert said(third.actions) == [("Withdraw", "b", "x")]
    refused = policy(replace(seen, now=10.0), first.memo)
    assert said(refused.actions) == [("Place", "b", "y")], "refused: it is decided anew"


def test_a_migration_whose_weights_do_not_come_is_given_up() -> None:
    """Else it would keep all others from moving for ever."""
    policy = LeastPressure(patience=30.0)
    seen = view(0.0, {"x": {"a": 900.0, "b": 500.0}, "y": {"c": 100.0}})
    memo = policy(seen, None).memo
    coming = (hosted("c", 100.0), hosted("b", 0.0, open_requests=0, weights=0))
    both = replace(seen, devices=(seen.devices[0], replace(seen.devices[1], hosting=coming)))
    for now in (10.0, 20.0):
        decision = policy(replace(both, now=now), memo)
        assert decision.actions == ()
        memo = decision.memo
    assert said(policy(replace(both, now=30.0), memo).actions) == [("Withdraw", "b", "y")]


def test_evicted_models_come_back_where_pressure_is_least() -> None:
    seen = view(0.0, {"x": {"a": 900.0, "b": 0.0}, "y": {"c": 100.0}})
    (place,) = LeastPressure()(seen, None).actions
    assert place == Place("b", "y", place.why), "with its next request, not at once"
    assert LeastPressure()(view(0.0, {"x": {"a": 0.0}, "y": {"b": 0.0}}), None).actions == ()
    resident = hosted("b", 0.0, open_requests=0)
    x = replace(seen.devices[0], hosting=(seen.devices[0].hosting[0], resident))
    stays = LeastPressure()(replace(seen, devices=(x, seen.devices[1])), None)
    assert stays.actions == (), "its weights would be loaded for nothing"


def test_a_migrating_model_counts_where_it_goes() -> None:
    first = LeastPressure()(view(0.0, {"x": {"a": 900.0, "b": 800.0}, "y": {}, "z": {}}), None)
    assert said(first.actions) == [("Place", "b", "y")]
    both = view(10.0, {"x": {"a": 900.0, "b": 800.0, "c": 700.0}, "y": {"b": 0.0}, "z": {}})
    assert said(LeastPressure()(both, first.memo).actions) == [("Place", "c", "z")]


def test_no_model_moves_to_a_device_that_has_no_room_or_from_several() -> None:
    eager = LeastPressure(threshold=0.0)
    full = view(0.0, {"x": {"a": 900.0, "b": 500.0}, "y": {"c": 900.0, "d": 800.0}}, gib=17)
    assert eager(full, None).actions == ()
    several = view(0.0, {"x": {"a": 900.0}, "y": {"a": 10.0}})
    assert eager(several, None).actions == ()


def test_without_service_levels_nothing_is_urgent() -> None:
    seen = view(0.0, {"x": {"a": 900.0, "b": 500.0}, "y": {"c": 100.0}})
    patient = tuple(replace(n, tpot=float("inf")) for n in NEEDS)
    assert LeastPressure(threshold=0.0)(replace(seen, needs=patient), None).actions == ()


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.sampled_from("xyz"), st.floats(0, 2000)),
        min_size=1,
    )
)
def test_models_that_are_placed_stay(placed: dict[str, tuple[str, float]]) -> None:
    """Whatever the start, and as long as the demand is the same."""
    policy = LeastPressure()
    for _ in range(2):
        asked: dict[str, dict[str, float]] = {d: {} for d in "xyz"}
        for model, (device, rate) in placed.items():
            asked[device][model] = rate
        actions = policy(view(0.0, asked), None).actions
        for action in actions:
            assert isinstance(action, Place)
            placed[action.model] = action.device, placed[action.model][1]
    assert actions == ()
