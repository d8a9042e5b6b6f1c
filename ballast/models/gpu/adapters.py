"""Apply LoRA adapters of a model on a GPU, by Triton kernels or by plain PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ballast.kernels.gpu.batch import GpuBatch, Scratch
from ballast.kernels.gpu.lora import GpuAdaptedRows, GpuLoraGroup, Lora
from ballast.kernels.plain.lora import PlainLora, View

Place = str
"""Path of a module, or name of a fused model's matrix."""


class GpuAdapters:
    """All adapters of one model; empty if it has none."""

    def __init__(
        self,
        groups: Mapping[Place, GpuLoraGroup],
        dtype: torch.dtype,
        device: torch.device,
        view: View,
        scratch: Scratch,
    ) -> None:
        """`groups`: the adapters' matrices by place; `scratch`: of the model's jobs."""
        self._index = {place: i for i, place in enumerate(groups)}
        self.lora: Lora = lora(list(groups.values()), dtype, device, view, scratch)

    def use(self, lora: Lora) -> None:
        """Compute with other matrices of the same places from now on."""
        self.lora = lora

    def adds(self) -> dict[Place, Callable[[GpuAdaptedRows, Tensor, Tensor], None]]:
        """Return, by place, a function that adds the adapters' products of x (rows, inputs) to y
        (rows, outputs)."""
        return {place: partial(self.add, place) for place in self._index}

    def add(self, place: Place, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        """Add the adapters' products of x to y, if any adapter changes the place."""
        i = self._index.get(place)
        if i is not None:
            self.lora.add(i, rows, x, y)

    def replayable(self, batch: GpuBatch) -> bool:
        """Whether a CUDA graph may be recorded over the adapters' work on the batch."""
        return batch.adapted is None or self.lora.replayable


def lora(
    groups: Sequence[GpuLoraGroup],
    dtype: torch.dtype,
    device: torch.device,
    view: View,
    scratch: Scratch,
) -> Lora:
    """Choose the kernels: our Triton kernels on a GPU, where Triton is installed."""
    if groups and device.type == "cuda" and find_spec("triton") is not None:
        from ballast.kernels.triton.lora import TritonLora

        return TritonLora(groups, dtype, device, scratch)
    return PlainLora(groups, dtype, view)
