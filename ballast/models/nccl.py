"""GPUs of one host meet through NCCL, by `torch.distributed`'s backend for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ballast.core.errors import ConfigError, DeviceError
from ballast.models.collectives import Collectives
from ballast.weights.sharding import Shard

_c10d: Any = torch.distributed


class NcclExchange(Collectives):
    """Implements `ballast.models.device_parallel.DeviceExchange`: each rank is a process, and has
    a GPU that no other has."""

    def __init__(self, meeting: Path, shard: Shard, device: torch.device) -> None:
        """`meeting`: a file, not there yet, that all ranks name, and that PyTorch's watchdog looks
        into until `close`. Returns when all have connected.

        Raises ConfigError where PyTorch was built without NCCL, DeviceError where NCCL fails.
        """
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            allowed = "this PyTorch has no NCCL, through which GPUs of a group meet: 1"
            raise ConfigError("tensor_parallel", shard.ranks, allowed)
        # They are of one host: nobody else need be able to connect.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
        # The store has to outlive the group.
        self._store = _c10d.FileStore(str(meeting), shard.ranks)
        try:
            with torch.cuda.device(device):
                options = _c10d.ProcessGroupNCCL.Options()
                made = _c10d.ProcessGroupNCCL(self._store, shard.rank, shard.ranks, options)
                # Else it would connect within the first job.
                made.eager_connect_single_device(device)
        except RuntimeError as error:
            raise DeviceError("NCCL", str(error)) from error
        self._group = made
        super().__init__(made)

    def close(self) -> None:
        """Waits for nobody: other ranks may have ended before."""
        self._group.abort()
