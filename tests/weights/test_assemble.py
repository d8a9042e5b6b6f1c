"""Recipes do to runs of files what torch does to whole tensors; renamed and split checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter

from ballast.core.errors import CheckpointError, UnsupportedModel
from ballast.core.settings import ModelSettings
from ballast.memory.tensor import tensor_at
from ballast.weights import segment as segments
from ballast.weights.assemble import (
    Recipe,
    Sources,
    _split,
    _transposed,
    concatenate,
    recipes,
    stack,
)
from ballast.weights.checkpoint import load_host_model
from ballast.weights.inspection import inspect_model
from ballast.weights.stored import read_header
from benchmarks.architectures import auto_of
from benchmarks.families import config, make
from benchmarks.tiny import tiny


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_recipes_are_what_torch_does(
    shape: list[int],
    counts: list[int],
    data: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Lists of `counts[i]` tensors, each list stacked, the stacks concatenated."""
    path = tmp_path_factory.mktemp("x") / "model.safetensors"
    dim = data.draw(st.integers(0, len(shape)))
    n = max(counts)
    tensors: dict[str, torch.Tensor] = {}
    lists: list[list[str]] = []
    for i in range(len(counts)):
        own = list(shape)
        if dim > 0:
            own[dim - 1] = counts[i]
        many = n if dim > 0 else counts[i]
        lists.append([f"{i}.{j}" for j in range(many)])
        tensors |= {name: torch.randn(own) for name in lists[-1]}
    expected = torch.cat([torch.stack([tensors[name] for name in names]) for names in lists], dim)
    save_file(tensors, path)
    stored = read_header(path)
    recipe = concatenate([stack([Recipe.of(stored[x]) for x in names]) for names in lists], dim)
    assert recipe.shape == expected.shape
    with Sources([recipe]) as sources:
        assert torch.equal(sources.read(recipe, torch.float32), expected)
        half = sources.read(recipe, torch.bfloat16)
        assert torch.equal(half, expected.to(torch.bfloat16))
        start = data.draw(st.integers(0, expected.numel() - 1))
        part = torch.empty(data.draw(st.integers(1, expected.numel() - start)))
        sources.fill(recipe, start, part)
        assert torch.equal(part, expected.flatten()[start : start + part.numel()])


