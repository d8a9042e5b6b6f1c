"""Multiply matrices of a fused model by PyTorch's kernels: oneDNN's, or plain ones.

The number of rows decides which matrices of a job are multiplied here: for each matrix, from a
number of rows that was measured (`ballast.kernels.choices`). Operations of our own kernels, in the
programs before and after a call, narrow the inputs to the weights' dtype, and store, add or gate
the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.core.units import ceil_div
from ballast.kernels import choices, layer, layer_code, linear, linear_code, onednn
from ballast.kernels.linear_code import PANEL
from ballast.memory.tensor import tensor_at
from ballast.models.fused.linears import is_quantised
from ballast.models.fused.passes import Due, PlannedPass
from ballast.models.fused.workspace import MatrixPlace
from ballast.weights.packing import GATED, MATRICES
from ballast.weights.segment import PLAIN, PackedTensor, TensorsByRole

Array = np.ndarray[Any, Any]


class Library:
    """Multiplies the matrices of some roles in a pass."""

    def __init__(
        self,
        layers: Sequence[TensorsByRole],
        last: TensorsByRole,
        dtype: torch.dtype,
        places: Mapping[str, MatrixPlace],
        narrowed: int,
        from_rows: Mapping[str, int],
    ) -> None:
        """`places`: operands of each matrix by role, and as `opened` those of gate and up if they
        are not gated at once. `narrowed`: address for inputs in bfloat16. `from_rows`: by role, the
        rows from which on a matrix is multiplied here."""
        self._dtype, self._places, self._from_rows = dtype, places, from_rows
        stored = dict.fromkeys(MATRICES, layers) | {"head": [last]}
        self._matrices = {
            role: [_matrix(role, weights, dtype) if role in weights else None for weights in of]
            for role, of in stored.items()
            if role in from_rows
        }
        self._inputs: dict[str, Tensor] = {}
        self._narrow = {
            role: _narrowing(places[role], narrowed, len(of)) for role, of in self._matrices.items()
        }
        self._narrowed = narrowed
        self._stores = {
            role: _storing(places["opened" if role == "gate_up" else role], len(of))
            for role, of in self._matrices.items()
        }
        gate = places["gate_up"]
        interleaved = all(w["gate_up"][0].layout == GATED for w in layers if "gate_up" in w)
        self._gates = linear.gate_tables(
            len(layers), gate.n // 2, interleaved=interleaved, mode=gate.mode
        )
        linear.place(self._gates, 0, (0, 0), (gate.target, gate.target_row))

    @classmethod
    def of(
        cls,
        layers: Sequence[TensorsByRole],
        last: TensorsByRole,
        dtype: torch.dtype,
        places: Mapping[str, MatrixPlace],
        narrowed: int,
        invariant: bool = False,
    ) -> Library | None:
        """Return the library of a model; None if our kernels are the only ones for these weights on
        this CPU, as for quantised ones, or the fastest, or if they must be, as rows in bfloat16 are
        to be `invariant`.

        Measures matrices of shapes that are new to this machine, which takes a second or two.
        """
        # A layer of experts has no matrices of some roles.
        stored = dict.fromkeys(MATRICES, layers) | {"head": [last]}
        matrices = {
            role: w[role][0]
            for role, of in stored.items()
            if not is_quantised(role, of)
            for w in of
            if role in w
        }
        if any(t.layout == PLAIN for t in matrices.values()):
            return cls(layers, last, dtype, places, narrowed, dict.fromkeys(matrices, 0))
        from_rows = {
            role: choices.from_rows(
                *_stored_shape(t), dtype, gated=t.layout == GATED, invariant=invariant
            )
            for role, t in matrices.items()
        }
        used = {role: n for role, n in from_rows.items() if n < choices.NEVER}
        return cls(layers, last, dtype, places, narrowed, used) if used else None

    def roles(self, rows: int, sampled: int) -> frozenset[str]:
        """Return the roles that are multiplied here in a job of `rows` tokens, `sampled` of them
        sampled."""
        return frozenset(
            role
            for role, least in self._from_rows.items()
            if (sampled if role == "head" else rows) >= least
        )

    def begin(self, roles: frozenset[str], rows: int, sampled: int, item_rows: int) -> None:
        """Prepare a job; `item_rows`: rows of an operation's item."""
        self._inputs.clear()
        self._gates[:, linear_code.NEXT], self._gates[:, linear_code.ROWS] = 0, rows
        for role in roles:
            count, place = sampled if role == "head" else rows, self._places[role]
            for tables in (self._narrow[role], self._stores[role]):
                tables[:, layer_code.NEXT] = 0
                tables[:, layer_code.ROWS] = count
                tables[:, layer_code.ITEM_ROWS] = item_rows
            source = place.source if self._dtype == torch.float32 else self._narrowed
            self._inputs[role] = tensor_at(source, (count, place.k), self._dtype)

    def describe(self, into: PlannedPass, role: str, i: int, *, gate: bool) -> None:
        """Add the matrix `role` of layer i to a pass; `gate`: whether gate and up are gated at
        once."""
        if self._dtype != torch.float32:
            into.operation(layer.kernel("narrow", self._dtype), self._narrow[role], i)
        into.stop(Due.LIBRARY, i, role)
        if gate and role == "gate_up":
            into.operation(linear.gate_kernel(self._dtype), self._gates, i)
        else:
            adds = self._places[role].mode == linear.ADD
            kernel = layer.kernel("add" if adds else "store", self._dtype)
            into.operation(kernel, self._stores[role], i)

    def multiply(self, role: str, i: int) -> Tensor:
        """Return x W^T + b of layer i's matrix `role`, which the next operation of the pass reads.

        The caller keeps the product until that operation has run.
        """
        found = self._matrices[role][i]
        assert found is not None, "layers of experts have no matrix of this role"
        matrix, bias = found
        if bias is not None:
            bias = bias.to(self._dtype)
        if matrix.layout == torch.strided:
            product = torch.nn.functional.linear(self._inputs[role], matrix, bias)
        else:
            product = onednn.multiply(self._inputs[role], matrix, bias)
        address, width = product.data_ptr(), product.shape[1]
        if role == "gate_up":
            self._gates[i, linear_code.X], self._gates[i, linear_code.X_STRIDE] = address, width
        table = self._stores[role][i]
        table[layer_code.SOURCE] = address
        table[layer_code.SOURCE_ROW] = table[layer_code.WIDTH] = width
        return product


def _matrix(role: str, weights: TensorsByRole, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a matrix as the library reads it, and its bias."""
    tensor, address = weights[role]
    n, k = _stored_shape(tensor)
    bias = None
    if f"{role}.bias" in weights:
        bias = tensor_at(weights[f"{role}.bias"][1], (n,), torch.float32)
    if tensor.layout == PLAIN:
        return tensor_at(address, (n, k), dtype), bias
    descriptor = onednn.describe(n, k, dtype)
    assert descriptor is not None, "a choice was made between the two"
    return onednn.view(address, n, k, dtype, descriptor), bias


def _narrowing(place: MatrixPlace, narrowed: int, count: int) -> Array:
    return layer.tables(
        count,
        width=place.k,
        source=place.source,
        source_row=place.k,
        target=narrowed,
        target_row=place.k,
    )


def _storing(place: MatrixPlace, count: int) -> Array:
    return layer.tables(count, target=place.target, target_row=place.target_row)


def _stored_shape(tensor: PackedTensor) -> tuple[int, int]:
    """Return (n, k), including the rows that fill up the last panel of gate and up."""
    n, k = tensor.shape
    return (ceil_div(n, PANEL) * PANEL if tensor.layout == GATED else n), k
