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
    """Operations on the rows of a job. Tensors are contiguous and of the model's dtype unless
    stated otherwise."""

    def add_norm(
        self,
        hidden: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        epsilon: float,
    ) -> Tensor:
        """Add `more` (T, H), if given, plus `bias` (H,) float32 to `hidden` (T, H) in place; return
        the RMS norm of `hidden` times `weight` (H,)."""

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
        """Add biases, norm and rotate queries and keys in `qkv` in place, and write keys and values
        into the blocks of `layer`; return the queries (T, heads, head_dim), a view of `qkv`.

        `qkv` (T, (heads + 2 kv_heads) head_dim); `cosine`, `sine` (T, head_dim / 2), of the angles
        by which element i and i + head_dim / 2 of a head turn.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up (T, I) of `gate_up` (T, 2 I): gates before ups."""

    def multiply(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return x W^T (T, n) of `x` (T, k) and `matrix` (n, k). By Triton, in 16 bits, a
        row's result does not depend on the other rows."""

    def multiply_host(self, x: Tensor, matrix: Tensor, os_share: float) -> Tensor:
        """Return the same of a `matrix` in page-locked host memory, which is read over the link,
        with `os_share` of the columns output-stationary. By Triton, in 16 bits, every share gives
        the bits of `multiply`."""

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
        """Return x W^T (1, n) of one row `x` (1, k) and `matrix` (n, k), in one launch with the
        optional steps: first the RMS norm of x times `norm` (k,), not rounded in between; then
        `gate` of the product, which leaves n / 2; then `bias` float32 and `added` (1, n) are added.
        """


def layer_kernels(device: torch.device) -> LayerKernels:
    """Choose Triton's kernels on a GPU, where Triton is installed; else PyTorch's operations."""
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    name, kind = ("triton.layer", "TritonLayer") if on_gpu else ("plain.layer", "PlainLayer")
    made: LayerKernels = getattr(importlib.import_module(f"ballast.kernels.{name}"), kind)()
    return made
