"""Make the tables of a fused model's matrices, for our kernels: of panels, and of quantised ones.

Rows of a merged matrix that are quantised in different ways, such as queries and values, are parts
of it: each has a table of its own, and writes its columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ballast.kernels import linear, linear_code, quantised
from ballast.models.fused.passes import PlannedPass
from ballast.models.fused.workspace import MatrixPlace
from ballast.weights.packing import is_part
from ballast.weights.segment import PackedTensor, TensorsByRole

Array = np.ndarray[Any, Any]

Parts = Sequence[tuple[PackedTensor, int]]
"""A matrix's tensors, in the order of its rows, and their addresses."""


class FusedLinears:
    """The matrix of one role in all layers."""

    def __init__(
        self, role: str, layers: Sequence[TensorsByRole], place: MatrixPlace, dtype: torch.dtype
    ) -> None:
        self._operations: list[list[tuple[int, int]]] = []
        """Kernel and table of each part, by layer."""
        made: list[Array] = []
        for weights in layers:
            bias = weights[f"{role}.bias"][1] if f"{role}.bias" in weights else 0
            own = _tables(parts_of(role, weights), place, bias, dtype)
            self._operations.append([(kernel, len(made) + i) for i, (kernel, _) in enumerate(own)])
            made += [table for _, table in own]
        self.tables: Array = np.array(made, np.int64).reshape(-1, linear_code.N_FIELDS)

    def begin(self, rows: int) -> None:
        """Prepare a job of so many rows."""
        self.tables[:, linear_code.NEXT] = 0
        self.tables[:, linear_code.ROWS] = rows

    def describe(self, into: PlannedPass, i: int) -> None:
        """Add the matrix of layer i to a pass."""
        for kernel, table in self._operations[i]:
            into.operation(kernel, self.tables, table)


def parts_of(role: str, weights: TensorsByRole) -> Parts:
    """Return the parts of a layer's matrix; none if it has no such matrix."""
    return [weights[name] for name in weights if is_part(name, role)]


def is_quantised(role: str, layers: Sequence[TensorsByRole]) -> bool:
    """Return whether the matrix of a role is quantised, or in parts, in any layer."""
    found = [parts_of(role, weights) for weights in layers]
    return any(len(parts) > 1 or any(t.form for t, _ in parts) for parts in found)


def _tables(
    parts: Parts, place: MatrixPlace, bias: int, dtype: torch.dtype
) -> list[tuple[int, Array]]:
    """Return the kernel and the table of each part."""
    found, at = [], 0
    for tensor, address in parts:
        n = place.n if len(parts) == 1 else tensor.shape[0]
        given: dict[str, Any] = {"mode": place.mode, "bias": bias + 4 * at if bias else 0}
        if tensor.form:
            kernel = quantised.kernel(tensor.form)
            made = quantised.tables(np.array([address]), n, place.k, tensor.form, **given)
        else:
            kernel = linear.kernel(dtype)
            made = linear.tables(np.array([address]), n, place.k, **given)
        target = place.target + 4 * at
        linear.place(made, 0, (place.source, place.k), (target, place.target_row))
        found.append((kernel, made[0]))
        at += n
    return found
