"""Attention by FlashInfer, where it is installed; K and V are written by our kernel.

FlashInfer plans on the host, once per job for each way in which layers differ (scale, window, soft
cap). A batch of decodes has wrappers whose buffers stay, as CUDA graphs need; `prepare` plans anew
what earlier jobs asked for, so that replaying a graph needs no call of `attend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ballast.kernels.device_batch import DeviceBatch
from ballast.kernels.triton_attention import TritonAttention

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation gives a wrapper."""
PLAN_BYTES = 8 << 20
"""What a wrapper takes beside that for what it has planned, unless it is given some."""
_Kind = tuple[float, int | None, float | None]
"""Scale, window and soft cap of a layer."""


class FlashInferAttention(TritonAttention):
    """`wrapper`: FlashInfer's class of that name, or one that is told the same."""

    def __init__(self, batch: DeviceBatch, wrapper: Callable[..., Any] | None = None) -> None:
        super().__init__(batch)
        if wrapper is None:
            wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._wrapper = wrapper
        size = (WORKSPACE_BYTES,)
        self._workspace = batch.scratch.take("flashinfer", size, torch.uint8, common=True)
        self._wrappers: dict[_Kind, Any] = {}

    def prepare(self) -> None:
        for kind, wrapper in self._wrappers.items():
            self._plan(wrapper, kind)

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
        if sinks is not None:
            super().attend(layer, query, scale, out, window, softcap, sinks)
            return
        kind = (scale, window, softcap)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            self._wrappers[kind] = wrapper = self._made()
            # A job plans anew whatever it uses: buckets can share what is planned, kinds cannot.
            use = f"flashinfer plan {len(self._wrappers)}"
            planned = self._batch.scratch.take(use, (PLAN_BYTES,), torch.uint8, common=True)
            wrapper.reset_workspace_buffer(self._workspace, planned)
            self._plan(wrapper, kind)
        rows = slice(None) if self._batch.bucket.decodes else slice(self._batch.n_rows)
        wrapper.run(query[rows], self._batch.kv.layer(layer), out=out[rows])

    def _made(self) -> Any:
        batch = self._batch
        if not batch.bucket.decodes:
            return self._wrapper(self._workspace, "NHD")
        n, device = batch.bucket.sequences, batch.kv.device

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return self._wrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(n + 1),
            paged_kv_indptr_buf=buffer(n + 1),
            paged_kv_indices_buf=buffer(batch.bucket.blocks),
            paged_kv_last_page_len_buf=buffer(n),
        )

    def _plan(self, wrapper: Any, kind: _Kind) -> None:
        """Of the job's sequences; of all that the bucket has room for, where a graph needs that."""
        batch, (scale, window, softcap) = self._batch, kind
        made = batch.plan
        n = batch.bucket.sequences if batch.bucket.decodes else batch.n_sequences
        size = batch.kv.block_tokens
        lengths = torch.zeros(n, dtype=torch.int32)
        lengths[: batch.n_sequences] = torch.from_numpy(made.lengths)
        # A decode that is padding has a query, too, and no keys: FlashInfer refuses queries that
        # are not counted here, and in a graph more of them than its first plan had.
        bounds = torch.arange(n + 1, dtype=torch.int32)
        if not batch.bucket.decodes:
            bounds = torch.from_numpy(made.bounds)
        # A table may have more blocks than its sequence has keys: only those in use are named.
        pages = (lengths + size - 1) // size
        first = torch.zeros(n + 1, dtype=torch.int32)
        first[1:] = pages.cumsum(0)
        used = [
            torch.from_numpy(made.tables[at : at + k])
            for at, k in zip(made.table_bounds.tolist(), pages.tolist(), strict=False)
        ]
        wrapper.plan(
            bounds,
            first,
            torch.cat(used).to(batch.kv.device, non_blocking=True),
            lengths - (pages - 1).clamp(min=0) * size,
            batch.heads,
            batch.kv.kv_heads,
            batch.kv.head_dim,
            size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=batch.kv.dtype,
            kv_data_type=batch.kv.dtype,
        )
