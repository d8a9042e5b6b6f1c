"""Compute the experts of a module of `transformers` from quantised panels.

Used where a model's own module runs (`module`); the fast path has experts of its own (`fused`).

::

    hidden states (rows)     slots: a row and one of its experts, by expert
    ------------------------------------------------------------------------------
    x                     -> gate_up (+ bias) -> the module's gate -> down (+ bias)
    x + ...  <- sum over a row's experts <- shares <-----------------------------+

The order of computation, and dtypes between its steps, are those of `transformers`' grouped matrix
multiplication, which this replaces; products are float32. Experts that no row has chosen are not
read. A row's result depends on that row alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise
from ballast.kernels.experts import StackedMatrices
from ballast.weights.segment import PackedTensor


def replace(module: nn.Module, matrices: dict[str, tuple[PackedTensor, int]]) -> None:
    """Make a module of experts compute from panels; `matrices`: each with its address, by the name
    of the parameter that it replaces.

    The panels need not be present yet.
    """
    from ballast.weights.weightless import expert_matrices  # its imports take seconds

    names = expert_matrices(module)
    if set(names) != set(matrices):
        raise BrokenPromise(f"{sorted(matrices)} in panels are not the experts' {names}")
    up, down = (_stacked(*matrices[name]) for name in names)
    prefix = names[0]

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _forward(module, prefix, up, down, hidden_states, top_k_index, top_k_weights)

    module.forward = forward


def _stacked(tensor: PackedTensor, address: int) -> StackedMatrices:
    experts, n, k = tensor.shape
    at = address + np.arange(experts) * (tensor.n_bytes // experts)
    return StackedMatrices(at, n, k, tensor.form)


def _forward(
    module: Any,
    name: str,
    up: StackedMatrices,
    down: StackedMatrices,
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> Tensor:
    """`hidden`: (rows, width), `chosen` and `shares`: (rows, experts of a row); `name`: of the
    first matrix."""
    rows, each = chosen.shape
    expert, order = chosen.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert, minlength=up.count).numpy()
    made = up.multiply(hidden.float().contiguous(), counts, (order // each).numpy())
    made = made.to(hidden.dtype)
    if module.has_bias:
        made += getattr(module, f"{name}_bias")[expert]
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    out = down.multiply(made.float().contiguous(), counts).to(hidden.dtype)
    if module.has_bias:
        out += module.down_proj_bias[expert]
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    weighted = out * shares.reshape(-1)[order, None]
    by_row = torch.empty_like(weighted)
    by_row[order] = weighted
    return by_row.view(rows, each, -1).sum(1).to(hidden.dtype)
