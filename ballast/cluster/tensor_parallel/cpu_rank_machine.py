"""Provide memory, link and models of one tensor-parallel rank on the host's cores and memory.

Implements `RankMachine`; built by `rank_machine_choice`, in the first rank and in further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ballast.cluster.tensor_parallel.rank_machine import KvPlace, MeetingPlace
from ballast.core.clock import Clock
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


class CpuRankMachine(OnCpu):
    """Implements `RankMachine` with cores and memory of this host."""

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
        if isinstance(place, Path):
            self._exchange = GlooExchange(place, self._shard)
        else:
            capacity = self.vm.n_pages * self.vm.page_bytes
            self._exchange = SharedExchange(place, self._shard, capacity)

    def prepare_thread(self) -> None:
        """Nothing: no state of a CPU belongs to a thread."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
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
        assert self._exchange is not None
        memory = (segments, kv.base, kv.layout, workspace)
        most = (self._device.step_tokens, self._device.step_logits)
        return ParallelModel(host, *memory, *most, exchange=self._exchange, followers=followers)

    def layer_stream(
        self, model: str, copies: Sequence[Copy], clock: Clock, on_settled: Callable[[], None]
    ) -> HostStream:
        made = HostStream(model, self.link, clock, on_settled)
        made.add_weights(copies)
        return made

    def synchronized(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
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
