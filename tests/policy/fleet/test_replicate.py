"""Models follow the load: who is behind gets help, what is not needed goes, nothing flutters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetView,
    ModelDemand,
    ModelLoad,
    Place,
    Withdraw,
)
from ballast.core.units import GiB
from ballast.policy.fleet.replicate import ReplicateUnderLoad

NEEDS = tuple(ModelDemand(m, 10 * GiB, 8 * GiB) for m in "abc")


Hosted = Mapping[str, tuple[float, int, int]]
"""By model: work, open requests, late ones."""


def view(now: float, hosting: Mapping[str, Hosted]) -> FleetView:
    """`hosting`: by device."""
    devices = tuple(
        DeviceLoad(
            DeviceCapacity(device, (80 if device != "tiny" else 4) * GiB, "k"),
            tuple(ModelLoad(m, *numbers) for m, numbers in models.items()),
        )
        for device, models in hosting.items()
    )
    return FleetView(now, devices, NEEDS)


def said(actions: tuple[FleetAction, ...]) -> list[tuple[str, str, str]]:
    return [(type(a).__name__, a.model, a.device) for a in actions]


def test_a_device_that_is_behind_gets_help_from_the_least_busy() -> None:
    seen = view(0, {"x": {"a": (0.6, 9, 1), "b": (0.3, 9, 4)}, "y": {"c": (0.3, 5, 0)}, "z": {}})
    assert said(ReplicateUnderLoad()(seen, None).actions) == [("Place", "b", "z")]


def test_help_comes_from_a_device_whose_host_has_the_weights_first() -> None:
    seen = view(0, {"x": {"a": (0.9, 9, 1)}, "y": {"b": (0.3, 4, 0)}, "z": {}})
    hosts = {"x": "1", "y": "1", "z": "2"}
    devices = [replace(d, room=replace(d.room, host=hosts[d.name])) for d in seen.devices]
    apart = replace(seen, devices=tuple(devices))
    assert said(ReplicateUnderLoad()(apart, None).actions) == [("Place", "a", "z")]
    joined = replace(apart, network=1e9)
    assert said(ReplicateUnderLoad()(joined, None).actions) == [("Place", "a", "y")]


def test_a_busy_device_on_time_is_left_alone() -> None:
    seen = view(0, {"x": {"a": (1.0, 40, 0)}, "z": {}})
    assert ReplicateUnderLoad()(seen, None).actions == ()


def test_nobody_helps_who_is_behind_or_busy_or_has_no_room() -> None:
    x, y, w = {"a": (0.9, 8, 1)}, {"b": (0.5, 5, 0)}, {"c": (0.0, 2, 1)}
    assert ReplicateUnderLoad()(view(0, {"x": x, "y": y, "w": w, "tiny": {}}), None).actions == ()


def test_no_weights_in_use_make_way() -> None:
    """Of 20 GiB 8 are in use at y, none at z, and the model needs 13."""
    needs = (ModelDemand("a", 13 * GiB, 8 * GiB), *NEEDS[1:])
    devices = (
        DeviceLoad(DeviceCapacity("x", 20 * GiB), (ModelLoad("a", 0.9, 9, 1),)),
        DeviceLoad(DeviceCapacity("y", 20 * GiB), (ModelLoad("b", 0.1, 1, 0),)),
        DeviceLoad(
            DeviceCapacity("z", 20 * GiB), (ModelLoad("b", 0.1, 0, 0), ModelLoad("c", 0.0, 0, 0))
        ),
    )
    assert said(ReplicateUnderLoad()(FleetView(0.0, devices, needs), None).actions) == [
        ("Place", "a", "z")
    ]


def test_a_device_is_given_one_model_at_a_time() -> None:
    hosting = {"x": {"a": (0.9, 9, 1)}, "y": {"b": (0.9, 9, 2)}, "z": {}}
    assert said(ReplicateUnderLoad()(view(0, hosting), None).actions) == [("Place", "b", "z")]


def test_what_is_not_needed_leaves_the_busiest_after_a_while() -> None:
    policy, memo = ReplicateUnderLoad(every=5.0, patience=10.0), None
    hosting: dict[str, Hosted] = {"x": {"a": (0.2, 1, 0)}, "y": {"a": (0.1, 1, 0)}}
    for now in (0.0, 5.0):
        decision = policy(view(now, hosting), memo)
        assert decision.actions == ()
        assert decision.wake_at == now + 5.0
        memo = decision.memo
    assert said(policy(view(10.0, hosting), memo).actions) == [("Withdraw", "a", "x")]


def test_a_copy_that_never_got_its_weights_goes_first() -> None:
    policy = ReplicateUnderLoad(patience=0.0)
    devices = (
        DeviceLoad(DeviceCapacity("x", 80 * GiB), (ModelLoad("a", 0.3, 1, 0, weights=8 * GiB),)),
        DeviceLoad(DeviceCapacity("y", 80 * GiB), (ModelLoad("a", 0.0, 0, 0),)),
        DeviceLoad(DeviceCapacity("z", 80 * GiB), (ModelLoad("a", 0.1, 0, 0, weights=8 * GiB),)),
    )
    assert said(policy(FleetView(0.0, devices, NEEDS), None).actions) == [("Withdraw", "a", "y")]


def test_who_waits_stays_so_one_more_device_is_given_time() -> None:
    policy = ReplicateUnderLoad(every=5.0, settling=12.0)
    hosting = {"x": {"a": (0.9, 9, 4)}, "y": {"b": (0.0, 0, 0)}, "z": {"c": (0.0, 0, 0)}}
    first = policy(view(0.0, hosting), None)
    assert said(first.actions) == [("Place", "a", "y")]
    hosting["y"] = {"a": (0.0, 0, 0)}
    second = policy(view(5.0, hosting), first.memo)
    assert second.actions == ()
    third = policy(view(15.0, hosting), second.memo)
    assert said(third.actions) == [("Place", "a", "z")]


def test_what_is_leaving_still_counts_as_load() -> None:
    leaving = ModelLoad("b", 0.5, 6, 0, weights=8 * GiB, homed=False)
    devices = (
        DeviceLoad(DeviceCapacity("x", 20 * GiB), (ModelLoad("a", 0.9, 9, 1),)),
        DeviceLoad(DeviceCapacity("y", 20 * GiB), (leaving,)),
    )
    assert ReplicateUnderLoad()(FleetView(0.0, devices, NEEDS), None).actions == ()


def test_patience_begins_anew_when_it_was_needed() -> None:
    policy = ReplicateUnderLoad(every=5.0, patience=10.0)
    quiet = {"x": {"a": (0.1, 1, 0)}, "y": {"a": (0.1, 1, 0)}}
    busy = {"x": {"a": (0.4, 4, 0)}, "y": {"a": (0.3, 4, 0)}}
    memo = policy(view(0.0, quiet), None).memo
    memo = policy(view(5.0, busy), memo).memo
    assert policy(view(10.0, quiet), memo).actions == ()


loads = st.tuples(st.floats(0, 1.2), st.integers(3, 20), st.integers(0, 3))


@given(
    st.dictionaries(
        st.sampled_from(["w", "x", "y", "z", "tiny"]),
        st.dictionaries(st.sampled_from("abc"), loads, max_size=3),
        min_size=1,
    ),
    st.floats(0, 100),
)
def test_what_is_asked_for_can_be_done(
    hosting: dict[str, dict[str, tuple[float, int, int]]], since: float
) -> None:
    policy, seen = ReplicateUnderLoad(), view(0.0, hosting)
    first = policy(seen, None)
    for decision in (first, policy(view(since, hosting), first.memo)):
        homes = {m: {d for d, on in hosting.items() if m in on} for m in "abc"}
        for action in decision.actions:
            if isinstance(action, Place):
                assert action.device in hosting
                assert action.device not in homes[action.model]
                assert action.device != "tiny"
            else:
                assert isinstance(action, Withdraw)
                assert action.device in homes[action.model]
                assert len(homes[action.model]) > 1
        assert len({a.model for a in decision.actions}) == len(decision.actions)
