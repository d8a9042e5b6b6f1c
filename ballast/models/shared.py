"""Ranks of one host meet in memory that they share."""

from __future__ import annotations

from torch import Tensor

from ballast.kernels.meeting import Meeting
from ballast.weights.sharding import Shard


class SharedExchange:
    """Implements `ballast.models.parallel.Exchange`. It says nothing of ranks that have died."""

    def __init__(self, fd: int, shard: Shard, capacity: int) -> None:
        """`fd` and `capacity`: as `Meeting`, the same on all ranks."""
        self._meeting = Meeting(fd, shard.rank, shard.ranks, capacity)

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        return self._meeting.all_gather(part)

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        return self._meeting.all_gather(part)

    def close(self) -> None:
        self._meeting.close()
