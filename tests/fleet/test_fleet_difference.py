"""From one fleet to another: what counts at once, what needs a model loaded again or a restart."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.settings import (
    AdapterSettings,
    DeviceSettings,
    FleetSettings,
    KeySettings,
    ModelSettings,
    ServerSettings,
    Slo,
)
from ballast.fleet.fleet_difference import FleetDifference, difference

LORA = AdapterSettings(name="lora", path="l")
A = ModelSettings(name="a", path="a", adapters=(LORA,))
B = ModelSettings(name="b", path="b")
FLEET = FleetSettings(models=(A, B), device=DeviceSettings(budget_bytes=1))
NOTHING = FleetDifference((), (), (), {}, ())


def to(*models: ModelSettings) -> FleetDifference:
    return difference(FLEET, replace(FLEET, models=models))


def test_equal_fleets_differ_in_nothing() -> None:
    keys = ServerSettings(keys=(KeySettings(name="k", key="k"),))
    assert difference(FLEET, replace(FLEET, server=keys, home="elsewhere")) == NOTHING
    assert to(B, A) == NOTHING


def test_models_come_and_go() -> None:
    c = replace(B, name="c")
    assert to(A, c) == replace(NOTHING, added=(c,), removed=("b",))


def test_levels_count_at_once_and_the_rest_does_not() -> None:
    slo = Slo(ttft=9.0)
    new = replace(B, slo=slo, pinned=True, max_running=3, path="c", max_model_len=5)
    found = to(A, new)
    assert found.levels == (replace(B, slo=slo, pinned=True, max_running=3),)
    assert found.again == {"b": ("path", "limits.context")}


def test_levels_of_adapters_count_at_once_but_not_which_there_are() -> None:
    slow = replace(LORA, queue_seconds=9.0)
    assert to(replace(A, adapters=(slow,)), B) == replace(NOTHING, levels=(slow,))
    for adapters in ((), (LORA, replace(LORA, name="more")), (replace(LORA, path="m"),)):
        assert to(replace(A, adapters=adapters), B) == replace(NOTHING, again={"a": ("adapters",)})


def test_what_the_device_was_built_with_counts_at_a_restart() -> None:
    new = replace(
        FLEET,
        preset="swap",
        device=DeviceSettings(budget_bytes=2),
        story_path="s",
        options={"x": 1},
    )
    assert set(difference(FLEET, new).restart) == {"preset", "devices", "story", "options"}
