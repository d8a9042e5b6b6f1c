"""Placement by KV pressure: Algorithm 1 as the paper has it; the optimum against brute force."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.errors import ConfigError
from ballast.policy.fleet.kv_pressure import KvDemand, greedy, max_pressure, moved
from ballast.policy.fleet.optimal_placement import GAP, lower_bound, optimal
from ballast.policy.fleet.placement_problem import PlacementDevice
from tests.effort import tries

TWO = [PlacementDevice("a", 80.0), PlacementDevice("b", 80.0)]


def test_pressure_is_demand_over_what_weights_leave() -> None:
    claims = [KvDemand("x", 20.0, 3.0), KvDemand("y", 30.0, 6.0)]
    assert max_pressure(claims, TWO, {"x": ("a",), "y": ("a",)}) == pytest.approx(9 / 30)
    assert max_pressure(claims, TWO, {"x": ("a",), "y": ("b",)}) == pytest.approx(6 / 50)
    assert max_pressure([KvDemand("x", 80.0, 1.0)], TWO, {"x": ("a",)}) == math.inf


def test_greedy_takes_the_most_demanding_first_to_the_least_pressure() -> None:
    claims = [
        KvDemand("small", 10.0, 1.0),
        KvDemand("busy", 10.0, 9.0),
        KvDemand("half", 10.0, 5.0),
    ]
    homes = greedy(claims, TWO)
    assert homes["busy"] != homes["half"]
    assert homes["small"] == homes["half"]


def test_a_model_moves_only_for_more_than_the_threshold() -> None:
    claims = [
        KvDemand("busy", 10.0, 10.0, devices=("a",)),
        KvDemand("other", 10.0, 8.0, devices=("b",)),
        KvDemand("third", 10.0, 4.0, devices=("a",)),
    ]
    # `third` would make 14/60 of a, and 12/60 of b.
    assert greedy(claims, TWO)["third"] == ("b",)
    assert greedy(claims, TWO, threshold=0.2)["third"] == ("a",)
    assert greedy(claims, TWO, threshold=0.1)["third"] == ("b",)
    assert moved(claims, greedy(claims, TWO)) == {"third": ("b",)}
    assert moved(claims, greedy(claims, TWO, 0.2)) == {}


def test_parts_of_a_model_are_never_on_one_device() -> None:
    devices = [PlacementDevice(f"d{i}", 80.0) for i in range(4)]
    claims = [
        KvDemand("wide", 140.0, 8.0, parts=2),
        *(KvDemand(f"m{i}", 20, 9.0) for i in range(2)),
    ]
    homes = greedy(claims, devices)
    assert len(set(homes["wide"])) == 2
    assert not set(homes["wide"]) & {homes["m0"][0], homes["m1"][0]}
    assert len(set(optimal(claims, devices).homes["wide"])) == 2


@pytest.mark.parametrize("place", [greedy, optimal])
def test_a_model_that_fits_nowhere_is_named_with_what_is_missing(place: object) -> None:
    assert callable(place)
    with pytest.raises(ConfigError, match="big") as result:
        place(
            [KvDemand("big", 90e9, 1.0), KvDemand("ok", 10e9, 9.0)],
            [PlacementDevice("a", 80e9)],
        )
    assert "are missing" in str(result.value)
    with pytest.raises(ConfigError, match="tp of wide"):
        place([KvDemand("wide", 10.0, 1.0, parts=3)], TWO)


def test_where_the_order_of_demand_finds_no_room_the_largest_come_first() -> None:
    claims = [
        KvDemand("busy", 30.0, 9.0),
        KvDemand("half", 30.0, 8.0),
        KvDemand("large", 70.0, 1.0),
    ]
    assert math.isfinite(max_pressure(claims, TWO, greedy(claims, TWO)))


def test_the_optimum_is_found_where_the_greedy_finds_no_placement() -> None:
    claims = [
        KvDemand("busy", 45.0, 9.0),
        KvDemand("half", 45.0, 8.0),
        KvDemand("large", 70.0, 1.0),
    ]
    devices = [PlacementDevice("a", 100.0), PlacementDevice("b", 80.0)]
    with pytest.raises(ConfigError):
        greedy(claims, devices)
    found = optimal(claims, devices)
    assert found.homes == {"busy": ("a",), "half": ("a",), "large": ("b",)}
    assert found.lower_bound == pytest.approx(found.max_kvpr, rel=GAP) == pytest.approx(1.7)


def brute_force(claims: list[KvDemand], devices: list[PlacementDevice]) -> float:
    """The least KVPR of all placements."""
    names = [d.name for d in devices]
    choices = [list(combinations(names, c.parts)) for c in claims]
    return min(
        max_pressure(claims, devices, {c.name: d for c, d in zip(claims, chosen, strict=True)})
        for chosen in product(*choices)
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[KvDemand], list[PlacementDevice]]:
    devices = [
        PlacementDevice(f"d{i}", draw(st.sampled_from([40.0, 80.0])))
        for i in range(draw(st.integers(2, 3)))
    ]
    claims = []
    for i in range(draw(st.integers(1, 6))):
        parts = draw(st.integers(1, 2))
        demand = draw(st.floats(0, 50)) if draw(st.booleans()) else float(draw(st.integers(0, 9)))
        here = draw(st.sampled_from([(), tuple(d.name for d in devices[:parts])]))
        claims.append(KvDemand(f"m{i}", draw(st.floats(1, 25)), demand, parts, here))
    return claims, devices


@settings(max_examples=tries(25, all=60), deadline=None)
@given(problems())
def test_the_optimum_is_that_of_brute_force(
    problem: tuple[list[KvDemand], list[PlacementDevice]],
) -> None:
    claims, devices = problem
    least = brute_force(claims, devices)
    if math.isinf(least):
        with pytest.raises(ConfigError):
            optimal(claims, devices)
        return
    found = optimal(claims, devices)
    assert found.max_kvpr == pytest.approx(max_pressure(claims, devices, found.homes), abs=1e-12)
    assert least <= found.max_kvpr * (1 + 1e-9) <= least * (1 + 2 * GAP) + 1e-12
    assert found.lower_bound <= least * (1 + 1e-9)
    assert lower_bound(claims, devices) <= least * (1 + 1e-9)
    with suppress(ConfigError):
        homes = greedy(claims, devices)
        assert least <= max_pressure(claims, devices, homes) * (1 + 1e-9)
    assert all(len(set(d)) == c.parts for c in claims for d in [found.homes[c.name]])


def test_of_equally_good_placements_that_which_moves_least_wins() -> None:
    claims = [
        KvDemand("x", 10.0, 5.0, devices=("b",)),
        KvDemand("y", 10.0, 5.0, devices=("a",)),
        KvDemand("quiet", 30.0, 0.0, devices=("b",)),
        KvDemand("still", 30.0, 0.0, devices=("a",)),
    ]
    found = optimal(claims, TWO)
    assert found.homes == {"x": ("b",), "y": ("a",), "quiet": ("b",), "still": ("a",)}
    assert found.max_kvpr == pytest.approx(5 / 40)


def test_equal_problems_have_equal_answers() -> None:
    claims = [KvDemand(f"m{i}", 10.0 + i, 3.0 + i % 4) for i in range(10)]
    devices = [PlacementDevice(f"d{i}", 80.0) for i in range(4)]
    assert optimal(claims, devices) == optimal(claims, devices)
