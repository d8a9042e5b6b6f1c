"""Where models go, and what each device's worker is told, without any worker."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster.placing import homes_of, part_of, placed
from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings, Role
from ballast.core.units import MiB


def checkpoint(directory: Path, name: str, elements: int, dtype: str = "BF16") -> ModelSettings:
    """A header, and as many bytes as it speaks of, none of them written."""
    n_bytes = elements * (2 if dtype == "BF16" else 4)
    entry = {"dtype": dtype, "shape": [elements], "data_offsets": [0, n_bytes]}
    header = json.dumps({"w": entry}).encode()
    (directory / name).mkdir()
    with open(directory / name / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + n_bytes)
    return ModelSettings(name=name, path=str(directory / name))


def fleet(*models: ModelSettings, budgets: tuple[int, ...] = (16, 16)) -> FleetSettings:
    devices = [DeviceSettings(name=f"cpu:{i}", budget_bytes=n * MiB) for i, n in enumerate(budgets)]
    links = [LinkSettings(device=d.name, bytes_per_second=1e9 * i) for i, d in enumerate(devices)]
    return FleetSettings(
        models=models,
        device=devices[0],
        link=links[0],
        others=tuple(devices[1:]),
        other_links=tuple(links[1:]),
        story_path="/x/fleet.jsonl",
    )


def test_models_are_spread_by_size_around_those_that_name_their_devices(tmp_path: Path) -> None:
    large = checkpoint(tmp_path, "large", 4 * MiB)
    stays = replace(checkpoint(tmp_path, "stays", 3 * MiB), devices=("cpu:0",))
    small = checkpoint(tmp_path, "small", MiB // 4)
    both = replace(checkpoint(tmp_path, "both", MiB), devices=("cpu:0", "cpu:1"))
    served = fleet(small, stays, large, both)
    homes = homes_of(served)
    assert homes == {
        "stays": ["cpu:0"],
        "both": ["cpu:0", "cpu:1"],
        "large": ["cpu:1"],
        "small": ["cpu:0"],
    }
    more = replace(checkpoint(tmp_path, "more", MiB, "F32"), dtype="bfloat16")
    assert placed([more], served, homes) == {"more": ["cpu:0"]}


def test_a_model_has_a_device_that_prefills_and_one_that_decodes(tmp_path: Path) -> None:
    a, b = (checkpoint(tmp_path, name, MiB) for name in "ab")
    served = fleet(a, b, budgets=(16, 16, 16))

    def homes(*roles: Role) -> dict[str, list[str]]:
        devices = [d for d, _ in served.devices.values()]
        made = [replace(d, role=role) for d, role in zip(devices, roles, strict=True)]
        return homes_of(replace(served, device=made[0], others=tuple(made[1:])))

    apart = homes(Role.PREFILL, Role.DECODE, Role.DECODE)
    assert apart == {"a": ["cpu:0", "cpu:1"], "b": ["cpu:0", "cpu:2"]}
    assert homes(Role.BOTH, Role.DECODE, Role.DECODE)["a"][0] == "cpu:0"


def test_a_model_larger_than_every_device_is_left_to_the_largest_to_refuse(tmp_path: Path) -> None:
    """At the start, so that others are served; a model that is added is refused at once."""
    large, small = checkpoint(tmp_path, "large", 9 * MiB), checkpoint(tmp_path, "small", MiB)
    assert homes_of(fleet(large, budgets=(16, 18))) == {"large": ["cpu:1"]}
    both = fleet(large, small, budgets=(16, 17, 16))
    assert homes_of(both) == {"large": ["cpu:1"], "small": ["cpu:1"]}
    with pytest.raises(ConfigError, match=r"large has 18MiB of weights, the largest device 17MiB"):
        placed([large], both, {})


def test_models_whose_weights_stay_on_the_host_are_on_all_devices(tmp_path: Path) -> None:
    """However many, and however large each is."""
    models = [checkpoint(tmp_path, name, 9 * MiB) for name in "abc"]
    everywhere = replace(fleet(*models), preset="c2cserve")
    assert homes_of(everywhere) == {name: ["cpu:0", "cpu:1"] for name in "abc"}
    assert placed(models[:1], everywhere, {"b": ["cpu:0"]}) == {"a": ["cpu:0", "cpu:1"]}


def test_a_device_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a: devices.*gpu.*known here: cpu:0, cpu:1"):
        homes_of(fleet(ModelSettings(name="a", path="a", devices=("cpu:0", "gpu"))))
    twice = ModelSettings(name="a", path="a", devices=("cpu:1", "cpu:1"))
    assert homes_of(fleet(twice)) == {"a": ["cpu:1"]}


def test_what_cannot_be_read_is_spread_as_well() -> None:
    unknown = [ModelSettings(name=name, path="nowhere") for name in "abcd"]
    homes = homes_of(fleet(*unknown))
    assert sorted(at for (at,) in homes.values()) == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]
    assert set(map(tuple, homes_of(fleet(*unknown, budgets=(16,))).values())) == {("cpu:0",)}


def test_each_device_has_its_own_models_memory_threads_and_link() -> None:
    models = [ModelSettings(name=name, path=name) for name in "ab"]
    served = fleet(*models, budgets=(16, 32, 8))
    served = replace(served, others=(replace(served.others[0], threads=3), *served.others[1:]))
    part = part_of(served, "cpu:1", {"b"}, cores=8)
    assert ([m.name for m in part.models], part.device) == (["b"], served.others[0])
    assert (part.link, part.others, part.other_links) == (served.other_links[0], (), ())
    assert part.story_path == served.story_path
    shares = [part_of(served, name, (), 8).device.threads for name in served.devices]
    assert shares == [2, 3, 2]
    assert part_of(served, "cpu:0", (), 2).device.threads == 1
    alone = fleet(*models, budgets=(16,))
    assert part_of(alone, "cpu:0", {"a", "b"}, cores=8) == alone
