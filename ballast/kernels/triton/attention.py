"""Launch the Triton kernels of paged attention on a GPU; implements `GpuAttention`.

Chosen by `gpu.attention`. Tile sizes are what registers and shared memory admit, and on an H200
the best of those that were tried for 32 sequences. With TRITON_INTERPRET=1 (set before this module
is imported) it runs on CPU tensors, slowly, which is how it is tested.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.attention_plan import (
    FEW_ROWS,
    ITEM_FIELDS,
    MANY_ROWS,
    MERGE_FIELDS,
    SPLIT,
)
from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.triton import attention_code as code

PROGRAMS = 4
"""Programs per multiprocessor that take items in turn, over all KV heads."""
LOADED = 16
"""Bytes that one thread loads at once at best, if they are aligned to it."""
NARROWEST = 16
"""Rows, keys and elements that a matrix product takes at least."""


class TritonAttention:
    """Attention for one batch, with memory for its partial results."""

    replayable: ClassVar[bool] = True

    def __init__(self, batch: GpuBatch, programs: int | None = None) -> None:
        """`programs`: how many take the items of cut tiles, over all KV heads."""
        self._batch = batch
        kv, shape = batch.kv, batch.shape
        if programs is None:
            programs = PROGRAMS * multiprocessors(kv.device)
        self._programs = -(-programs // kv.kv_heads)
        self._few = min(self._programs, batch.bucket.items(shape))
        rows = batch.few_tokens * shape.group
        shape_of_partial = (batch.bucket.items(shape), kv.kv_heads, rows, kv.head_dim + 4)
        self._partial = batch.scratch.tensor(
            "partial", shape_of_partial, torch.float32, common=True
        )
        self._many_rows = _power(shape.tile * shape.group, MANY_ROWS)
        self._few_rows = self._many_rows if batch.invariant else _power(rows, FEW_ROWS)
        self._invariant = batch.invariant
        self._dim = _power(kv.head_dim, NARROWEST)
        self._dtype = getattr(tl, str(kv.dtype).removeprefix("torch."))
        self._widen = widened(kv.dtype, kv.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, kv = self._batch, self._batch.kv
        keys, values = kv.layer(layer)
        code.write_code[(batch.n_tokens,)](
            key,
            value,
            keys.data_ptr(),
            values.data_ptr(),
            batch.slots,
            *key.stride()[:2],
            *value.stride()[:2],
            keys.stride(0),
            BLOCK_TOKENS=kv.block_tokens,
            HEADS=kv.kv_heads,
            DIM=kv.head_dim,
            WIDTH=_power(kv.kv_heads * kv.head_dim, 1),
            DTYPE=self._dtype,
            ALIGNED=_aligned(keys, values),
        )

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        batch, sinks = self._batch, params.sinks
        call = (layer, query, out, params)
        self._attend(batch.few, batch.counts[0:], self._few, self._few_rows, 0, *call)
        if not batch.bucket.decodes:
            # A graph serves any job of the bucket: programs for as many tiles as it may have.
            tiles = batch.bucket.tiles(batch.shape)
            cut = SPLIT if self._invariant else 0
            self._attend(batch.many, batch.counts[1:], tiles, self._many_rows, cut, *call)
        code.merge_code[(batch.bucket.sequences, batch.kv.kv_heads)](
            self._partial,
            out,
            batch.merges,
            batch.counts[2:],
            0 if sinks is None else sinks.data_ptr(),
            self._partial.shape[2],
            HEADS=batch.heads,
            KV_HEADS=batch.kv.kv_heads,
            DIM=batch.kv.head_dim,
            M=self._few_rows,
            D=self._dim,
            FIELDS=MERGE_FIELDS,
            SINKS=sinks is not None,
            DTYPE=self._dtype,
            enable_fp_fusion=not self._invariant,
        )

    def _attend(
        self,
        items: Tensor,
        count: Tensor,
        programs: int,
        rows: int,
        cut: int,
        layer: int,
        query: Tensor,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        window, softcap, sinks = params.window, params.softcap, params.sinks
        batch, kv = self._batch, self._batch.kv
        if programs == 0:
            return
        keys, values, tables = batch.blocks(layer)
        code.attend_code[(programs, kv.kv_heads)](
            query,
            keys.data_ptr(),
            values.data_ptr(),
            out,
            self._partial,
            items,
            count,
            tables,
            0 if sinks is None else sinks.data_ptr(),
            *query.stride()[:2],
            keys.stride(0),
            self._partial.shape[2],
            params.scale,
            window or 0,
            softcap or 0.0,
            HEADS=batch.heads,
            KV_HEADS=kv.kv_heads,
            DIM=kv.head_dim,
            BLOCK_TOKENS=kv.block_tokens,
            M=rows,
            D=self._dim,
            FIELDS=ITEM_FIELDS,
            WINDOW=window is not None,
            SOFTCAP=softcap is not None,
            SINKS=sinks is not None,
            WIDEN=self._widen,
            DTYPE=self._dtype,
            ALIGNED=_aligned(keys, values),
            CUT=cut,
            # Contracted to multiply-adds, two kernels could round differently.
            enable_fp_fusion=not self._invariant,
            **sizes(rows, self._dim, kv.dtype),
        )


def _aligned(keys: Tensor, values: Tensor) -> int:
    """Bytes of which the places of K and V are multiples, up to what is loaded at once."""
    item = keys.dtype.itemsize
    at = (keys.data_ptr(), values.data_ptr(), keys.stride(0) * item)
    return LOADED if not any(a % LOADED for a in at) else item


def sizes(rows: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Keys at once, warps and stages of `attend_code` for rows and elements at once.

    So that shared memory is within the 99 KiB that a block has on the GPUs with least of it from
    compute capability 8.0, which a test has Triton's compiler say.
    """
    n_bytes = rows * dim * dtype.itemsize
    wide = dim * dtype.itemsize
    return {
        "N": 64 if wide <= 256 else 32 if wide <= 512 else 16,
        "num_warps": 8 if n_bytes > 64 * 128 * 2 else 4,
        "num_stages": 1 if n_bytes > 64 * 128 * 4 else 2,
    }


def widened(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels multiply matrices of `dtype` in float32.

    Triton's interpreter keeps bfloat16 as 16-bit integers and would multiply those; float16 goes
    the way that both go on a GPU.
    """
    return dtype is torch.float32 or (device.type == "cpu" and dtype is torch.bfloat16)


def _power(n: int, least: int) -> int:
    """The next power of two."""
    return int(triton.next_power_of_2(max(n, least)))


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
