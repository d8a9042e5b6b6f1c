"""Compute attention over a paged KV cache by plain PyTorch operations, on any device.

Reference of the Triton kernels, and the fallback without Triton (chosen by `gpu.attention`). Blocks
are gathered for each sequence, which costs several times the memory traffic of kernels that read
them in place.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ballast.core.units import MiB
from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.batch import GpuBatch

SCORE_BYTES = 32 * MiB
"""Bound of the memory for scores; longer chunks are computed in parts."""


class PlainAttention:
    """Implements `GpuAttention`; reads the job from its plan on the host."""

    replayable: ClassVar[bool] = False

    def __init__(self, batch: GpuBatch) -> None:
        self._batch = batch

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, kv = self._batch, self._batch.kv
        rows = batch.n_rows
        slots = batch.slots[:rows].long()
        block, place = slots // kv.block_tokens, slots % kv.block_tokens
        for cache, new in zip(kv.layer(layer), (key, value), strict=True):
            cache[block, place] = new[:rows]

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        window, softcap, sinks = params.window, params.softcap, params.sinks
        batch, kv = self._batch, self._batch.kv
        keys, values, table = batch.blocks(layer)
        plan, group = batch.plan, batch.shape.group
        bounds, ends = plan.bounds.tolist(), plan.lengths.tolist()
        tables = plan.table_bounds.tolist()
        for i, end in enumerate(ends):
            at, count = bounds[i], bounds[i + 1] - bounds[i]
            start = end - count
            # Blocks before the window need not be there.
            skipped = 0 if window is None else max(0, start - window + 1) // kv.block_tokens
            first = skipped * kv.block_tokens
            used = slice(tables[i] + skipped, tables[i] - (-end // kv.block_tokens))
            kept = table[used].long()
            k = keys[kept].flatten(0, 1)[: end - first].float()
            v = values[kept].flatten(0, 1)[: end - first].float()
            seen = torch.arange(first, end, device=query.device)
            rows = max(1, SCORE_BYTES // (4 * batch.heads * len(seen)))
            for begin in range(0, count, rows):
                n = min(rows, count - begin)
                part = slice(at + begin, at + begin + n)
                q = query[part].float().reshape(n, kv.kv_heads, group, kv.head_dim)
                scores = torch.einsum("nhgd,chd->hgnc", q, k) * params.scale
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                own = torch.arange(start + begin, start + begin + n, device=query.device)
                back = own[:, None] - seen
                unseen = back < 0 if window is None else (back < 0) | (back >= window)
                scores = scores.masked_fill(unseen, float("-inf"))
                if sinks is not None:
                    one = sinks.float().reshape(kv.kv_heads, group, 1, 1).expand(-1, -1, n, 1)
                    scores = torch.cat([scores, one], -1)
                weights = scores.softmax(-1)[..., : len(seen)]
                attended = torch.einsum("hgnc,chd->nhgd", weights, v)
                out[part] = attended.reshape(n, batch.heads, kv.head_dim)
