"""Compute LoRA by plain PyTorch operations: a reference, and the fallback without Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ballast.kernels.gpu.lora import GpuAdaptedRows, GpuLoraGroup

View = Callable[[int, Sequence[int], torch.dtype], Tensor]
"""Function that returns a tensor of a shape and dtype at an address of the device."""


class PlainLora:
    """Implements `Lora`; which adapters there are to add is read from the tiles, on the host."""

    replayable: ClassVar[bool] = False

    def __init__(self, groups: Sequence[GpuLoraGroup], dtype: torch.dtype, view: View) -> None:
        self._groups = tuple(groups)
        self._dtype, self._view = dtype, view

    def add(self, group: int, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        self._groups[group].check(rows, x, y, self._dtype)
        for first, count, adapter in rows.job:
            at = rows.order[first : first + count].long()
            made = y[at]
            for delta, columns in self._deltas(group, adapter, x[at].float()):
                made[:, columns] = (made[:, columns].float() + delta).to(y.dtype)
            y[at] = made

    def _deltas(self, group: int, adapter: int, x: Tensor) -> list[tuple[Tensor, slice]]:
        """Compute an adapter's changes for rows x, float32, and the columns to add them to."""
        of, found = self._groups[group], []
        for target in of.targets:
            m = target.adapters[adapter]
            if m is not None:
                a = self._view(m.a, (m.rank, of.inputs), self._dtype).float()
                b = self._view(m.b, (m.rank, target.outputs), self._dtype).float()
                columns = slice(target.column, target.column + target.outputs)
                found.append((m.scale * (x @ a.t() @ b), columns))
        return found
