"""Implement the Muon optimizer in float32: momentum whose matrices are orthogonalised.

PyTorch's own multiplies in bfloat16, which on a CPU without such instructions takes ten times as
long as the rest of a training step. (K. Jordan et al., Muon, 2024.) Used by `fleet.train`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients of X, XX'X and XX'XX'X that raise small singular values fastest."""
ITERATIONS = 3
"""Each raises the smallest singular values by 3.4; five would take as long as all else of a step of
512 tokens, and train no better in the same time."""


class Muon(torch.optim.Optimizer):
    """Takes matrices (two dimensions) only; other parameters need another optimizer."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one Nesterov step; `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._apply(matrix, group["lr"])

    def _apply(self, matrix: nn.Parameter, lr: float) -> None:
        state: dict[str, Any] = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        assert matrix.grad is not None
        momentum = state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
        rows, columns = matrix.shape
        update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
        matrix.add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved towards 1; Newton-Schulz, quintic."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = _QUINTIC
    x: Tensor = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
