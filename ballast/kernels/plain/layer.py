"""Implement `LayerKernels` by plain PyTorch operations, on any device.

Reference of the Triton kernels, and the fallback without Triton (chosen by `gpu.layer`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.layer import HeadVectors


class PlainLayer:
    """Implements `LayerKernels`."""

    def add_norm(
        self,
        hidden: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        epsilon: float,
    ) -> Tensor:
        if more is not None:
            hidden += more if bias is None else (more + bias).to(hidden.dtype)
        return _norm(hidden, weight, epsilon)

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
        kv = batch.kv
        if vectors.bias is not None:
            qkv.copy_(qkv + vectors.bias)
        heads = qkv.view(len(qkv), -1, kv.head_dim)
        sizes = [batch.heads, kv.kv_heads, kv.kv_heads]
        query, key, value = torch.split(heads, sizes, dim=1)
        for part, weight in ((query, vectors.q_norm), (key, vectors.k_norm)):
            normed = part if weight is None else _norm(part, weight, epsilon)
            first, second = normed.chunk(2, dim=-1)
            c, s = cosine[:, None], sine[:, None]
            turned = (first * c - second * s, second * c + first * s)
            part.copy_(torch.cat(turned, dim=-1))
        batch.write(layer, key, value)
        return query

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def multiply(self, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, matrix)

    def multiply_host(self, x: Tensor, matrix: Tensor, os_share: float) -> Tensor:
        return torch.nn.functional.linear(x, matrix)

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
        wide = x.float()
        if norm is not None:
            wide = _norm(wide, norm.float(), epsilon)
        y = torch.nn.functional.linear(wide, matrix.float()).to(x.dtype)
        if gated:
            y = self.gate(y)
        if bias is not None:
            y = (y + bias).to(x.dtype)
        return y if added is None else added + y


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    normed: Tensor = weight * (wide * scale).to(x.dtype)
    return normed
