"""What ranks do together through a backend of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch import Tensor


class Collectives:
    """Over a backend's own object, which all of PyTorch's have these calls on.

    On a GPU the work goes to the stream that is current, in order with what was launched there
    before: PyTorch from 2.8 does so for calls that are not asynchronous. Nothing waits on the host.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        c10d: Any = torch.distributed.distributed_c10d  # absent where PyTorch has none of it
        self._gather, self._reduce = c10d.AllgatherOptions(), c10d.AllreduceOptions()
        self._gather.asyncOp = self._reduce.asyncOp = False

    def all_gather(self, part: Tensor, parts: Tensor) -> Tensor:
        """`parts` (ranks, ...), filled with each rank's `part` (...), both contiguous."""
        _wait(self._backend._allgather_base(parts.flatten(0, 1), part, self._gather))
        return parts

    def all_reduce(self, part: Tensor) -> None:
        """In place, the sum of what all ranks have there, in an order that is the backend's."""
        _wait(self._backend.allreduce([part], self._reduce))


def _wait(work: Any) -> None:
    """Backends that are in order with a stream have nothing to wait for."""
    if work is not None:
        work.wait()
