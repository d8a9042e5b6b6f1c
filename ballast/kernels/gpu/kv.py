"""View a model's KV cache on a GPU as a tensor that kernels index, in either memory layout.

Used by `GpuBatch` and the GPU executor. In both layouts the cache is a tensor (blocks, layers, 2,
block_tokens, kv_heads, head_dim) whose third axis is K (0) or V (1); layouts differ in the strides
of the first two axes. K and V of one layer in one block are contiguous in both. Allocates and
touches no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.settings import KvLayout


@dataclass(frozen=True, slots=True)
class GpuKv:
    """`cache`: (blocks, layers, 2, block_tokens, kv_heads, head_dim), in either layout."""

    cache: Tensor

    @classmethod
    def of(
        cls,
        memory: Tensor,
        shape: tuple[int, int, int, int, int],
        blocks: int,
        block_stride: int,
        layer_stride: int,
    ) -> GpuKv:
        """The cache that lies in flat `memory`, from its first element; nothing is touched.

        `shape` is that of one block (layers, 2, block_tokens, kv_heads, head_dim); strides count
        elements from a block, and from a block's layer, to the next.
        """
        _, _, block_tokens, kv_heads, head_dim = shape
        token = kv_heads * head_dim
        inner = (block_tokens * token, token, head_dim, 1)
        return cls(memory.as_strided((blocks, *shape), (block_stride, layer_stride, *inner)))

    @classmethod
    def over(
        cls,
        memory: Tensor,
        layout: KvLayout,
        shape: tuple[int, int, int, int, int],
        block_stride: int,
    ) -> GpuKv:
        """The same, in either layout, of as many blocks as fit.

        `block_stride`: elements from a block to the next, in whole as `block-major` has them:
        `per-layer` has a piece of a block for each layer, all padded alike. Raises BrokenPromise
        where blocks would overlap, or padding does not divide.
        """
        layers, two, block_tokens, kv_heads, head_dim = shape
        inner = block_tokens * kv_heads * head_dim
        if two != 2 or block_stride < layers * 2 * inner:
            raise BrokenPromise(f"blocks of {shape} do not lie {block_stride} elements apart")
        blocks = memory.numel() // block_stride
        if layout is KvLayout.BLOCK_MAJOR:
            return cls.of(memory, shape, blocks, block_stride, 2 * inner)
        if block_stride % layers:
            raise BrokenPromise(f"{block_stride} elements are not {layers} equal pieces")
        piece = block_stride // layers
        return cls.of(memory, shape, blocks, piece, blocks * piece)

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
