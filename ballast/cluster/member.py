"""What one rank of a tensor-parallel group has of its own, on whichever kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ballast.core.capability import CUDA
from ballast.core.clock import Clock
from ballast.core.errors import ConfigError
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, KvLayout, ModelSettings
from ballast.kernels.stream_copy import stream_copier
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.live.cpu_machine import OnCpu
from ballast.live.machine import Cap
from ballast.live.runner import Executor, LaneRunner, Record
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.transfer import HostLink, Link
from ballast.memory.vm import Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.gpu.parallel import GpuParallelModel
from ballast.models.parallel.exchanges import GlooExchange, SharedExchange
from ballast.models.parallel.model import (
    Followers,
    NoExchange,
    ParallelModel,
    RankExchange,
    check_parallel,
)
from ballast.models.profile_run import measured
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.link_rotor import LinkRotor
from ballast.weights.sharding import Shard

Meeting = Path | int
"""Where ranks meet: at a file, not there yet, or in the memory behind a descriptor."""


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a model's KV cache is: addresses, backed by pages or not."""

    base: int
    n_bytes: int
    layout: Layout


class Member(Protocol):
    """Memory, link and models of one rank. What is not said here is as in `Machine`."""

    @property
    def vm(self) -> Vm: ...

    @property
    def link(self) -> Link: ...

    def meet(self, meeting: Meeting) -> None:
        """Once, before models are made: returns when all ranks have come."""

    def enter(self) -> None:
        """By each thread that is to use it."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        """The rank's part of a model."""

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
        """What runs the rank's part of a model; the first rank tells its `followers`."""

    def rotor(
        self, model: str, copies: Sequence[Copy], clock: Clock, settled: Callable[[], None]
    ) -> LinkRotor | None:
        """What brings the rank's parts of layers that rotate; None: none can."""

    def alongside(self) -> AbstractContextManager[object]:
        """Around a follower's part of a job: when it is left, all of that has ended."""

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
        """Nothing of it is used any more, nor are there other ranks."""


MakeMember = Callable[
    [DeviceSettings, Shard, LinkRates | None, Clock, Callable[[Event], None]], Member
]
"""Of `of_rank`, the shard, the link's pace, the clock; and who is told of transfers that end."""


def of_rank(whole: DeviceSettings, rank: int = 0) -> DeviceSettings:
    """One rank's equal part of what the device has; a GPU's are it and those that are counted after
    it. Raises ConfigError."""
    ranks = whole.tensor_parallel
    if whole.lanes > 1:
        allowed = "one lane: ranks meet in the order of jobs, of which there is one at a time"
        raise ConfigError(f"lanes of {whole.name}", whole.lanes, allowed)
    if whole.kv_layout is not KvLayout.BLOCK_MAJOR:
        allowed = f"a device with `tensor_parallel` has it {KvLayout.BLOCK_MAJOR} so far"
        raise ConfigError(f"kv_layout of {whole.name}", whole.kv_layout, allowed)
    budget = whole.budget_bytes // ranks
    if budget < whole.page_bytes:
        raise ConfigError(f"the budget of {whole.name}", whole.budget_bytes, "a page each")
    if whole.gpu is not None:
        return replace(whole, name=f"{CUDA}:{whole.gpus[rank]}", budget_bytes=budget)
    threads = whole.threads or len(os.sched_getaffinity(0))
    return replace(whole, budget_bytes=budget, threads=max(1, threads // ranks))


def _without_others(
    host: HostModel,
    segments: Sequence[int],
    kv_base: int,
    layout: Layout,
    workspace: Workspace,
    device: DeviceSettings,
) -> ParallelModel:
    """The first rank's part of a model, alone, for a profile run."""
    most = (device.step_tokens, device.step_logits)
    return ParallelModel(host, segments, kv_base, layout, workspace, *most, exchange=NoExchange())


class CpuMember(OnCpu):
    """Implements `Member`: cores and memory of this host."""

    def __init__(
        self,
        device: DeviceSettings,
        shard: Shard,
        pace: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
    ) -> None:
        self._device, self._shard = device, shard
        self.vm = MemfdVm(device.page_bytes, device.budget_bytes // device.page_bytes)
        self.link = HostLink(clock, post, pace, copy_bytes=stream_copier())
        self._exchange: RankExchange | None = None

    def meet(self, meeting: Meeting) -> None:
        if isinstance(meeting, Path):
            self._exchange = GlooExchange(meeting, self._shard)
        else:
            capacity = self.vm.n_pages * self.vm.page_bytes
            self._exchange = SharedExchange(meeting, self._shard, capacity)

    def enter(self) -> None:
        """Nothing belongs to a thread."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        check_parallel(settings, self._shard.ranks)
        host = load_host_model(settings, tier, threads, self._shard)
        if self._shard.rank:
            return host  # the first rank, which has the logits besides, needs most
        return measured(host, _without_others, self._device)

    def model(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvPlace,
        workspace: Workspace,
        followers: Followers | None = None,
    ) -> ParallelModel:
        assert self._exchange is not None
        where = (segments, kv.base, kv.layout, workspace)
        most = (self._device.step_tokens, self._device.step_logits)
        return ParallelModel(host, *where, *most, exchange=self._exchange, followers=followers)

    def rotor(
        self, model: str, copies: Sequence[Copy], clock: Clock, settled: Callable[[], None]
    ) -> LinkRotor:
        return LinkRotor(model, copies, self.link, clock, settled)

    def alongside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
