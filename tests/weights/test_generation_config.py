"""What a checkpoint's configuration says beside its weights: sampling, context, a missing head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ballast.core.errors import CheckpointError
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.settings import ModelSettings
from ballast.weights.checkpoint import load_host_model, read_spec
from ballast.weights.generation_config import sampling_defaults
from tests.weights.test_checkpoint import make
from tests.weights.test_pooling import KINDS, modes, write


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
        ),
        (
            {"do_sample": True, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            {"repetition_penalty": 1.05, "max_tokens": 2048},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        ({"temperature": 1, "top_p": 1}, {"temperature": 1.0, "top_p": 1.0}),
        ({"temperature": None, "top_p": 0, "top_k": -2, "min_p": True}, {}),
        ({"temperature": "hot", "top_p": [1], "top_k": 2.5, "max_new_tokens": 0}, {}),
        ({"temperature": float("nan"), "top_p": float("inf"), "repetition_penalty": 10**400}, {}),
    ],
)
def test_what_makers_recommend(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert sampling_defaults(tmp_path) == SamplingDefaults(**expected)


def test_the_fleet_file_overrides_it_key_by_key(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    own = SamplingDefaults(temperature=0.1, max_tokens=7)
    spec = read_spec(ModelSettings(name="m", path=str(tmp_path), sampling=own))
    assert spec.sampling == SamplingDefaults(temperature=0.1, top_k=20, max_tokens=7)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_spec(ModelSettings(name="m", path=str(tmp_path)))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **more}


@pytest.mark.parametrize(
    ("parameters", "context"),
    [
        (rope("default"), 256),
        (rope("linear", factor=4.0), 1024),
        (rope("linear", factor=1.5), 384),
        (rope("yarn", factor=4.0), 1024),
        (rope("yarn", factor=4.0, original_max_position_embeddings=128), 512),
        (rope("yarn", factor=2.0, original_max_position_embeddings=128), 256),
        (rope("dynamic", factor=4.0), 256),
        (
            rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            256,
        ),
    ],
)
def test_the_context_of_scaled_rotary_embeddings(
    tmp_path: Path, parameters: dict[str, Any], context: int
) -> None:
    make(tmp_path, rope_parameters=parameters)
    settings = ModelSettings(name="m", path=str(tmp_path))
    assert read_spec(settings).max_model_len == context
    config = json.loads((tmp_path / "config.json").read_text())
    old = config.pop("rope_parameters")
    theta, kind = old.pop("rope_theta"), old.pop("rope_type")
    config |= {"rope_theta": theta, "rope_scaling": {"type": kind, **old}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(settings).max_model_len == context, "as files were written before"


def test_layers_with_ropes_of_different_kinds_have_the_context_that_is_stated(
    tmp_path: Path,
) -> None:
    """As of Gemma 3, whose global layers alone are scaled."""
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=99,
        max_position_embeddings=256,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": rope("default"),
            "full_attention": rope("linear", factor=8.0),
        },
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    assert read_spec(ModelSettings(name="m", path=str(tmp_path))).max_model_len == 256


def without_head(path: Path, *, prefixed: bool) -> Any:
    """A Llama as `LlamaModel.save_pretrained` writes it, or one whose head was dropped."""
    model = make(path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    if not prefixed:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["LlamaModel"]
    (path / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("implementation", ["generic", "auto"])
def test_an_embedder_of_the_last_token_needs_no_head(
    tmp_path: Path, prefixed: bool, said: bool, implementation: str
) -> None:
    """`said`: by sentence-transformers; else by the class that was saved."""
    without_head(tmp_path, prefixed=prefixed)
    if said:
        write(tmp_path, KINDS, modes("lasttoken"))
    settings = ModelSettings(name="m", path=str(tmp_path), model_impl=implementation)
    host = load_host_model(settings)
    assert host.spec.embeds
    assert not host.spec.generates
    assert [s.name for s in host.segments] == ["embeddings", "layer 0", "layer 1"]
    host.close()


def test_other_models_need_their_head(tmp_path: Path) -> None:
    make(tmp_path, tie_word_embeddings=False)
    settings = ModelSettings(name="m", path=str(tmp_path))
    whole = read_spec(settings)
    assert whole.generates
    assert not whole.embeds
    without_head(tmp_path, prefixed=False)
    write(tmp_path, KINDS, modes("mean_tokens"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        read_spec(settings)
    (tmp_path / "modules.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        read_spec(settings)


def test_a_tied_embedder_still_generates(tmp_path: Path) -> None:
    make(tmp_path, tie_word_embeddings=True, dtype=torch.bfloat16)
    write(tmp_path, KINDS, modes("lasttoken"))
    spec = read_spec(ModelSettings(name="m", path=str(tmp_path)))
    assert spec.embeds
    assert spec.generates
