"""The matrices of a fused model one at a time, by PyTorch's kernels: oneDNN's, or plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ballast.core.units import ceil_div
from ballast.kernels import onednn
from ballast.kernels.linear_code import PANEL
from ballast.memory.tensor import tensor_at
from ballast.weights.packing import GATED, MATRICES
from ballast.weights.segment import PLAIN, PackedTensor

_Roles = Mapping[str, tuple[PackedTensor, int]]
"""A segment's tensors and their device addresses, by role."""


class Library:
    """`from_rows`: rows of a job from which it is to be preferred to our own kernels."""

    def __init__(
        self, layers: Sequence[_Roles], last: _Roles, dtype: torch.dtype, from_rows: int
    ) -> None:
        self.from_rows = from_rows
        self._dtype = dtype
        self._matrices = {
            role: [self._matrix(role, w) if role in w else None for w in layers]
            for role in MATRICES
        }
        self._matrices["head"] = [self._matrix("head", last)]

    @classmethod
    def of(cls, layers: Sequence[_Roles], last: _Roles, dtype: torch.dtype) -> Library | None:
        """None where our kernels are all there is for these weights on this CPU."""
        kinds = {role: w[role][0] for role in MATRICES for w in layers if role in w}
        matrices = [last["head"][0], *kinds.values()]
        if any(t.layout == PLAIN for t in matrices):
            return cls(layers, last, dtype, 0)
        described = [onednn.describe(*_stored_shape(t), dtype) for t in matrices]
        if all(d is not None and d.panels for d in described):
            return cls(layers, last, dtype, onednn.FROM_ROWS[dtype])
        return None

    def multiply(self, role: str, i: int, x: Tensor, out: Tensor, *, add: bool) -> None:
        """x W^T + b of layer i's matrix `role` into `out`, or added to it. Float32 both.

        `out` may be wider, by what fills up a panel.
        """
        found = self._matrices[role][i]
        assert found is not None, "layers of experts have no matrix of this role"
        matrix, bias = found
        x = x.to(self._dtype)
        if bias is not None:
            bias = bias.to(self._dtype)
        if matrix.layout == torch.strided:
            y = torch.nn.functional.linear(x, matrix, bias)
        else:
            y = onednn.multiply(x, matrix, bias)
        if add:
            out += y
        else:
            out[:, : y.shape[1]] = y

    def _matrix(self, role: str, weights: _Roles) -> tuple[Tensor, Tensor | None]:
        tensor, address = weights[role]
        n, k = _stored_shape(tensor)
        bias = None
        if f"{role}.bias" in weights:
            bias = tensor_at(weights[f"{role}.bias"][1], (n,), torch.float32)
        if tensor.layout == PLAIN:
            return tensor_at(address, (n, k), self._dtype), bias
        descriptor = onednn.describe(n, k, self._dtype)
        assert descriptor is not None
        return onednn.view(address, n, k, self._dtype, descriptor), bias


def _stored_shape(tensor: PackedTensor) -> tuple[int, int]:
    """(n, k), with the rows that fill up the last panel of gate and up."""
    n, k = tensor.shape
    return (ceil_div(n, PANEL) * PANEL if tensor.layout == GATED else n), k
