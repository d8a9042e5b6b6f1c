"""The KV cache of a model on a GPU, as kernels index it, in either layout in memory.

Whichever the layout, the cache is a tensor (blocks, layers, 2, block_tokens, kv_heads, head_dim),
where index 2 tells K (0) from V (1); layouts differ in the strides of the first two axes. What lies
within a layer's K and V of one block is contiguous in both.
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
