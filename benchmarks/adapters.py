"""Random LoRA adapters in PEFT's format, and the model with one merged into its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """An adapter at `path`. `deltas`: what it adds to each module's weight, by path, float32."""

    path: Path
    deltas: Mapping[str, Tensor]


def random_adapter(
    model: nn.Module,
    path: Path,
    seed: int,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    only: Collection[str] = (),
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    rs: bool = False,
    strength: float = 0.5,
    **config: Any,
) -> RandomAdapter:
    """Write an adapter for `model` that changes its output for good.

    It adapts the linear modules whose name (the path's last part) is in `only`; by default all but
    the head. `ranks` and `alphas` are exceptions by such names. `strength`: standard deviation of
    what is added to a weight, over that of the weight. `config` goes into the configuration as is.
    """
    random = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()  # type: ignore[operator]
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for module_path, module in model.named_modules():
        name = module_path.rpartition(".")[2]
        wanted = name in only if only else module is not head
        if not isinstance(module, nn.Linear | Conv1D) or not wanted:
            continue
        transposed = isinstance(module, Conv1D)
        weight = module.weight.detach().float()
        outputs, inputs = weight.t().shape if transposed else weight.shape
        r = (ranks or {}).get(name, rank)
        scale = (alphas or {}).get(name, alpha) / (math.sqrt(r) if rs else r)
        a = torch.randn(r, inputs, generator=random) / math.sqrt(inputs)
        b = torch.randn(outputs, r, generator=random)
        b *= strength * float(weight.std()) * math.sqrt(inputs / r) / scale
        delta = scale * b @ a
        deltas[module_path] = delta.t() if transposed else delta
        tensors[f"base_model.model.{module_path}.lora_A.weight"] = a
        tensors[f"base_model.model.{module_path}.lora_B.weight"] = b
    result = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted({m.rpartition(".")[2] for m in deltas}),
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "use_rslora": rs,
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(result))
    save_file(tensors, path / "adapter_model.safetensors")
    return RandomAdapter(path, deltas)


@contextmanager
def merged(model: nn.Module, adapter: RandomAdapter) -> Iterator[nn.Module]:
    """`model`, with the adapter added to its weights meanwhile."""
    weights = {p: model.get_parameter(f"{p}.weight") for p in adapter.deltas}
    before = {p: w.detach().clone() for p, w in weights.items()}
    with torch.no_grad():
        for p, weight in weights.items():
            weight.add_(adapter.deltas[p].to(weight.dtype))
    try:
        yield model
    finally:
        with torch.no_grad():
            for p, weight in weights.items():
                weight.copy_(before[p])
