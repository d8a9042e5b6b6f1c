"""Run one rank's part of a fused model on CPU: the same job on every rank, two sums in each layer.

::

    rank 0   norm q/k/v rotary attention o ┐     ┌ norm gate/up down ┐     ┌ ...
    rank 1   norm q/k/v rotary attention o ┴ sum ┴ norm gate/up down ┴ sum ┴ ...

Each rank has its heads, its part of the intermediate and its part of the head
(`ballast.weights.sharding`); hidden states are whole, and equal to the last bit, on all. Parts of a
sum are added in the order of the ranks, so that a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ballast.core.errors import ConfigError
from ballast.core.job import SequenceWork
from ballast.core.settings import ModelSettings
from ballast.kernels import linear
from ballast.memory.tensor import tensor_at
from ballast.models.executor import Rows
from ballast.models.fused.model import FusedModel
from ballast.models.fused.workspace import MatrixPlace
from ballast.weights.host import HostModel
from ballast.weights.segment import PackedTensor
from ballast.weights.sharding import Shard


def check_parallel(settings: ModelSettings, ranks: int) -> None:
    """Raise ConfigError for settings that a CPU can run on one rank only."""
    if settings.linear == "plain":
        allowed = f"{settings.name} is not served with packed matrices"
        raise ConfigError("tensor_parallel", ranks, allowed)


class RankExchange(Protocol):
    """Exchange of tensors between ranks. All ranks make the same calls in the same order; a call
    returns when all have made it. After any error the ranks are out of step for good."""

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """Return (ranks, ...): each rank's `part` (...), valid until the next call. `parts`, of
        that shape, is memory that may be used for the result."""

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """Return on rank 0 what `all_gather` returns; on other ranks the result is undefined."""

    def close(self) -> None:
        """Release the memory. No rank may make calls, or read results, afterwards."""


class NoExchange:
    """Implements `RankExchange` for a first rank without others: their parts are zeros."""

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        parts.zero_()
        parts[0] = part
        return parts

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        return self.all_gather(part, parts)

    def close(self) -> None:
        """Release nothing: there is no memory."""


class Followers(Protocol):
    """The other ranks of a group, commanded by rank 0."""

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        """Start a job on the other ranks."""

    def end(self) -> None:
        """Wait until the other ranks have run the job."""

    def broken(self, error: BaseException) -> None:
        """Report a job that failed after its begin: ranks are out of step."""


class ParallelModel(FusedModel):
    """Runs one rank's part of a model's jobs. Rank 0 samples tokens and commands its
    `followers`."""

    SUMS = True

    def __init__(
        self,
        host: HostModel,
        *where: Any,
        exchange: RankExchange,
        followers: Followers | None = None,
    ) -> None:
        """`where`: as of `FusedModel`."""
        self._shard: Shard = host.shard
        self._exchange = exchange
        self._followers = followers
        super().__init__(host, *where)
        b, spec = self._buffers, self.spec
        rows, sampled = self._max_rows, self._max_sampled
        width = self._head_width
        self._landing = tensor_at(b.part, (rows, spec.hidden), torch.float32)
        self._parts = tensor_at(b.parts, (spec.ranks * rows * spec.hidden,), torch.float32)
        self._head_out = tensor_at(b.head_part, (sampled, width), torch.float32)
        self._head_parts = tensor_at(b.head_parts, (spec.ranks * sampled * width,), torch.float32)

    def compute(self, work: Sequence[SequenceWork], *, head: bool) -> None:
        """Compute a follower's part of a job that rank 0 has begun."""
        with torch.inference_mode():
            self._compute(work, head=head)

    def _execute(self, rows: Rows, work: Sequence[SequenceWork], *, head: bool) -> None:
        if self._followers is not None:
            self._followers.begin(self.spec.name, work, head=head)
        try:
            super()._execute(rows, work, head=head)
            if head and len(rows.wanted):
                self._gather_logits(len(rows.wanted))
            if self._followers is not None:
                self._followers.end()
        except BaseException as error:
            if self._followers is not None:
                self._followers.broken(error)
            raise

    def _sum_up(self, n: int) -> None:
        h, ranks = self.spec.hidden, self.spec.ranks
        parts = self._parts[: ranks * n * h].view(ranks, n, h)
        hidden = self._hidden[:n]
        for part in self._exchange.all_gather(self._landing[:n], parts):
            hidden += part

    def _gather_logits(self, n: int) -> None:
        ranks, vocab, width = self.spec.ranks, self.spec.vocab, self._head_width
        parts = self._head_parts[: ranks * n * width].view(ranks, n, width)
        parts = self._exchange.gather(self._head_out[:n], parts)
        if self._shard.rank == 0:
            for rank, part in enumerate(parts):
                tokens = Shard(rank, ranks).tokens(vocab)
                self._logits[:n, tokens.start : tokens.stop] = part[:, : len(tokens)]

    @property
    def _head_width(self) -> int:
        """Logits of one position that the first rank computes; no other rank computes more."""
        return len(Shard(0, self.spec.ranks).tokens(self.spec.vocab))

    def _head_of(self, packed: PackedTensor, address: int) -> tuple[PackedTensor, int]:
        tokens = self._shard.tokens(self.spec.vocab)
        if packed.shape[0] == len(tokens):
            return packed, address
        # A tied head: the panels of the rank's tokens in the embeddings, which are whole.
        before = linear.packed_bytes(tokens.start, self.spec.hidden, self.dtype)
        return replace(packed, shape=(len(tokens), self.spec.hidden)), address + before

    def _place(self, role: str) -> MatrixPlace:
        place = super()._place(role)
        if role in ("o", "down"):
            return place._replace(target=self._buffers.part, mode=linear.STORE)
        if role == "head":
            tokens = self._shard.tokens(self.spec.vocab)
            return place._replace(
                n=len(tokens), target=self._buffers.head_part, target_row=self._head_width
            )
        return place
