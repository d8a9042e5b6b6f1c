"""Provide memory, link and models of one tensor-parallel rank on the host's cores and memory.

Used by `GroupMachine` (first rank) and `RankServer` (further ranks). Also derives one rank's equal
share of a device's settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.core.clock import Clock
from ballast.core.errors import ConfigError
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.kernels.stream_copy import stream_copier
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout, fitted
from ballast.live.cpu_machine import OnCpu
from ballast.live.host_stream import HostStream
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.memory.vm_memfd import MemfdVm
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
from ballast.weights.sharding import Shard

MeetingPlace = Path | int
"""Rendezvous of the ranks: a file that does not exist yet, or the descriptor of shared memory."""


@dataclass(frozen=True, slots=True)
class KvPlace:
    """The addresses of a model's KV cache, whether backed by pages or not."""

    base: int
    n_bytes: int
    layout: Layout


class RankMachine(OnCpu):
    """Memory, link and models of one rank, on cores and memory of this host."""

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

    def meet(self, place: MeetingPlace) -> None:
        """Join the other ranks, once, before models are built; returns when all have joined."""
        if isinstance(place, Path):
            self._exchange = GlooExchange(place, self._shard)
        else:
            capacity = self.vm.n_pages * self.vm.page_bytes
            self._exchange = SharedExchange(place, self._shard, capacity)

    def load(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        """Load the rank's part of a model into the host tier."""
        check_parallel(settings, self._shard.ranks)
        host = load_host_model(settings, tier, threads, self._shard)
        host.spec = fitted(host.spec, settings.block_tokens, self._device.page_bytes)
        if self._shard.rank:
            return host  # only the first is measured: it needs most, as it has the logits besides
        return measured(host, _build_alone, self._device)

    def model(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvPlace,
        workspace: Workspace,
        followers: Followers | None = None,
    ) -> ParallelModel:
        """Build the executor of the rank's part of a model. `followers`: the further ranks, on
        which the first rank starts each of its jobs."""
        assert self._exchange is not None
        memory = (segments, kv.base, kv.layout, workspace)
        most = (self._device.step_tokens, self._device.step_logits)
        return ParallelModel(host, *memory, *most, exchange=self._exchange, followers=followers)

    def layer_stream(
        self, model: str, copies: Sequence[Copy], clock: Clock, on_settled: Callable[[], None]
    ) -> HostStream:
        """Build what loads the rank's parts of layers."""
        made = HostStream(model, self.link, clock, on_settled)
        made.add_weights(copies)
        return made

    def close(self) -> None:
        """Free everything; the other ranks have ended, and nothing of this one is in use."""
        if self._exchange is not None:
            self._exchange.close()


def _build_alone(
    host: HostModel,
    segments: Sequence[int],
    kv_base: int,
    layout: Layout,
    workspace: Workspace,
    device: DeviceSettings,
) -> ParallelModel:
    """Build the first rank's part of a model without the other ranks, for a profile run."""
    most = (device.step_tokens, device.step_logits)
    return ParallelModel(host, segments, kv_base, layout, workspace, *most, exchange=NoExchange())


def settings_of_rank(whole: DeviceSettings) -> DeviceSettings:
    """Return one rank's equal share of a device's settings. Raises ConfigError where the device
    cannot be a group."""
    ranks = whole.tensor_parallel
    if whole.lanes > 1:
        allowed = "one lane: ranks meet in the order of jobs, of which there is one at a time"
        raise ConfigError(f"lanes of {whole.name}", whole.lanes, allowed)
    budget = whole.budget_bytes // ranks
    if budget < whole.page_bytes:
        raise ConfigError(f"the budget of {whole.name}", whole.budget_bytes, "a page each")
    threads = whole.threads or len(os.sched_getaffinity(0))
    return replace(whole, budget_bytes=budget, threads=max(1, threads // ranks))
