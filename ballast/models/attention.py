"""Our attention, as `transformers` calls it.

No mask function is registered beside it: `transformers` then makes no mask at all, as for other
serving engines. What the attention needs to know of a job reaches it as the argument `ballast` of
the model's call, which every layer passes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ballast.kernels.paged_attention import PagedBatch

NAME = "ballast"
"""The implementation's name in `transformers`, and that of the argument."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What all layers of one job share. `out` (T, heads, head_dim) is re-used by every layer."""

    batch: PagedBatch
    out: Tensor

    @classmethod
    def of(cls, batch: PagedBatch) -> JobContext:
        shape = (batch.n_tokens, batch.heads, batch.kv.head_dim)
        return cls(batch, torch.empty(shape, dtype=batch.kv.dtype))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    ballast: JobContext,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values into their blocks, then attend over the cache.

    Query (1, heads, T, head_dim), key and value (1, kv_heads, T, head_dim); all sequences of the
    job one after the other. Result (1, T, heads, head_dim), valid until the next layer attends.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    batch, out = ballast.batch, ballast.out
    batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    batch.attend(layer, query[0].transpose(0, 1), scaling, out)
    return out[None], None


AttentionInterface.register(NAME, attend)
