"""Routing by the budget of a shared link (C2CServe, 6.1, 6.2)."""

from __future__ import annotations

import pytest

from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.policy.fleet.link_aware import LinkAware
from ballast.policy.fleet.replica_choice import LinkUse, Replica

ROUTE = LinkAware().route


def replica(
    device: str,
    n_open: int = 0,
    prefill: float = 0.1,
    host: int = 0,
    demand: float = 40.0,
    **active: float,
) -> Replica:
    """A device for a request of `m`; `active`: demands of models that are active on it."""
    use = LinkUse(host, 100.0, "m", demand, active, prefill, ttft=1.0)
    return Replica(device, n_open or len(active), link=use)


def test_a_model_is_served_where_it_is_active() -> None:
    assert ROUTE([replica("idle"), replica("there", n_open=3, m=40.0)]) == "there"
    assert ROUTE([replica("full", n_open=5, m=40.0), replica("less", n_open=2, m=40.0)]) == "less"


def test_of_idle_devices_the_slowest_that_is_in_time_is_activated() -> None:
    slices = [
        replica("fast", prefill=0.1),
        replica("slow", prefill=0.8),
        replica("late", prefill=1.2),
    ]
    assert ROUTE(slices) == "slow"
    assert ROUTE(slices[::-1]) == "slow"


def test_models_that_are_active_on_a_host_stay_within_its_link() -> None:
    here = [replica("idle"), replica("a", a=30.0), replica("b", b=30.0)]
    assert ROUTE(here) == "idle", "30 + 30 + 40 is the link"
    crowded = [replica("idle"), replica("a", a=30.0), replica("b", b=31.0)]
    elsewhere = replica("other", prefill=0.05, host=1)
    assert ROUTE([*crowded, elsewhere]) == "other"
    assert ROUTE(crowded) == "idle", "where nothing fits it waits for the fewest others"


def test_the_least_busy_of_busy_devices_and_then_the_fastest() -> None:
    busy = [replica("a", 3, a=1.0), replica("b", 2, 0.5, b=1.0), replica("c", 2, 0.2, c=1.0)]
    assert ROUTE(busy) == "c"


def test_without_knowledge_of_the_link_load_decides() -> None:
    assert ROUTE([Replica("x", 2), Replica("y", 1)]) == "y"


def test_every_device_with_room_for_its_kv_can_serve_a_model() -> None:
    rooms = [DeviceCapacity("large", 100), DeviceCapacity("small", 10)]
    homes = LinkAware().place([ModelDemand("m", 10, 90), ModelDemand("n", 11, 5)], rooms)
    assert homes == {"m": ["large", "small"], "n": ["large"]}
    with pytest.raises(ConfigError, match="missing"):
        LinkAware().place([ModelDemand("m", 101, 5)], rooms)
