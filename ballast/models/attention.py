"""Register our paged attention with `transformers`, whose modules call it in every layer.

No mask function is registered beside it: `transformers` then makes no mask, as for other serving
engines. That its masks are only causal, with at most the window that the attention is given, is
checked when the model is loaded. Since not every family passes arguments of a call on to its
attention, the job's batch is in a context variable (`running`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ballast.kernels.attention import Attention, AttentionParams
from ballast.kernels.paged_attention import PagedBatch

NAME = "ballast"
"""Name of this attention implementation in `transformers`."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """State of one job that all layers share. `out` (T, heads, head_dim) is reused by every
    layer."""

    batch: Attention
    out: Tensor

    @classmethod
    def of(cls, batch: PagedBatch) -> JobContext:
        shape = (batch.n_tokens, batch.heads, batch.kv.head_dim)
        return cls(batch, torch.empty(shape, dtype=batch.kv.dtype))


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

    Query (1, heads, T, head_dim), key and value (1, kv_heads, T, head_dim); all sequences of the
    job one after the other. Result (1, T, heads, head_dim), valid until the next layer attends.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    job = _job.get()
    batch, out = job.batch, job.out
    batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    batch.attend(layer, rows, out, AttentionParams(scaling, sliding_window, softcap, s_aux))
    return out[None], None


def register() -> None:
    """Make this attention known to `transformers`, whose import takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
