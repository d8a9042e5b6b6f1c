"""What is found in folders and in the hub's cache, and the fleet file that is drafted of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ballast.core.units import GiB, MiB, parse_bytes
from ballast.fleet.fleet_draft import MachineMemory, draft, host_budget
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.model_search import FoundModel, LeftOut, search
from ballast.sim.model_catalogue import catalogue


def checkpoint(at: Path, *files: str) -> Path:
    at.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (at / name).write_text("{}")
    return at


def adapter(at: Path, base: str) -> Path:
    at.mkdir(parents=True)
    (at / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return at


def names(found: list[FoundModel]) -> list[tuple[str, str | None]]:
    return [(m.name, m.base) for m in found]


def test_checkpoints_adapters_and_gguf_files_are_found_below_a_folder(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "here" / "base model")
    checkpoint(a / "onnx")  # a checkpoint's own folders are not looked into
    adapter(tmp_path / "tuned" / "law", str(a))
    adapter(tmp_path / "tuned" / "tax", "../../here/base model")
    checkpoint(
        tmp_path / "files", "one.gguf", "mmproj-one.gguf", "two-00001-of-00002.gguf",
        "two-00002-of-00002.gguf",
    )  # fmt: skip
    checkpoint(tmp_path / ".hidden" / "model")
    found, left = search([tmp_path])
    assert names(found) == [
        ("one", None),
        ("two", None),
        ("base-model", None),
        ("law", "base-model"),
        ("tax", "base-model"),
    ]
    assert left == []


def test_a_repository_of_the_hubs_cache_is_named_by_its_id(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--Small-1B"
    checkpoint(repository / "snapshots" / "aaa")
    newer = checkpoint(repository / "snapshots" / "bbb")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb")
    other = tmp_path / "models--org--other"
    checkpoint(other / "snapshots" / "ccc")
    tuned = tmp_path / "models--me--tuned"
    adapter(tuned / "snapshots" / "ddd", "org/Small-1B")
    (tmp_path / "models--org--gone" / "snapshots").mkdir(parents=True)
    found, left = search([tmp_path])
    paths = {m.name: m.path for m in found}
    assert paths == {
        "Small-1B": "hf:org/Small-1B",
        "other": "hf:org/other@ccc",
        "tuned": "hf:me/tuned@ddd",
    }
    assert found[0].directory == newer
    assert found[-1].base == "Small-1B"
    assert [one.reason for one in left] == ["the hub's cache has no snapshot of it"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (("config.json", "pytorch_model.bin"), "pickle"),
        (("config.json",), "no \\*.safetensors"),
        (("config.json", "model.safetensors.incomplete"), "unfinished download"),
    ],
)
def test_what_cannot_be_served_is_left_out_with_the_reason(
    tmp_path: Path, files: tuple[str, ...], reason: str
) -> None:
    checkpoint(tmp_path / "m", *files)
    adapter(tmp_path / "alone", "nobody/knows")
    found, left = search([tmp_path])
    assert found == []
    why = " ".join(one.reason for one in left)
    assert re.search(reason, why)
    assert "nobody/knows" in why


def test_names_are_what_a_fleet_file_takes_each_once(tmp_path: Path) -> None:
    for folder in ("a/m", "b/m", "c/m", "d/Modèle (1)", "e/(("):
        checkpoint(tmp_path / folder)
    found, _ = search([tmp_path, tmp_path / "a"])  # found once, though searched twice
    assert [m.name for m in found] == ["m", "m-2", "m-3", "Mod-le-1", "model"]


def test_a_draft_is_a_fleet_file_whatever_names_paths_and_reasons_hold(tmp_path: Path) -> None:
    odd = checkpoint(tmp_path / 'a "b" ${HOME} #c: {d}\n')
    tuned = adapter(tmp_path / "tuned", str(odd))
    found, _ = search([tmp_path])
    spec = catalogue()["Llama-3.2-3b"].spec(max_model_len=8192)
    left = [LeftOut("x", "first\nmodels: []"), LeftOut("y\r", "\x1b[31mred")]
    text = draft(found, {found[0].name: spec}, left, MachineMemory((), 64 * GiB), "balloon")
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    fleet = load_fleet(file, presets=("balloon", "ballast"))
    assert [m.path for m in fleet.models] == [str(odd)]
    assert [a.path for a in fleet.models[0].adapters] == [str(tuned)]
    assert "\x1b" not in text


def test_budgets_are_what_the_machine_has(tmp_path: Path) -> None:
    spec = catalogue()["Llama-3.2-3b"].spec(max_model_len=8192)
    plenty = host_budget([spec], 100 * GiB)
    assert plenty >= spec.weight_bytes + spec.kv_bytes_per_token * 8192 - 64 * MiB
    # Its weights lie in host memory too, so half of a machine is what a budget can be.
    scarce = host_budget([spec], 10 * GiB)
    assert scarce + spec.weight_bytes <= 8 * GiB
    assert host_budget([spec], 0) == 256 * MiB
    model = FoundModel("m", str(tmp_path), tmp_path)
    text = draft([model], {"m": spec}, [], MachineMemory((80 * GiB, 40 * GiB), 0), "balloon")
    devices = [line for line in text.splitlines() if "cuda" in line]
    assert len(devices) == 2
    assert parse_bytes(devices[1].split("budget: ")[1].rstrip("}")) == 36 * GiB
