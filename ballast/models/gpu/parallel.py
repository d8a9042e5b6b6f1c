"""Run one rank's part of a model on a GPU: the same job on every rank, with two sums in each layer.

The division is that of `models/parallel/model.py`, the computation that of `models/gpu/fused.py`.
In float32 the parts of a sum are gathered and added in the order of the ranks, so that a row's
result depends on that row alone; in bfloat16 NCCL adds them, which moves less
(`docs/decisions/018-groups-of-gpus.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ballast.core.job import SequenceWork
from ballast.kernels.gpu.batch import GpuBatch
from ballast.models.gpu.fused import GpuFusedModel
from ballast.models.parallel.model import Followers
from ballast.weights.host import HostModel
from ballast.weights.sharding import Shard


class GpuExchange(Protocol):
    """Exchange of tensors between GPUs. All ranks make the same calls in the same order, each on
    its lane's stream; a call returns when it has been launched. After any error the ranks are out
    of step for good."""

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """Fill and return `parts` (ranks, ...): each rank's `part` (...), both contiguous."""

    def all_reduce(self, part: Tensor) -> None:
        """Sum the `part` of all ranks in place, in an undefined order."""

    def close(self) -> None:
        """Close the connections. No rank makes calls any more."""


class GpuParallelModel(GpuFusedModel):
    """Runs one rank's part of a model's jobs. Rank 0 samples tokens and commands its
    `followers`."""

    def __init__(
        self,
        host: HostModel,
        *where: Any,
        exchange: GpuExchange,
        followers: Followers | None = None,
        **more: Any,
    ) -> None:
        """`where` and `more`: as `GpuFusedModel`."""
        self._shard: Shard = host.shard
        self._exchange, self._followers = exchange, followers
        super().__init__(host, *where, **more)

    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        with self._together(work, head=True):
            return super().logits(work)

    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        with self._together(work, head=False):
            return super().hidden(work)

    def compute(self, work: Sequence[SequenceWork], *, head: bool) -> None:
        """Launch a follower's part of a job that rank 0 has begun."""
        if head:
            self.logits(work)
        else:
            self.hidden(work)

    @contextmanager
    def _together(self, work: Sequence[SequenceWork], *, head: bool) -> Iterator[None]:
        self.check(work)
        if self._followers is None:
            yield
            return
        self._followers.begin(self.spec.name, work, head=head)
        try:
            yield
            self._followers.end()
        except BaseException as error:
            self._followers.broken(error)
            raise

    def _set_up(self, host: HostModel, addresses: tuple[int, ...]) -> None:
        super()._set_up(host, addresses)
        # Only the first rank has the bias of a sum: it is added before the all-reduce.
        self._biases = [layer.o_bias for layer in self._layers]
        self._layers = [replace(layer, o_bias=None) for layer in self._layers]
        tokens = self._shard.tokens(self.spec.vocab)
        if len(self._head) > len(tokens):
            # The head is tied to the embeddings, which are whole on every rank.
            self._head = self._head[tokens.start : tokens.stop]

    def _alone(self, batch: GpuBatch) -> bool:
        """Return False: kernels for one row add to hidden states before the ranks' parts are
        summed."""
        return False

    def _multiply(
        self, batch: GpuBatch, role: str, matrix: Tensor, x: Tensor, layer: int = 0
    ) -> Tensor:
        out = super()._multiply(batch, role, matrix, x, layer)
        if role == "head":
            return self._of_all_tokens(out)
        if role == "o" and (bias := self._biases[layer]) is not None:
            out = (out + bias[: out.shape[1]]).to(out.dtype)
        return self._sum(out) if role in ("o", "down") else out

    def _sum(self, out: Tensor) -> Tensor:
        if self.dtype != torch.float32:
            self._exchange.all_reduce(out)
            return out
        parts = self._exchange.all_gather(out, out.new_empty((self._shard.ranks, *out.shape)))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def _of_all_tokens(self, own: Tensor) -> Tensor:
        """Return logits of whole rows, gathered from those of each rank's tokens."""
        n, ranks, vocab = len(own), self._shard.ranks, self.spec.vocab
        if n == 0:
            return own.new_empty((0, vocab))
        width = len(Shard(0, ranks).tokens(vocab))
        own = torch.nn.functional.pad(own, (0, width - own.shape[1]))
        parts = self._exchange.all_gather(own, own.new_empty((ranks, n, width)))
        # Only the last rank has fewer tokens than the first.
        return parts.transpose(0, 1).reshape(n, ranks * width)[:, :vocab].contiguous()
