"""Register our paged attention with `transformers`, whose modules call it in every layer.

No mask function is registered beside it: `transformers` then makes no mask, as for other serving
engines. That its masks are only causal, with at most the window that the attention is given, is
checked when the model is loaded. Since not every family passes arguments of a call on to its
attention, the job's batch is in a context variable (`running`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ballast.kernels.attention import Attention, AttentionParams
from ballast.kernels.paged_attention import PagedBatch
from ballast.models.layer_arrays import LayerArray
from ballast.weights.latent import over_latents

NAME = "ballast"
"""Name of this attention implementation in `transformers`."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """State of one job that all layers share, or those with equal KV. `out` (T, heads, head_dim) is
    reused by every layer."""

    batch: Attention
    out: Tensor
    kv_heads: int
    kv_layers: Mapping[int, int] = field(default_factory=dict)
    """Number of a layer among those with KV, if not all have it."""
    others: Mapping[int, JobContext] = field(default_factory=dict)
    """Contexts of layers that have KV of another form."""
    readers: Collection[int] = ()
    """Layers that read KV which another layer has written."""

    @classmethod
    def of(
        cls, batch: PagedBatch, array: LayerArray, others: Mapping[int, JobContext]
    ) -> JobContext:
        shape = (batch.n_tokens, batch.heads, batch.kv.head_dim)
        # Over KV in 8 bits attention computes in float32 alone.
        dtype = torch.float32 if batch.kv.scales else batch.kv.dtype
        out = torch.empty(shape, dtype=dtype)
        return cls(batch, out, batch.kv.kv_heads, array.numbers, others, array.readers)


_job: ContextVar[JobContext] = ContextVar(NAME)


@contextmanager
def running(job: JobContext) -> Iterator[None]:
    """Make modules called within attend for `job`."""
    token = _job.set(job)
    try:
        yield
    finally:
        _job.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values into their blocks, then attend over the cache.

    Query and key (1, heads, T, head_dim), value (1, kv_heads, T, its own), of the layer's sizes;
    all sequences of the job one after the other. Result (1, T, heads, the value's), valid until the
    next layer attends.
    """
    job = _job.get()
    own: int = module.layer_idx  # type: ignore[assignment]
    job = job.others.get(own, job)
    layer = job.kv_layers.get(own, own)
    batch, out = job.batch, job.out
    kv_heads, head_dim = job.kv_heads, out.shape[-1]
    if own not in job.readers:
        batch.write(layer, _rows(key, kv_heads, head_dim), _rows(value, kv_heads, head_dim))
    rows = _rows(query, query.shape[1], head_dim).to(out.dtype)
    batch.attend(layer, rows, out, AttentionParams(scaling, sliding_window, softcap, s_aux))
    return out[None, ..., : value.shape[-1]].to(query.dtype).contiguous(), None


def _rows(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """Return (1, n, T, d) as (T, heads, head_dim), the sizes of all layers' KV: each head is
    repeated, and filled up with zeros, which add nothing to any product."""
    rows = x[0].transpose(0, 1)
    _, n, d = rows.shape
    if n < heads:
        rows = rows.repeat_interleave(heads // n, 1)
    return rows if d == head_dim else nn.functional.pad(rows, (0, head_dim - d))


def register() -> None:
    """Make this attention known to `transformers`, whose import takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, over_latents(attend))
