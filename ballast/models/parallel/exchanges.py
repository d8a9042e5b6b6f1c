"""Exchange tensors between ranks of one host (collectives): by gloo, NCCL (GPUs) or shared
memory."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ballast.core.errors import ConfigError, DeviceError
from ballast.kernels.meeting import Meeting
from ballast.weights.sharding import Shard

_c10d: Any = torch.distributed
"""Untyped, as PyTorch's stubs lack most members of its backends' classes."""

_CONNECT_TIMEOUT = timedelta(minutes=5)
"""Most time for a running rank to connect; a rank that has died is noticed at once."""


class _TorchCollectives:
    """Collectives through the object of a PyTorch backend, all of which have these calls.

    On a GPU the work goes to the current stream, in order with earlier launches: PyTorch from 2.8
    does so for calls that are not asynchronous. Nothing waits on the host.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        c10d: Any = torch.distributed.distributed_c10d  # absent if PyTorch was built without it
        self._gather, self._reduce = c10d.AllgatherOptions(), c10d.AllreduceOptions()
        self._gather.asyncOp = self._reduce.asyncOp = False

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """Fill and return `parts` (ranks, ...): each rank's `part` (...), both contiguous."""
        _wait(self._backend._allgather_base(parts.flatten(0, 1), part, self._gather))
        return parts

    def all_reduce(self, part: Tensor) -> None:
        """Sum the `part` of all ranks in place, in the backend's order."""
        _wait(self._backend.allreduce([part], self._reduce))


class GlooExchange(_TorchCollectives):
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
        super().__init__(self._group)

    def gather(self, part: Tensor, parts: Tensor) -> Tensor:
        options = _c10d.GatherOptions()
        options.rootRank = 0
        outputs = [list(parts)] if self._shard.rank == 0 else []
        self._group.gather(outputs, [part], options).wait()
        return parts

    def close(self) -> None:
        """Do nothing: connections end with the object; other ranks may have ended before."""


class NcclExchange(_TorchCollectives):
    """Implements `ballast.models.gpu.parallel.GpuExchange`: each rank is a process with a GPU of
    its own."""

    def __init__(self, meeting: Path, shard: Shard, device: torch.device) -> None:
        """Connect to the other ranks.

        `meeting`: path of a file that does not exist yet, the same on all ranks; PyTorch's watchdog
        reads the file until `close`.

        Raises ConfigError if PyTorch was built without NCCL, DeviceError if NCCL fails.
        """
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            allowed = "this PyTorch has no NCCL, through which GPUs of a group meet: 1"
            raise ConfigError("tensor_parallel", shard.ranks, allowed)
        # All ranks are on one host: no other host need be able to connect.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
        # The store has to outlive the group.
        self._store = _c10d.FileStore(str(meeting), shard.ranks)
        try:
            with torch.cuda.device(device):
                options = _c10d.ProcessGroupNCCL.Options()
                made = _c10d.ProcessGroupNCCL(self._store, shard.rank, shard.ranks, options)
                # Otherwise ranks would connect within the first job.
                made.eager_connect_single_device(device)
        except RuntimeError as error:
            raise DeviceError("NCCL", str(error)) from error
        self._group = made
        super().__init__(made)

    def close(self) -> None:
        """Close without waiting for other ranks, which may have ended before."""
        self._group.abort()


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


def _wait(work: Any) -> None:
    """Wait for a collective; backends in order with a stream return nothing to wait for."""
    if work is not None:
        work.wait()
