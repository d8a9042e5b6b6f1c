"""The KV cache of a model on a GPU, as kernels see it: one index order, two ways to lie in memory.

Whichever the layout, the cache is a tensor (blocks, layers, 2, block_tokens, kv_heads, head_dim),
where index 2 tells K (0) from V (1); layouts differ in the strides of the first three axes. What
lies within a layer's K or V of one block is contiguous in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise


class KvLayout(StrEnum):
    """Which axes are outermost in memory."""

    BLOCK_MAJOR = "block-major"
    """(blocks, layers, 2, ...): a block is one stretch of memory, so one page backs whole blocks of
    all layers; that of `kv/layout.py`. The last layer's V of a block is followed by the padding
    that makes its stride."""
    PER_LAYER = "per-layer"
    """(layers, 2, blocks, ...): the blocks of one layer's K lie side by side; memory that backs a
    block comes in 2 * layers places."""


@dataclass(frozen=True, slots=True)
class DeviceKv:
    """`cache`: (blocks, layers, 2, block_tokens, kv_heads, head_dim), in either layout."""

    cache: Tensor

    @classmethod
    def over(
        cls,
        memory: Tensor,
        layout: KvLayout,
        shape: tuple[int, int, int, int, int],
        block_stride: int,
    ) -> DeviceKv:
        """The cache that lies in flat `memory`, from its first element; nothing is touched.

        `shape` is that of one block (layers, 2, block_tokens, kv_heads, head_dim); `block_stride`
        counts elements from a block to the next, in whole as `block-major` has them: `per-layer`
        has 2 * layers pieces of a block, each padded alike. There are as many blocks as fit.
        Raises BrokenPromise where blocks would overlap, or padding does not divide.
        """
        layers, two, block_tokens, kv_heads, head_dim = shape
        inner = block_tokens * kv_heads * head_dim
        planes = layers * two
        if two != 2 or block_stride < planes * inner:
            raise BrokenPromise(f"blocks of {shape} do not lie {block_stride} elements apart")
        blocks = memory.numel() // block_stride
        token = kv_heads * head_dim
        if layout is KvLayout.BLOCK_MAJOR:
            outer = (block_stride, 2 * inner, inner)
        else:
            if block_stride % planes:
                raise BrokenPromise(f"{block_stride} elements are not {planes} equal pieces")
            piece = block_stride // planes
            outer = (piece, 2 * blocks * piece, blocks * piece)
        return cls(memory.as_strided((blocks, *shape), (*outer, token, head_dim, 1)))

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
