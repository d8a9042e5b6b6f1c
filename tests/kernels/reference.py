"""What every implementation of attention is compared with: plain softmax, in float64."""

from __future__ import annotations

import torch


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q (n, heads, dim), which begins at `start`, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    back = start + torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    unseen = back < 0 if window is None else (back < 0) | (back >= window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        one = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, one], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnc,chd->nhd", weights, v)
