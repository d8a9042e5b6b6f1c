"""What every implementation of attention is compared with: plain softmax, in float64."""

from __future__ import annotations

import torch

from ballast.kernels.device_batch import DeviceBatch


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of q (n, heads, dim), which begins at `start`, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    back = start + torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    unseen = back < 0 if window is None else (back < 0) | (back >= window)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("hnc,chd->nhd", weights, v)


class PlainAttention:
    """`kernels.device_batch.Attention` by the reference, from the batch's tensors."""

    def __init__(self, batch: DeviceBatch) -> None:
        self._batch = batch

    def prepare(self) -> None: ...

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        real = self._batch.slots >= 0
        slots = self._batch.slots[real].long()
        size = self._batch.kv.block_tokens
        for cache, new in zip(self._batch.kv.layer(layer), (key, value), strict=True):
            cache[slots // size, slots % size] = new[real]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        window: int | None,
        softcap: float | None,
    ) -> None:
        batch = self._batch
        bounds, tables = batch.bounds.tolist(), batch.table_bounds.tolist()
        for i, n in enumerate(batch.lengths.tolist()):
            rows = slice(bounds[i], bounds[i + 1])
            if rows.stop > rows.start:
                blocks = batch.tables[tables[i] : tables[i + 1]].long()
                k, v = (x[blocks].flatten(0, 1)[:n] for x in batch.kv.layer(layer))
                start = n - (rows.stop - rows.start)
                found = reference(query[rows], k, v, start, scale, window, softcap)
                out[rows] = found.to(out.dtype)
