"""What was found out about a checkpoint is found again until anything it depends on changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from ballast.core.errors import CheckpointError
from ballast.core.settings import ModelSettings, Slo
from ballast.fleet.make import make_fleet
from ballast.isolation.calls import Here
from ballast.weights import findings
from ballast.weights.adapter import AdapterParts, AdapterSource, read_parts
from ballast.weights.checkpoint import read_spec
from ballast.weights.findings import Findings, RememberingIsolation
from ballast.weights.manifest import Manifest, ManifestRequest, read_manifest
from ballast.weights.meta_module import linear_modules
from benchmarks.adapters import random_adapter
from tests.models.tiny import llama


class Counting(Here):
    calls = 0

    def call(self, function: Callable[..., Any], argument: Any, result: Any) -> Any:
        self.calls += 1
        return super().call(function, argument, result)


def refuse(directory: Path) -> None:
    raise CheckpointError(str(directory), None, "it is bad")


def accept(directory: Path) -> None:
    """Find nothing wrong."""


@pytest.fixture
def remembering(tmp_path: Path) -> tuple[RememberingIsolation, Counting]:
    counting = Counting()
    return RememberingIsolation(counting, Findings(tmp_path / "findings")), counting


def test_a_manifest_is_read_once_for_the_same_files_and_settings(
    tmp_path: Path, remembering: tuple[RememberingIsolation, Counting]
) -> None:
    isolation, counting = remembering
    made = make_fleet(tmp_path / "fleet", n_models=1, steps=0, size="tiny", dtype="float32")
    settings = ModelSettings(name="a", path=str(made.models[0].path))
    wanted = ManifestRequest(settings)
    first = isolation.call(read_manifest, wanted, Manifest)
    assert isolation.call(read_manifest, wanted, Manifest) == first
    assert counting.calls == 1
    assert first == read_manifest(wanted)
    isolation.call(
        read_manifest, ManifestRequest(ModelSettings(name="b", path=settings.path)), Manifest
    )
    assert counting.calls == 2
    (made.models[0].path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert isolation.call(read_manifest, wanted, Manifest).eos == (3,)
    assert counting.calls == 3


def test_settings_that_reading_does_not_depend_on_change_without_another(
    tmp_path: Path, remembering: tuple[RememberingIsolation, Counting]
) -> None:
    isolation, counting = remembering
    llama(tmp_path / "model")
    settings = ModelSettings(name="a", path=str(tmp_path / "model"))
    elsewhere = replace(settings, devices=("cpu:1",), slo=Slo(ttft=3.0), block_tokens=32)
    found = read_spec(settings, isolation=isolation)
    other = read_spec(elsewhere, isolation=isolation)
    assert counting.calls == 1
    assert (found.block_tokens, other.block_tokens) == (16, 32)
    read_spec(replace(settings, max_model_len=64), isolation=isolation)
    assert counting.calls == 2


def test_what_fails_is_tried_again(
    tmp_path: Path, remembering: tuple[RememberingIsolation, Counting]
) -> None:
    isolation, counting = remembering
    (tmp_path / "config.json").touch()
    for _ in range(2):
        with pytest.raises(CheckpointError):
            isolation.call(refuse, tmp_path, NoneType)
    assert counting.calls == 2


def test_what_cannot_be_read_is_found_out_again(tmp_path: Path) -> None:
    counting, kept = Counting(), tmp_path / "kept"
    isolation = RememberingIsolation(counting, Findings(kept))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    assert Findings(kept).is_empty
    isolation.call(accept, model, NoneType)
    isolation.call(accept, model, NoneType)
    assert counting.calls == 1
    [file] = kept.iterdir()
    assert (file.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_bytes(b"\xc1 torn")
    isolation.call(accept, model, NoneType)
    assert counting.calls == 2


def test_the_directory_is_bounded_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "MOST_FILES", 3)
    kept = Findings(tmp_path)
    for i in range(5):
        kept.keep(f"key{i}", i)
        os.utime(tmp_path / f"key{i}", (1000 + i, 1000 + i))
        if i == 2:
            assert kept.find("key0", int) == 0  # the newest from now on
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key0", "key3", "key4"]
    assert kept.find("key4", str) is None


def test_nothing_is_kept_where_there_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = Findings(tmp_path / "file" / "below")
    kept.keep("key", 1)
    assert kept.find("key", int) is None


def test_pairs_of_an_adapter_are_read_once_for_the_same_files_and_modules(
    tmp_path: Path, remembering: tuple[RememberingIsolation, Counting]
) -> None:
    isolation, counting = remembering
    model = llama(tmp_path / "base", num_hidden_layers=1)
    random_adapter(model, tmp_path / "lora", seed=1, only=("q_proj",))
    modules = linear_modules(model.config)
    wanted = AdapterSource(tmp_path / "lora", modules)
    first = isolation.call(read_parts, wanted, AdapterParts)
    assert [pair.module for pair in first.pairs] == ["model.layers.0.self_attn.q_proj"]
    assert isolation.call(read_parts, wanted, AdapterParts) == first
    assert counting.calls == 1
    assert (
        isolation.call(
            read_parts, AdapterSource(tmp_path / "lora", modules | {"x": (1, 1)}), AdapterParts
        )
        == first
    )
    assert counting.calls == 2


def test_what_names_no_files_is_found_out_each_time(
    remembering: tuple[RememberingIsolation, Counting],
) -> None:
    isolation, counting = remembering
    assert [isolation.call(abs, -3, int) for _ in range(2)] == [3, 3]
    assert counting.calls == 2
