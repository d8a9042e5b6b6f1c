"""Define the operations of a Llama-shaped layer between its GEMMs on a GPU, and choose kernels.

Used by `models.gpu.fused`. `triton/layer.py` implements them as kernels of one launch each,
`plain/layer.py` as plain PyTorch, the reference. Both round where `transformers`' modules do, so
that also in bfloat16 only the order of sums differs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from ballast.kernels.gpu.batch import GpuBatch


@dataclass(frozen=True, slots=True)
class HeadVectors:
    """Vectors of a layer's attention. `bias` float32, of queries, keys and values; `q_norm`,
    `k_norm` (head_dim,), of the model's dtype. None: there is none."""

    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class LayerKernels(Protocol):
    """Operations on the rows of a job. Tensors are contiguous and of the model's dtype but where
    said."""

    def add_norm(
        self,
        hidden: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        epsilon: float,
    ) -> Tensor:
        """RMS norm, times `weight` (H,), of `hidden` (T, H) after `more` (T, H), with `bias` (H,)
        float32 added to it, has been added to that in place."""

    def rotate(
        self,
        batch: GpuBatch,
        layer: int,
        qkv: Tensor,
        vectors: HeadVectors,
        epsilon: float,
        cosine: Tensor,
        sine: Tensor,
    ) -> Tensor:
        """Queries (T, heads, head_dim), which lie in `qkv` and are ready to attend; keys and values
        go to the blocks of `layer`.

        `qkv` (T, (heads + 2 kv_heads) head_dim); `cosine`, `sine` (T, head_dim / 2), of the angles
        by which element i and i + head_dim / 2 of a head turn.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up (T, I), of (T, 2 I): gates before ups."""

    def multiply_row(
        self,
        x: Tensor,
        matrix: Tensor,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        gated: bool = False,
        bias: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """x W^T (1, n) of one row `x` (1, k) and `matrix` (n, k), in one launch with what comes
        before and after: the RMS norm of x times `norm` (k,), which is not rounded in between;
        `gate` of the result, then of n / 2; `bias` float32; and `added` (1, n)."""


def layer_kernels(device: torch.device) -> LayerKernels:
    """Choose Triton's kernels on a GPU, where Triton is installed; else PyTorch's operations."""
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    name, kind = ("triton.layer", "TritonLayer") if on_gpu else ("plain.layer", "PlainLayer")
    made: LayerKernels = getattr(importlib.import_module(f"ballast.kernels.{name}"), kind)()
    return made
