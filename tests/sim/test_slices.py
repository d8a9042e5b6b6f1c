"""MIG slices: their layouts, their peaks, and what models cost there."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from ballast.core.errors import ConfigError
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.model_catalogue import facts
from ballast.sim.slices import COMPUTE_PARTS, MEMORY_PARTS, PROFILES


def spec(name: str = "Llama-3-8b") -> ModelSpec:
    return facts(name).spec(max_model_len=4096, name=name)


@pytest.mark.parametrize(
    ("layout", "each"),
    # C2CServe, table 1, with the driver's multiprocessors where those are not the paper's.
    [
        ("slices2", (60, 48e9, 2e12)),
        ("slices3", (32, 24e9, 1e12)),
        ("slices4", (26, 24e9, 1e12)),
        ("slices7", (16, 12e9, 0.5e12)),
    ],
)
def test_equal_slices_of_a_superchip_are_those_of_the_paper(
    layout: str, each: tuple[int, float, float]
) -> None:
    (kind,) = parse_kinds(f"GH200-96G:{layout}")
    units = kind.units
    assert len(units) == int(layout.removeprefix("slices"))
    for unit in units:
        assert unit.part is not None
        assert unit.profile.hardware is not None
        there = unit.part.of(unit.profile.hardware)
        found = (there.multiprocessors, there.memory_bytes, there.memory_bandwidth)
        assert found == pytest.approx(each)


@pytest.mark.parametrize("device", list(PROFILES))
def test_every_profile_is_a_part_of_its_device(device: str) -> None:
    (kind,) = parse_kinds(device)
    assert kind.profile.hardware is not None
    for part in PROFILES[device]:
        assert part.multiprocessors <= kind.profile.hardware.multiprocessors
        share = part.multiprocessors / kind.profile.hardware.multiprocessors
        assert abs(share - part.compute / COMPUTE_PARTS) < 0.12
        gigabytes = kind.profile.hardware.memory_bytes * part.memory / MEMORY_PARTS / 1e9
        assert part.name == f"{part.compute}g.{round(gigabytes)}gb" or device == "H200"


@pytest.mark.parametrize("name", ["Llama-3-8b", "Llama-2-7b"])
@pytest.mark.parametrize("device", ["A100-80G@eager", "H100-80G", "GH200-96G"])
def test_a_model_costs_more_on_a_smaller_slice(device: str, name: str) -> None:
    (kind,) = parse_kinds(f"{device}:3g+2g+1g")
    costs = [unit.costs(spec(name)) for unit in kind.units]
    costs.insert(0, parse_kinds(device)[0].costs(spec(name)))
    for load in (JobLoad(0, 0, 0, 8, 8000), JobLoad(2048, 1, 2048 * 1024, 0, 0)):
        seconds = [each.of(load) for each in costs]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 3 * seconds[0]
    assert all(value >= 0 for each in costs for value in astuple(replace(each, hidden=0.0)))


def test_unequal_slices_are_devices_of_their_own_on_one_link() -> None:
    specs = [spec("Llama-3.2-3b")]
    cluster = Cluster(
        parse_kinds("GH200-96G:3g.48gb+2g+1g"),
        specs,
        resolve("balloon", placement="follow"),
        lambda device, at, output: None,
    )
    budgets = [d.state.settings.budget_bytes for d in cluster.devices.values()]
    assert budgets == pytest.approx([0.9 * 48e9, 0.9 * 24e9, 0.9 * 12e9], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("GH200-96G:slices5", "1, 2, 3, 4, 7"),
        ("GH200-96G:3g+3g+1g", "7 and 9"),
        ("GH200-96G:4g+4g", "8 and 8"),
        ("GH200-96G:5g", "3g.48gb"),
        ("L4:slices2", "GH200-96G"),
    ],
)
def test_layouts_that_no_device_has_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_kinds(text)
