"""A model served as from a GPU, whose passes read some of its segments in host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ballast.core.job import SequenceWork
from ballast.models.barriers import HostReads
from ballast.models.gpu.executor import GpuExecutor
from tests.models.tiny import Served

NOT_A_NUMBER = 0xFF
"""Each byte of what must not be read."""


class Places:
    """Barriers of a model of which nothing streams, with what its passes read in host memory."""

    def __init__(self) -> None:
        self.reads = HostReads()

    def host_reads(self) -> HostReads:
        return self.reads

    def places(self, work: Sequence[SequenceWork]) -> None:
        return None

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> tuple[int, ...]:
        return ()

    def finish(self) -> None:
        """Nothing is in flight."""

    def stalled(self) -> float:
        return 0.0


class HostServed(Served):
    """`read` says what is read in host memory: on the device, it is no number then."""

    def __init__(self, path: Path, *, gpu: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(path, gpu=gpu, **more)
        assert isinstance(self.model, GpuExecutor)
        self.barriers = Places()
        self.model.barriers = self.barriers  # type: ignore[assignment]
        self.model._pointers = tuple(self.host.addresses)

    def read(self, units: Collection[int], os_share: float = 0.0) -> None:
        self.barriers.reads = HostReads(frozenset(units), os_share)
        self.fill()
        for i in units:
            np.copyto(self.weights[i], NOT_A_NUMBER)
