"""Ranks of one host meet through gloo, the CPU's backend of `torch.distributed`, over loopback."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch import Tensor

from ballast.models.collectives import Collectives
from ballast.weights.sharding import Shard

_c10d: Any = torch.distributed
"""Its stubs know little of what the backends' classes have."""

_PATIENCE = timedelta(minutes=5)
"""For a rank that lives and does not come; one that has died is noticed at once."""


class GlooExchange(Collectives):
    """Implements `ballast.models.parallel.Exchange`. For one thread at a time."""

    def __init__(self, meeting: Path, shard: Shard) -> None:
        """`meeting`: a file, not there yet, that all ranks name. Returns when all have come; raises
        RuntimeError if they do not."""
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _PATIENCE
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
        """Connections end with the object; other ranks may have ended before."""
