"""Attention by PyTorch's `varlen_attn_out` with a block table; K and V are written by our kernel.

It has neither soft caps nor sinks: layers that have are attended by our kernel. FlashAttention 2 is
told not to split keys, as it is said to go wrong where it does so under a block table
(Dao-AILab/flash-attention issue 1217).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ballast.kernels.device_attention import flash_version
from ballast.kernels.device_batch import DeviceBatch
from ballast.kernels.triton_attention import TritonAttention


class VarlenAttention(TritonAttention):
    """`attend_out`: what has `varlen_attn_out`'s signature, PyTorch's own if not given."""

    def __init__(self, batch: DeviceBatch, attend_out: Callable[..., Any] | None = None) -> None:
        super().__init__(batch)
        if attend_out is None:
            from torch.nn.attention.varlen import varlen_attn_out

            attend_out = varlen_attn_out
        self._attend_out = attend_out
        bucket, device = batch.bucket, batch.kv.device
        self._most = bucket.longest * batch.kv.block_tokens
        self._column = torch.arange(bucket.longest, dtype=torch.int32, device=device)
        self._table = torch.zeros(
            (bucket.sequences, bucket.longest), dtype=torch.int32, device=device
        )
        self._old = flash_version() == "FA2"
        # Where each sequence's keys would begin if they lay side by side: only FA2 asks.
        self._bounds = torch.arange(bucket.sequences + 1, dtype=torch.int32, device=device)
        self._bounds *= self._most

    def prepare(self) -> None:
        """One row per sequence of the tables, which lie one after the other."""
        batch = self._batch
        at = (batch.table_bounds[:-1, None] + self._column).clamp_(max=len(batch.tables) - 1)
        torch.index_select(batch.tables, 0, at.flatten(), out=self._table.view(-1))

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        out: Tensor,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        if softcap is not None or sinks is not None:
            super().attend(layer, query, scale, out, window, softcap, sinks)
            return
        batch = self._batch
        keys, values = batch.kv.layer(layer)
        self._attend_out(
            out,
            query,
            keys,
            values,
            batch.bounds,
            self._bounds if self._old else None,
            batch.longest_chunk,
            self._most,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=batch.heads != batch.kv.kv_heads,
            seqused_k=batch.lengths,
            block_table=self._table,
            num_splits=1 if self._old else None,
        )