@given(shape=st.lists(st.integers(1, 4), min_size=2, max_size=3), data=st.data())
def test_parts_and_transposes_are_what_torch_makes(
    shape: list[int], data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("x") / "model.safetensors"
    tensor = torch.randn(shape)
    save_file({"x": tensor}, path)
    whole, dim = Recipe.of(read_header(path)["x"]), data.draw(st.integers(-len(shape), -1))
    sizes = [data.draw(st.integers(0, shape[dim]))]
    sizes.append(shape[dim] - sizes[0])
    parts = zip(_split(whole, dim, sizes), tensor.split(sizes, dim), strict=True)
    with Sources([whole]) as sources:
        for ours, theirs in [*parts, (_transposed(whole, {-2, -1}), tensor.mT)]:
            assert torch.equal(sources.read(ours, torch.float32), theirs)
            start = data.draw(st.integers(0, theirs.numel()))
            rest = torch.empty(theirs.numel() - start)
            sources.fill(ours, start, rest)
            assert torch.equal(rest, theirs.flatten()[start:])


def contents(path: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """All tensors of the host tier, by every name they have."""
    settings = {"model_impl": "generic", "linear": "plain", **settings}
    model = load_host_model(ModelSettings(name="m", path=str(path), **settings))
    found = {}
    for segment, base in zip(model.segments, model.addresses, strict=True):
        for t in segment.tensors:
            tensor = tensor_at(base + t.offset, t.shape, torch.float32).clone()
            found.update(dict.fromkeys(t.names, tensor))
    model.close()
    return found


def stored_names(path: Path) -> list[str]:
    return list(load_file(path / "model.safetensors"))


def rewrite(
    path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    file = path / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "phimoe"])
def test_experts_are_put_together(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(tmp_path, config(family)).state_dict()
    monkeypatch.setattr(segments, "PIECE_BYTES", 4096)  # pieces that begin and end within an expert
    found = contents(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["sarvam_moe", "lara_mini", "molmo2", "qwen3_vl_moe"])
def test_matrices_stored_as_one_or_the_other_way_round(kind: str, tmp_path: Path) -> None:
    wanted = tiny(kind)
    assert inspect_model(wanted).vocab == 1000  # of the head: Molmo 2 embeds more
    expected = make(tmp_path, wanted, auto=auto_of(wanted)).state_dict()
    assert not set(expected) <= set(stored_names(tmp_path)) or kind == "qwen3_vl_moe"
    for name, tensor in contents(tmp_path).items():
        assert torch.equal(tensor, expected[name]), name


def test_mixtral_as_it_is_on_the_hub(tmp_path: Path) -> None:
    make(tmp_path, config("mixtral"))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert name in stored_names(tmp_path)


def test_experts_stored_as_one_tensor(tmp_path: Path) -> None:
    model = make(tmp_path, config("qwen3_moe"))
    whole = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")
    found = contents(tmp_path)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


def test_many_experts_in_their_order(tmp_path: Path) -> None:
    """Expert 10 comes after expert 9, not after expert 1."""
    model = make(tmp_path, config("qwen3_moe", num_experts=12))
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(contents(tmp_path)[name], model.state_dict()[name])


def test_the_head_of_gpt_neox(tmp_path: Path) -> None:
    model = make(tmp_path, config("gpt_neox"))
    assert "embed_out.weight" in stored_names(tmp_path)
    assert torch.equal(contents(tmp_path)["lm_head.weight"], model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_checkpoint_of_the_model_without_its_prefix(family: str, tmp_path: Path) -> None:
    """As old ones are on the hub; transformers adds `model.` or `transformer.` itself."""
    model = make(tmp_path, config(family, tie_word_embeddings=True))
    prefix = f"{model.base_model_prefix}."
    rewrite(tmp_path, lambda t: {k.removeprefix(prefix): v for k, v in t.items()})
    assert not any(name.startswith(prefix) for name in stored_names(tmp_path))
    found = contents(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(found[name], tensor), name


PART = "model.layers.2.mlp.experts.3.up_proj.weight"
WHOLE = "model.layers.2.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "tensor", "reason"),
    [
        (lambda t: {k: v for k, v in t.items() if k != PART}, WHOLE, "not equally many"),
        (
            lambda t: {k: v for k, v in t.items() if "layers.2.mlp.experts.3." not in k},
            WHOLE,
            r"from 10 .*shape \(5, 96, 64\), the model needs \(6, 96, 64\)",
        ),
        (
            lambda t: {k: v for k, v in t.items() if not ("layers.2." in k and "up_proj" in k)},
            WHOLE,
            "nothing is stored for its part .*up_proj",
        ),
        (
            lambda t: {k: v for k, v in t.items() if "layers.2.mlp.experts" not in k},
            WHOLE,
            "missing",
        ),
        (lambda t: {**t, PART: t[PART].T}, WHOLE, rf"{PART} has shape \(64, 48\), others"),
        (lambda t: {**t, PART: t[PART].double()}, PART, "F64"),
    ],
    ids=["an expert's part", "an expert", "all of a part", "all", "a shape", "a dtype"],
)
def test_faults_of_parts(tmp_path: Path, change: Any, tensor: str, reason: str) -> None:
    make(tmp_path, config("qwen3_moe"))
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=reason) as caught:
        contents(tmp_path)
    assert caught.value.tensor == tensor
    assert caught.value.file.startswith(str(tmp_path))


def test_a_conversion_that_is_not_known(tmp_path: Path) -> None:
    make(tmp_path, config("qwen3_moe"))
    architecture = inspect_model(config("qwen3_moe"))
    turned = WeightConverter(
        "mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [Interleave()]
    )
    object.__setattr__(architecture, "conversions", (turned,))
    with pytest.raises(UnsupportedModel, match="Interleave"):
        recipes(architecture, read_header(tmp_path / "model.safetensors"), tmp_path)


def test_a_run_knows_where_it_is(tmp_path: Path) -> None:
    make(tmp_path, config("mixtral"))
    architecture = inspect_model(config("mixtral"))
    found = recipes(architecture, read_header(tmp_path / "model.safetensors"), tmp_path)
    gate_up = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.plain is None
    assert len(gate_up.runs) == 12
    assert sum(run.n for run in gate_up.runs) == math.prod(gate_up.shape)
    norm = found["model.norm.weight"].plain
    assert norm is not None
    assert norm.name == "model.norm.weight"
