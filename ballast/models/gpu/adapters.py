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
"""Path of a module, or what a fused model calls its matrix."""


class GpuAdapters:
    """All adapters of one model; none, if it has none."""

    def __init__(
        self,
        groups: Mapping[Place, GpuLoraGroup],
        dtype: torch.dtype,
        device: torch.device,
        view: View,
        scratch: Scratch,
    ) -> None:
        """`groups`: what they add, place by place; `scratch`: of the model's jobs."""
        self._index = {place: i for i, place in enumerate(groups)}
        self.lora: Lora = lora(list(groups.values()), dtype, device, view, scratch)

    def adds(self) -> dict[Place, Callable[[GpuAdaptedRows, Tensor, Tensor], None]]:
        """By place: adds to y (rows, outputs) what adapters make of x (rows, inputs)."""
        return {place: partial(self.add, place) for place in self._index}

    def add(self, place: Place, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        """Add to y, if any adapter adds something there."""
        i = self._index.get(place)
        if i is not None:
            self.lora.add(i, rows, x, y)

    def replayable(self, batch: GpuBatch) -> bool:
        """Whether a CUDA graph may be recorded over what adapters do with the batch."""
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
