"""Exchange tensors between ranks of one host (collectives): by gloo or shared memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ballast.kernels.meeting import Meeting
from ballast.weights.sharding import Shard

_c10d: Any = torch.distributed
"""Untyped, as PyTorch's stubs lack most members of its backends' classes."""

_CONNECT_TIMEOUT = timedelta(minutes=5)
"""Most time for a running rank to connect; a rank that has died is noticed at once."""


class GlooExchange:
    """Implements `RankExchange` on CPU by gloo, over loopback. For one thread at a time."""

    def __init__(self, meeting: Path, shard: Shard) -> None:
        """Connect to the other ranks; raises RuntimeError if they do not connect in time.

        `meeting`: path of a file that does not exist yet, the same on all ranks.
        """
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _CONNECT_TIMEOUT
        # The store has to outlive the group.
        self._store = _c10d.FileStore(str(meeting), shard.ranks)
        self._group = _c10d.ProcessGroupGloo(self._store, shard.rank, shard.ranks, options)
        self._shard = shard
        c10d: Any = torch.distributed.distributed_c10d  # absent if PyTorch was built without it
        self._gathering = c10d.AllgatherOptions()
        self._gathering.asyncOp = False

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """Fill and return `parts` (ranks, ...): each rank's `part` (...), both contiguous."""
        work = self._group._allgather_base(parts.flatten(0, 1), part, self._gathering)
        if work is not None:
            work.wait()
        return parts

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        options = _c10d.GatherOptions()
        options.rootRank = 0
        outputs = [list(parts)] if self._shard.rank == 0 else []
        self._group.gather(outputs, [part], options).wait()
        return parts

    def close(self) -> None:
        """Do nothing: connections end with the object; other ranks may have ended before."""


class SharedExchange:
    """Implements `RankExchange` by shared memory. It does not notice ranks that have died."""

    def __init__(self, fd: int, shard: Shard, capacity: int) -> None:
        """`fd` and `capacity`: as `Meeting`, the same on all ranks."""
        self._meeting = Meeting(fd, shard.rank, shard.ranks, capacity)

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        return self._meeting.all_gather(part)

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        return self._meeting.all_gather(part)

    def close(self) -> None:
        self._meeting.close()
