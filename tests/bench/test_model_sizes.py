"""Sizes of a fleet's models, of the catalogue or of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.model_sizes import CONTEXT, sizes_of
from ballast.bench.run import specs_of
from ballast.core.errors import ConfigError
from ballast.core.settings import (
    AdapterSettings,
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
    Slo,
)
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS

SEVEN = ModelSettings(
    name="chat", path="catalogue:llama-2-7B", slo=Slo(ttft=3.0), share=2.0, max_waiting=7
)


def fleet(*models: ModelSettings) -> FleetSettings:
    device = DeviceSettings(budget_bytes=0)
    return FleetSettings(models=models, device=device, link=LinkSettings())


def test_the_catalogues_sizes_with_the_fleets_settings() -> None:
    chat, code = sizes_of(fleet(SEVEN, replace(SEVEN, name="code", max_model_len=4096)))
    assert (chat.name, chat.share, chat.max_waiting, chat.slo.ttft) == ("chat", 2.0, 7, 3.0)
    assert (chat.max_model_len, code.max_model_len) == (CONTEXT, 4096)
    assert 13.4e9 < chat.weight_bytes < 13.6e9
    assert chat.fingerprint != code.fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "catalogue:Llama-2-8b"}, "chat: path: .*did you mean 'Llama-3-8b'.*Llama-2-70b"),
        ({"dtype": "float32"}, "chat: dtype.*bfloat16"),
        ({"adapters": (AdapterSettings(name="tuned", path="."),)}, "stand on a checkpoint"),
    ],
)
def test_what_the_catalogue_has_not(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sizes_of(fleet(replace(SEVEN, **change)))  # type: ignore[arg-type]


def test_checkpoints_are_sized_as_they_are_served(tmp_path: Path) -> None:
    made = make_fleet(tmp_path, n_models=2, size="tiny", steps=0, budget="32MiB")
    loaded = load_fleet(made.file, presets=PRESETS)
    for result, served in zip(sizes_of(loaded), specs_of(loaded), strict=True):
        assert (result.name, result.segment_bytes) == (served.name, served.segment_bytes)
