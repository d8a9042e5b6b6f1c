"""Define the protocol of paged attention over one job's batch, and its parameters per layer.

Implemented on CPU by `PagedBatch`, on GPU by `GpuBatch`; used by models' attention layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """Parameters of a layer's attention: softmax(`scale` * query K^T), with the options below."""

    scale: float
    window: int | None = None
    """Sliding window: a token at position p attends to positions above p - `window`; earlier blocks
    are not read and need not exist. None: all positions."""
    softcap: float | None = None
    """If set, a score becomes softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """(heads,): attention sinks: an additional score per head, which takes its share of the softmax
    and contributes no value. None: no sinks."""


class Attention(Protocol):
    """Computes attention of one job's sequences over their blocks of the KV cache."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write new keys and values, each (T, kv_heads, head_dim), into the blocks of `layer`.

        Both have the KV's dtype; any strides, except that a head's elements are contiguous.
        """

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        """Write the attention output of `query` (T, heads, head_dim) into `out`.

        `out` has the same shape and is contiguous. The new tokens' keys and values must have been
        written before. Padding rows (on a GPU) have undefined contents.
        """
