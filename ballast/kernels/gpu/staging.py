"""Fill device tensors at stable addresses for each job, through pinned host memory.

Used by `GpuBatch` and LoRA tables, so that captured CUDA graphs read each job's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

ALIGNMENT = 256
"""Bytes: what a tensor that PyTorch allocates on a GPU is aligned to; kernels load 16 at once."""
STAGES = 2
"""Host buffers used in turns: the copy of one may still run when the next job is prepared."""


@dataclass(frozen=True, slots=True)
class _Field:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class StagingBuffer:
    """Named tensors, one after the other in a buffer that is filled by one copy.

    `tensors`: zeros at first. What a captured CUDA graph reads there is the job that was sent last.

    Close it before a stream that it was sent on is destroyed: where PyTorch frees pinned memory, it
    records an event on every stream that has copied from it, and ends the process if one is gone.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """`sizes`: shape and dtype of each, in order."""
        self._fields: dict[str, _Field] = {}
        at = 0
        for name, (shape, dtype) in sizes.items():
            self._fields[name] = field = _Field(at, shape, dtype)
            at += -(-field.n_bytes // ALIGNMENT) * ALIGNMENT
        self._last = field.offset
        """Offset of the last field."""
        self._device = torch.zeros(at, dtype=torch.uint8, device=device)
        self._on_gpu = device.type == "cuda"
        self._stages = [
            torch.zeros(at, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(STAGES)
        ]
        self._arrays = [
            {name: self._view(stage, name).numpy() for name in self._fields}
            for stage in self._stages
        ]
        """Of each stage, its host arrays."""
        self._copied: list[torch.cuda.Event | None] = [None] * STAGES
        self._next = 0
        self.tensors = {name: self._view(self._device, name) for name in self._fields}

    def host(self) -> dict[str, Array]:
        """Return the host arrays to fill next, of any content. Waits if the device is `STAGES` jobs
        behind."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        return self._arrays[self._next]

    def send(self, used: int) -> None:
        """Start the copy of all tensors to the device; of the last, which may be long, only `used`
        bytes."""
        n_bytes = self._last + used
        stage = self._stages[self._next]
        self._device[:n_bytes].copy_(stage[:n_bytes], non_blocking=True)
        if self._on_gpu:
            event = self._copied[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._next] = event
        self._next = (self._next + 1) % STAGES

    def close(self) -> None:
        """Free the pinned memory: nothing can be sent any more. `tensors` stay."""
        self._arrays.clear()
        self._stages.clear()

    def _view(self, memory: Tensor, name: str) -> Tensor:
        field = self._fields[name]
        flat = memory[field.offset : field.offset + field.n_bytes]
        return flat.view(field.dtype).view(field.shape)


def put(into: Array, values: Sequence[int] | Array, rest: int = 0) -> None:
    """Write `values`, and `rest` after them."""
    into[: len(values)] = values
    into[len(values) :] = rest
