"""The protocol of paged attention: what a job's batch does for each layer, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """How a layer's scores become weights: softmax(`scale` * query K^T), but for what it adds."""

    scale: float
    window: int | None = None
    """A token at position p sees positions above p - `window`: blocks before them are not read, and
    need not be there. None: all."""
    softcap: float | None = None
    """A score becomes softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """(heads,): a head's rows have one score more, that one, which takes its share of the weights
    and adds nothing."""


class Attention(Protocol):
    """Attends for the sequences of one job, over their blocks of the KV cache."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put new keys and values, each (T, kv_heads, head_dim), into the blocks of `layer`.

        Of the KV's dtype; any strides, except that a head's elements lie side by side.
        """

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        """Write attention's result for query (T, heads, head_dim) into `out`.

        `out` has that shape and is contiguous. The new tokens' keys and values have been written.
        Rows that are padding (on a GPU) stay as they were, or are anything.
        """
