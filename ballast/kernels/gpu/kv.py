"""View a model's KV cache on a GPU as a tensor that kernels index.

Used by `GpuBatch` and the GPU executor. The cache is a tensor (blocks, layers, 2, block_tokens,
kv_heads, head_dim) whose third axis is K (0) or V (1); a block is contiguous. Allocates and touches
no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise


@dataclass(frozen=True, slots=True)
class GpuKv:
    """`cache`: (blocks, layers, 2, block_tokens, kv_heads, head_dim)."""

    cache: Tensor

    @classmethod
    def over(
        cls, memory: Tensor, shape: tuple[int, int, int, int, int], block_stride: int
    ) -> GpuKv:
        """The cache that lies in flat `memory`, from its first element, of as many blocks as fit.

        `shape` is that of one block (layers, 2, block_tokens, kv_heads, head_dim); `block_stride`:
        elements from a block to the next. Raises BrokenPromise where blocks would overlap.
        """
        layers, two, block_tokens, kv_heads, head_dim = shape
        token = kv_heads * head_dim
        inner = block_tokens * token
        if two != 2 or block_stride < layers * 2 * inner:
            raise BrokenPromise(f"blocks of {shape} do not lie {block_stride} elements apart")
        strides = (block_stride, 2 * inner, inner, token, head_dim, 1)
        return cls(memory.as_strided((memory.numel() // block_stride, *shape), strides))

    @property
    def blocks(self) -> int:
        return self.cache.shape[0]

    @property
    def layers(self) -> int:
        return self.cache.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.cache.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.cache.shape[4]

    @property
    def head_dim(self) -> int:
        return self.cache.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.cache.dtype

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each (blocks, block_tokens, kv_heads, head_dim): views."""
        return self.cache[:, index, 0], self.cache[:, index, 1]

    def units(self, unit: int) -> tuple[Tensor, Tensor]:
        """K and V, each (units, block_tokens, kv_heads, head_dim), of a block's layer that begins
        any number of units of `unit` elements behind the first block: overlapping views."""
        shape, cache = self.cache.shape[3:], self.cache
        inner, token = shape.numel(), shape[1] * shape[2]
        n = (cache.shape[0] * cache.stride(0) - 2 * inner) // unit + 1
        size, strides = (n, *shape), (unit, token, shape[2], 1)
        first = cache.storage_offset()
        return (
            cache.as_strided(size, strides, first),
            cache.as_strided(size, strides, first + inner),
        )
