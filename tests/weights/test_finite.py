"""Weights that are NaN or infinite are refused where they are read, by file, tensor and place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.core.errors import CheckpointError
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.weights.checkpoint import load_host_model
from ballast.weights.finite import is_finite
from benchmarks.adapters import random_adapter
from tests.models.tiny import llama

FILE = "model.safetensors"
LAYER = "model.layers.1"


def damaged(path: Path, name: str, place: tuple[int, ...], value: float, dtype: torch.dtype) -> Any:
    """A random Llama of which one element has this value; the model before."""
    model = llama(path, dtype=dtype, tie_word_embeddings=False)
    tensors = load_file(path / FILE)
    tensors[name][place] = value
    save_file(tensors, path / FILE)
    return model


def load(path: Path, **settings: Any) -> None:
    load_host_model(ModelSettings(name="m", path=str(path), **settings)).close()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, math.nan), (torch.bfloat16, math.inf), (torch.float16, -math.inf)],
)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", (330, 63)),
        ("model.norm.weight", (0,)),
        ("lm_head.weight", (7, 5)),
        (f"{LAYER}.self_attn.k_proj.weight", (3, 1)),
        (f"{LAYER}.mlp.up_proj.weight", (149, 0)),
        (f"{LAYER}.input_layernorm.weight", (11,)),
    ],
)
def test_one_element_is_named(
    tmp_path: Path, name: str, place: tuple[int, ...], value: float, dtype: torch.dtype
) -> None:
    damaged(tmp_path, name, place, value, dtype)
    words = "NaN" if math.isnan(value) else f"{value:g}"
    for settings in ({}, {"model_impl": "generic"}, {"linear": "plain"}):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path, **settings)
        assert caught.value.file == str(tmp_path / FILE)
        assert caught.value.tensor == name
        assert f"has {words} at {list(place)}; 1 of" in caught.value.reason


def test_what_the_served_dtype_cannot_hold_is_named(tmp_path: Path) -> None:
    """3.4e38 is a number in float32, and infinity in bfloat16."""
    name = f"{LAYER}.mlp.down_proj.weight"
    damaged(tmp_path, name, (2, 3), 3.4e38, torch.float32)
    load(tmp_path)
    with pytest.raises(CheckpointError, match=r"3.4e\+38, which is beyond bfloat16, at \[2, 3\]"):
        load(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_is_named_and_its_base_serves(tmp_path: Path, value: float, half: str) -> None:
    base = llama(tmp_path / "base")
    made = random_adapter(base, tmp_path / "lora", seed=1)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if half in n)
    tensors[name][1, 2] = value
    save_file(tensors, file)
    adapter = AdapterSettings(name="a", path=str(made.path))
    host = load_host_model(
        ModelSettings(name="m", path=str(tmp_path / "base"), adapters=(adapter,))
    )
    assert name in host.failed["a"]
    assert "at [1, 2]" in host.failed["a"]
    assert not host.spec.adapters
    host.close()


@pytest.mark.parametrize("n", [1, 2, 31, 32_767, 32_768, 100_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_place_is_looked_at(n: int, dtype: torch.dtype) -> None:
    values = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    values[n // 2 :] = torch.finfo(dtype).min
    assert is_finite(values)
    for at in {0, n // 2, n - 1}:
        for wrong in (math.nan, math.inf, -math.inf):
            before = float(values[at])
            values[at] = wrong
            assert not is_finite(values)
            values[at] = before
