"""Large pages where models are large, small ones where they are not or nobody knows."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
)
from ballast.core.units import GiB, KiB, MiB
from ballast.weights.page_size import LARGE_PAGE, waste, with_page_sizes


def _checkpoint(directory: Path, layers: int, layer_bytes: int) -> str:
    """Headers as of a checkpoint in bfloat16, whose data nobody has written."""
    directory.mkdir()
    entries, at = {}, 0
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.w" for i in range(layers))]
    for name in names:
        entries[name] = {
            "dtype": "BF16",
            "shape": [layer_bytes // 2],
            "data_offsets": [at, at + layer_bytes],
        }
        at += layer_bytes
    header = json.dumps(entries).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
    return str(directory)


def _fleet(*paths: str, budget: int = GiB, given: bool = False, **keys: object) -> FleetSettings:
    models = tuple(ModelSettings(name=Path(p).name, path=p) for p in paths)
    device = DeviceSettings(budget_bytes=budget, page_given=given)
    return FleetSettings(models=models, device=replace(device, **keys))  # type: ignore[arg-type]


@pytest.fixture
def large(tmp_path: Path) -> str:
    return _checkpoint(tmp_path / "large", 12, 40 * MiB + 4096)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return _checkpoint(tmp_path / "small", 6, 3 * MiB)


def test_large_models_have_large_pages(large: str) -> None:
    assert with_page_sizes(_fleet(large)).device.page_bytes == LARGE_PAGE


def test_one_small_model_keeps_pages_small(large: str, small: str) -> None:
    assert with_page_sizes(_fleet(large, small)).device.page_bytes == 256 * KiB


def test_a_page_that_was_given_stays(large: str) -> None:
    fleet = _fleet(large, given=True)
    assert with_page_sizes(fleet) is fleet


def test_a_small_budget_keeps_pages_small(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "m", 2, 40 * MiB)
    assert with_page_sizes(_fleet(path, budget=255 * MiB)).device.page_bytes == 256 * KiB
    assert with_page_sizes(_fleet(path, budget=256 * MiB)).device.page_bytes == LARGE_PAGE


def test_ranks_have_parts_of_segments_and_of_the_budget(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "m", 12, 40 * MiB)
    assert with_page_sizes(_fleet(path, tensor_parallel=2)).device.page_bytes == LARGE_PAGE
    assert with_page_sizes(_fleet(path, tensor_parallel=16)).device.page_bytes == 256 * KiB


def test_what_cannot_be_read_changes_nothing(large: str, tmp_path: Path) -> None:
    fleet = _fleet(large, str(tmp_path / "none"))
    assert with_page_sizes(fleet) is fleet


def test_devices_have_pages_of_one_size(large: str, small: str) -> None:
    fleet = _fleet(large, small)
    models = tuple(replace(m, devices=(f"cpu:{i}",)) for i, m in enumerate(fleet.models))
    others = (DeviceSettings(name="cpu:1", budget_bytes=GiB, page_given=False),)
    links = (LinkSettings(device="cpu:1"),)
    fleet = replace(fleet, models=models, others=others, other_links=links)
    assert {d.page_bytes for d, _ in with_page_sizes(fleet).devices.values()} == {256 * KiB}
    small_pages = replace(others[0], page_given=True, page_bytes=64 * KiB)
    assert with_page_sizes(replace(fleet, others=(small_pages,))).device.page_bytes == 256 * KiB
    large_pages = replace(small_pages, page_bytes=LARGE_PAGE)
    sized = with_page_sizes(replace(fleet, others=(large_pages,)))
    assert [d.page_bytes for d, _ in sized.devices.values()] == [LARGE_PAGE, LARGE_PAGE]


def test_weights_that_just_fit_keep_pages_small(tmp_path: Path) -> None:
    """All models, or one of them: what has to be there together has room beside it."""
    path = _checkpoint(tmp_path / "m", 12, 41 * MiB)  # 533 MiB, rounded 546
    assert with_page_sizes(_fleet(path, budget=605 * MiB)).device.page_bytes == 256 * KiB
    assert with_page_sizes(_fleet(path, budget=615 * MiB)).device.page_bytes == LARGE_PAGE
    twin = _checkpoint(tmp_path / "twin", 12, 41 * MiB)
    assert with_page_sizes(_fleet(path, twin, budget=615 * MiB)).device.page_bytes == LARGE_PAGE
    assert with_page_sizes(_fleet(path, twin, budget=1140 * MiB)).device.page_bytes == 256 * KiB
    assert with_page_sizes(_fleet(path, twin, budget=1160 * MiB)).device.page_bytes == LARGE_PAGE


@pytest.mark.parametrize(
    ("layer", "budget", "page"),
    [
        (436 * MiB, 60 * GiB, 32 * MiB),  # as of 8 billion parameters
        (436 * MiB, 1300 * MiB, 8 * MiB),  # fewer than 128 of 16 MiB
        (170 * MiB, 60 * GiB, 16 * MiB),  # 192 of 32 MiB would be 13 % more
        (86 * MiB, 60 * GiB, 8 * MiB),
        (35 * MiB, 60 * GiB, 2 * MiB),  # small: as before
    ],
)
def test_gpus_have_pages_by_their_largest_waste(
    tmp_path: Path, layer: int, budget: int, page: int
) -> None:
    path = _checkpoint(tmp_path / "m", 1 if budget < 2 * GiB else 6, layer)
    plain = {"name": "cuda:0", "page_bytes": 2 * MiB}
    fleet = _fleet(path, budget=budget, **plain)
    assert with_page_sizes(fleet).device.page_bytes == page
    given = _fleet(path, budget=budget, given=True, **plain)
    assert with_page_sizes(given) is given


def test_a_small_model_beside_a_large_one_keeps_a_gpus_pages(tmp_path: Path, small: str) -> None:
    path = _checkpoint(tmp_path / "m", 6, 436 * MiB)
    fleet = _fleet(path, small, budget=60 * GiB, name="cuda:0", page_bytes=2 * MiB)
    assert with_page_sizes(fleet) is fleet


def test_pages_of_gpus_and_cpus_are_chosen_apart(tmp_path: Path, large: str) -> None:
    path = _checkpoint(tmp_path / "m", 6, 436 * MiB)
    fleet = _fleet(path, large, budget=60 * GiB, name="cuda:0", page_bytes=2 * MiB)
    others = (DeviceSettings(name="cpu:0", budget_bytes=GiB, page_given=False),)
    models = tuple(
        replace(m, devices=(name,))
        for m, name in zip(fleet.models, ("cuda:0", "cpu:0"), strict=True)
    )
    links = (LinkSettings(device="cpu:0"),)
    fleet = replace(fleet, models=models, others=others, other_links=links)
    sized = [d.page_bytes for d, _ in with_page_sizes(fleet).devices.values()]
    assert sized == [32 * MiB, LARGE_PAGE]


def test_waste_is_what_rounding_adds() -> None:
    assert waste([LARGE_PAGE, 2 * LARGE_PAGE], LARGE_PAGE) == 0
    assert waste([LARGE_PAGE // 2, LARGE_PAGE // 2], LARGE_PAGE) == 1
    assert waste([LARGE_PAGE], LARGE_PAGE, ranks=2) == 1
