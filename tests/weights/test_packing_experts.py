"""Experts as they lie in memory, from checkpoints that store them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import ConfigError, UnsupportedModel
from ballast.core.settings import ModelSettings
from ballast.kernels import linear
from ballast.memory.tensor import tensor_at
from ballast.weights.checkpoint import load_host_model
from ballast.weights.inspection import inspect_model
from ballast.weights.packing import fused
from ballast.weights.packing_experts import DOWN, GATE_UP, LAYOUTS, ROUTER, uniform_forms
from ballast.weights.sharding import Shard
from benchmarks.families import config, make


def layout_of(family: str, *, packed: bool = True, **changes: Any) -> Any:
    return fused(inspect_model(config(family, **changes)), "float32", packed=packed)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_expert_is_where_it_belongs(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(tmp_path, config(family))
    name = str(dtype).removeprefix("torch.")
    settings = ModelSettings(name="m", path=str(tmp_path), dtype=name)
    host = load_host_model(settings)
    assert host.fused
    state = model.state_dict()
    layer = 2
    segment, base = host.segments[1 + layer], host.addresses[1 + layer]
    by_role = {role: t for t in segment.tensors for role in t.names}
    prefix = f"model.layers.{layer}.mlp."
    router = by_role[ROUTER]
    found = tensor_at(base + router.offset, router.shape, dtype)
    assert torch.equal(found, state[f"{prefix}gate.weight"].to(dtype))
    for role, key in ((GATE_UP, "experts.gate_up_proj"), (DOWN, "experts.down_proj")):
        tensor, whole = by_role[role], state[f"{prefix}{key}"].to(dtype)
        experts, n, k = tensor.shape
        assert whole.shape == tensor.shape
        assert tensor.layout in LAYOUTS
        assert tensor.piece_bytes * experts == tensor.n_bytes
        for e, matrix in enumerate(whole):
            if role == GATE_UP:
                matrix = linear.gated(*matrix.chunk(2))
            address = base + tensor.offset + e * tensor.piece_bytes
            panels = tensor_at(address, linear.packed_shape(n, k, dtype), dtype)
            assert torch.equal(panels, linear.pack(matrix)), (role, e)
    host.close()


def test_layers_without_experts_have_matrices_of_their_own() -> None:
    layout = layout_of("qwen3_moe")  # its second layer
    roles = [{role for t in tensors for role in t.names} for _, tensors in layout[1:4]]
    assert {ROUTER, GATE_UP, DOWN} <= roles[0]
    assert not {"gate_up", "down"} & roles[0]
    assert {"gate_up", "down"} <= roles[1]
    assert not {ROUTER, GATE_UP, DOWN} & roles[1]


@pytest.mark.parametrize(
    ("family", "packed", "changes"),
    [
        ("mixtral", False, {}),
        ("qwen3_moe", False, {}),
        ("mixtral", True, {"hidden_act": "gelu"}),
        ("qwen2_moe", True, {}),
        ("olmoe", True, {}),
        ("granitemoe", True, {}),
    ],
)
def test_what_goes_the_generic_path(family: str, packed: bool, changes: dict[str, Any]) -> None:
    """Plain matrices, as GPUs have them; other activations; experts beside others, other norms."""
    assert layout_of(family, packed=packed, **changes) is None


def test_plain_experts_are_refused_where_the_fast_path_is_asked_for(tmp_path: Path) -> None:
    make(tmp_path, config("mixtral"))
    settings = ModelSettings(name="m", path=str(tmp_path), model_impl="fused", linear="plain")
    with pytest.raises(UnsupportedModel, match="fused"):
        load_host_model(settings)


def test_experts_are_not_divided_over_ranks(tmp_path: Path) -> None:
    make(tmp_path, config("mixtral"))
    settings = ModelSettings(name="m", path=str(tmp_path))
    with pytest.raises(ConfigError, match="experts"):
        load_host_model(settings, shard=Shard(0, 2))


@pytest.mark.parametrize("odd", [None, "", "INT4Z-F16:128+other"])
def test_experts_stay_quantised_if_all_are_in_one_form(odd: str | None) -> None:
    architecture = inspect_model(config("mixtral"))
    names = [w.names[0] for _, wanted in architecture.segments for w in wanted]
    experts = [name for name in names if ".mlp.experts." in name]
    forms = dict.fromkeys([*experts, "model.layers.0.self_attn.q_proj.weight"], "INT4Z-F16:128")
    if odd is not None:
        forms[experts[-1]] = odd
    kept = uniform_forms(architecture, forms)
    assert "model.layers.0.self_attn.q_proj.weight" in kept
    assert all((name in kept) == (odd is None) for name in experts)
