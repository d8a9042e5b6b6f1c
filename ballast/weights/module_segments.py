"""Divide a module's tensors into segments: embeddings, each layer, head."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ballast.core.errors import UnsupportedModel
from ballast.weights.architecture import ModelTensor


def find_layers(module: nn.Module, kind: str) -> tuple[str, int]:
    """Return (path and dot, number) of the decoder layers, the longest outermost ModuleList."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    name = max(outer, key=lambda n: len(lists[n]), default=None)
    if name is None or not len(lists[name]):
        raise UnsupportedModel(f"{kind}: it has no layers")
    return f"{name}.", len(lists[name])


def tensors_by_segment(
    module: nn.Module, prefix: str, n_layers: int, kind: str
) -> tuple[tuple[str, tuple[ModelTensor, ...]], ...]:
    """Divide the tensors of a module, built in bfloat16, into segments: (name, tensors) of each.

    Tensors outside the layers go with the embeddings or with the head.

    A tied head has no segment of its own; the final norm then goes with the embeddings, as a
    segment costs a page at least.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{kind}: its weights include integers, in {name}")
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    kept = _kept_in_float32(module)
    head = module.get_output_embeddings()  # type: ignore[operator]
    own_head = head is not None and len(names[id(head.weight)]) == 1
    parts: list[list[ModelTensor]] = [[] for _ in range(n_layers + 2)]
    seen_layers = False
    for key, aliases in names.items():
        own = tensors[key].dtype == torch.float32 or any(kept(name) for name in aliases)
        dtype = "float32" if own else None
        wanted = ModelTensor(tuple(aliases), tuple(tensors[key].shape), dtype)
        if aliases[0].startswith(prefix):
            seen_layers = True
            parts[1 + int(aliases[0][len(prefix) :].split(".", 1)[0])].append(wanted)
        else:
            parts[-1 if seen_layers and own_head else 0].append(wanted)
    titles = ["embeddings", *(f"layer {i}" for i in range(n_layers)), "head"]
    found = [(title, tuple(part)) for title, part in zip(titles, parts, strict=True)]
    return tuple(found if own_head else found[:-1])


def _kept_in_float32(module: Any) -> Callable[[str], bool]:
    """Return a test, by name, of tensors that `transformers` keeps in float32 in any model."""
    patterns = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    found = [re.compile(str(pattern).replace("*", ".*")) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in found)
