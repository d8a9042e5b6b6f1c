"""Define the protocol of one tensor-parallel rank's machine: its memory, link and models.

Implemented for CPU and GPU; used by `GroupMachine` (first rank) and `RankServer` (further ranks).
Also derives one rank's equal share of a device's settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ballast.core.capability import CUDA
from ballast.core.clock import Clock
from ballast.core.errors import ConfigError
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.live.host_stream import HostStream
from ballast.live.machine import Cap
from ballast.live.runner import Executor, LaneRunner, Record
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.models.gpu.parallel import GpuParallelModel
from ballast.models.parallel.model import (
    Followers,
    ParallelModel,
)
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard

MeetingPlace = Path | int
"""Rendezvous of the ranks: a file that does not exist yet, or the descriptor of shared memory."""


@dataclass(frozen=True, slots=True)
class KvPlace:
    """The addresses of a model's KV cache, whether backed by pages or not."""

    base: int
    n_bytes: int
    layout: Layout


class RankMachine(Protocol):
    """Memory, link and models of one rank; methods without a docstring are as in `Machine`."""

    @property
    def vm(self) -> Vm: ...

    @property
    def link(self) -> Link: ...

    def meet(self, place: MeetingPlace) -> None:
        """Join the other ranks, once, before models are built; returns when all have joined."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread, before it uses the machine for the first time."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        """Load the rank's part of a model into the host tier."""

    def unload(self, host: HostModel) -> None: ...

    def copy(self, dst: int, src: int, n_bytes: int) -> None: ...

    def model(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvPlace,
        workspace: Workspace,
        followers: Followers | None = None,
    ) -> ParallelModel | GpuParallelModel:
        """Build the executor of the rank's part of a model. `followers`: the further ranks, on
        which the first rank starts each of its jobs."""

    def layer_stream(
        self, model: str, copies: Sequence[Copy], clock: Clock, on_settled: Callable[[], None]
    ) -> HostStream | None:
        """Build what loads the rank's parts of layers; None: layers cannot rotate."""

    def synchronized(self) -> AbstractContextManager[object]:
        """Return a context for a further rank's part of a job, left when it has been computed."""

    def cap(self, n_bytes: int) -> Cap: ...

    def when_lost(self, call: WhenLost) -> None: ...

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner: ...

    def close(self) -> None:
        """Free everything; the other ranks have ended, and nothing of this one is in use."""


MakeRankMachine = Callable[
    [DeviceSettings, Shard, LinkRates | None, Clock, Callable[[Event], None]], RankMachine
]
"""Builds a rank's machine from its `settings_of_rank`, its shard, the pace of its link, the clock,
and a callback for transfers that end."""


def settings_of_rank(whole: DeviceSettings, rank: int = 0) -> DeviceSettings:
    """Return one rank's equal share of a device's settings; each rank of a GPU has a GPU to itself,
    counted from the device's. Raises ConfigError where the device cannot be a group."""
    ranks = whole.tensor_parallel
    if whole.lanes > 1:
        allowed = "one lane: ranks meet in the order of jobs, of which there is one at a time"
        raise ConfigError(f"lanes of {whole.name}", whole.lanes, allowed)
    budget = whole.budget_bytes // ranks
    if budget < whole.page_bytes:
        raise ConfigError(f"the budget of {whole.name}", whole.budget_bytes, "a page each")
    if whole.gpu is not None:
        return replace(whole, name=f"{CUDA}:{whole.gpus[rank]}", budget_bytes=budget)
    threads = whole.threads or len(os.sched_getaffinity(0))
    return replace(whole, budget_bytes=budget, threads=max(1, threads // ranks))
