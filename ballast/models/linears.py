"""Compute linear layers of a module from packed weights, by our kernel or by oneDNN's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ballast.kernels import choices, linear, onednn, quantised, team


def packed(
    address: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    bias: Callable[[], Tensor | None],
    invariant: bool = False,
    form: str = "",
) -> Callable[[Tensor], Tensor]:
    """Return a function x (..., k) -> x W^T + bias (..., n) of `dtype`, for the panels at
    `address`, quantised if they have a `form`.

    The panels need not be present yet. `bias` is called each time. Measures which kernel is faster
    (`ballast.kernels.choices`) if that is not known yet, unless a row must be `invariant`.
    """
    at = np.array([address])
    if form:
        tables, kernel = quantised.tables(at, n, k, form), quantised.kernel(form)
        from_rows = choices.NEVER
    else:
        tables, kernel = linear.tables(at, n, k), linear.kernel(dtype)
        from_rows = choices.from_rows(n, k, dtype, invariant=invariant)
    table = tables.ctypes.data
    descriptor = onednn.describe(n, k, dtype) if from_rows < choices.NEVER else None
    matrix = None
    if descriptor is not None:
        matrix = onednn.view(address, n, k, dtype, descriptor)

    def multiply(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if matrix is not None and len(rows) >= from_rows:
            return onednn.multiply(rows, matrix, bias()).view(*x.shape[:-1], n)
        wide = rows.float().contiguous()
        out = torch.empty(len(rows), n)
        linear.place(tables, len(rows), (wide.data_ptr(), k), (out.data_ptr(), n))
        team.run(kernel, table, torch.get_num_threads())
        added = bias()
        if added is not None:
            out += added
        return out.to(dtype).view(*x.shape[:-1], n)

    return multiply


def replace(
    module: nn.Module, address: int, dtype: torch.dtype, invariant: bool = False, form: str = ""
) -> None:
    """Make `module` compute from panels at `address` instead of its weight."""

    def bias() -> Tensor | None:
        return module.bias  # type: ignore[return-value]

    assert isinstance(module, nn.Linear)
    n, k = module.out_features, module.in_features
    multiply = packed(address, n, k, dtype, bias, invariant, form)
    module.forward = multiply  # type: ignore[method-assign,assignment]
