"""Add an adapter's differences in few bits on CPU: y[row] += x[row] D^T, one adapter per row.

Used by `kernels.lora`. D (outputs, inputs) is in quantised panels (`ballast.kernels.quantised`),
multiplied by the kernel of these: sums are float32, and a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.kernels import linear, quantised, team

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """An adapter's difference of one linear module: panels at an address, in a form."""

    address: int
    form: str


class PackedProducts:
    """What adapters add to the outputs of one linear module."""

    def __init__(
        self, inputs: int, columns: Tensor, matrices: Sequence[PackedMatrix | None]
    ) -> None:
        """`columns`: int64 (outputs,), column of y of each output; `matrices`: by adapter."""
        n = self._outputs = len(columns)
        self._columns, self._first = columns, int(columns[0])
        self._is_side_by_side = int(columns[-1]) == self._first + n - 1
        self._tables: dict[int, tuple[int, Array]] = {}
        """Kernel and its table, by adapter."""
        for i, m in enumerate(matrices):
            if m is not None:
                at = np.array([m.address])
                made = quantised.tables(at, n, inputs, m.form, mode=linear.ADD)
                self._tables[i] = quantised.kernel(m.form), made

    def add(self, rows: Iterable[tuple[int, Array, Array]], x: Tensor, y: Tensor) -> None:
        """Add the adapters' products of x (rows, inputs) to y (rows, columns).

        `rows`: each adapter with int64 indices of its rows of x, and of y. Of float32 or bfloat16;
        elements of a row lie side by side.
        """
        wide = x.float()
        for adapter, x_rows, y_rows in rows:
            if adapter not in self._tables:
                continue
            kernel, table = self._tables[adapter]
            source = (wide.data_ptr(), wide.stride(0))
            given = {"x_index": x_rows.ctypes.data}
            if self._is_side_by_side and y.dtype == torch.float32:
                target = (y.data_ptr() + 4 * self._first, y.stride(0))
                linear.place(
                    table, len(x_rows), source, target, out_index=y_rows.ctypes.data, **given
                )
                team.run(kernel, table.ctypes.data, torch.get_num_threads())
                continue
            out = torch.zeros(len(x_rows), self._outputs)
            linear.place(table, len(x_rows), source, (out.data_ptr(), self._outputs), **given)
            team.run(kernel, table.ctypes.data, torch.get_num_threads())
            where = torch.from_numpy(y_rows)[:, None], self._columns[None]
            y[where] = (y[where].float() + out).to(y.dtype)
