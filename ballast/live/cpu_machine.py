"""Provide a live CPU device's memory (memfd), link (copying threads), executors and runner.

Implements `Machine`; made by the worker's choice of machine and used by `LiveDevice`.
`cuda_machine` is its counterpart on GPUs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.errors import ConfigError
from ballast.core.event import Event, FirstJobReadyEvent, RotationSettledEvent
from ballast.core.link import Direction, LinkSettings
from ballast.core.model import ModelSpec, plain_kv
from ballast.core.report import GraphReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.engine.layer_stream import MakeStream
from ballast.kernels.stream_copy import stream_copier
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.kv.layout import fitted
from ballast.live.host_stream import HostStream
from ballast.live.machine import Cap
from ballast.live.runner import CpuRunner, Executor, LaneRunner, Record
from ballast.memory import syscalls
from ballast.memory.arena import AllocatorCap
from ballast.memory.copies import Copy, copy_now
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.shared_pace import SharedPace
from ballast.memory.transfer import HostLink
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.divergence import kv_divergence
from ballast.models.executor import ModelExecutor
from ballast.models.on_cpu import on_cpu, report_dependence
from ballast.models.profile_run import measured
from ballast.policy.presets import preset_of
from ballast.weights.checkpoint import THREADS, load_host_model
from ballast.weights.host import HostModel, HostTier

log = logging.getLogger(__name__)


class OnCpu:
    """Base of all CPU machines: plain memory, the C allocator's cap, intra-op threads for lanes."""

    graphs: GraphReport | None = None
    reach: GpuReach | None = None
    peer_link: HostLink | None = None
    host_kernels = None

    @property
    def copies_beside_jobs(self) -> bool:
        return False

    def unload(self, host: HostModel) -> None:
        host.close()

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        copy_now(dst, src, n_bytes)

    def when_lost(self, call: WhenLost) -> None:
        """Do nothing: a CPU device is lost only with its process."""

    def cap(self, n_bytes: int) -> Cap:
        return AllocatorCap(n_bytes)

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner:
        return CpuRunner(executors, post, clock, device.threads, device.lanes, cap, record)


def origin_of(clock: Clock) -> float:
    """Return when a process's clock showed 0, on the clock that all processes of the host have."""
    return time.monotonic() - clock.now()


def peer_link_of(
    settings: LinkSettings, clock: Clock, post: Callable[[Event], None]
) -> HostLink | None:
    """Return the link between devices, if it has a pace: shared by all processes of the host, it
    carries what passes read and write in lent memory, and copies nothing."""
    pace = settings.peer_pace
    if pace is None:
        return None
    memory = settings.peer_memory
    shared = SharedPace(memory, origin=origin_of(clock)) if memory else None
    return HostLink(clock, post, pace, shared=shared)


class CpuMachine(OnCpu):
    """Implements `Machine` in this process alone, without further ranks."""

    def __init__(self, fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> None:
        self.device = device = fleet.of_one_device("this command")
        if device.tensor_parallel > 1:
            allowed = "this command takes devices of one rank"
            raise ConfigError("tensor_parallel", device.tensor_parallel, allowed)
        self.vm = MemfdVm(device.page_bytes, device.budget_bytes // device.page_bytes)
        preset = preset_of(fleet)
        # Tiers and staging move blocks that have all layers.
        self._whole_blocks = preset.requires.kv_staging or bool(fleet.kv.host_bytes)
        reserves = bool(preset.values.get("reserve_link"))
        memory = fleet.link.memory
        shared = SharedPace(memory, reserves, origin_of(clock)) if memory else None
        self.link = HostLink(
            clock, post, fleet.link.pace, copy_bytes=stream_copier(), shared=shared
        )
        self.peer_link = peer_link_of(fleet.link, clock, post)

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        super().copy(dst, src, n_bytes)
        borrowed, window = self.vm.window.address(self.vm.n_pages), self.vm.window
        if self.peer_link is not None and borrowed <= max(dst, src) < window.end:
            way = Direction.TO_DEVICE if src >= borrowed else Direction.TO_HOST
            carried = (Copy(0, 0, n_bytes),)
            peers = self.peer_link
            peers.start(0, carried, "moves", way, on_done=lambda done: None, in_place=True)

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        host = load_host_model(settings, tier, threads)
        spec = plain_kv(host.spec) if self._whole_blocks else host.spec
        spec = fitted(spec, settings.block_tokens, self.device.page_bytes)
        if spec.pooling:  # a text is computed in one job
            most = min(spec.max_model_len, self.device.step_tokens)
            spec = replace(spec, max_model_len=most)
        host.spec = spec
        host = measured(host, on_cpu, self.device)
        try:
            divergence = kv_divergence(host, on_cpu, self.device)
        except BaseException:
            host.close()
            raise
        if divergence is not None:
            log.warning("%s: KV in %s: %s", spec.name, spec.kv_dtype, divergence)
        return host

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        # The fast path alone computes in its lane's workspace.
        several = workspaces if host.fused else workspaces[:1]
        report_dependence(host, self.device)
        made = [on_cpu(host, segments, kv.base, kv.layout, w, self.device) for w in several]
        return tuple(made) if host.fused else tuple(made * len(workspaces))

    @property
    def copies_beside_jobs(self) -> bool:
        """Whether a job keeps its CPUs while weights are copied, so that it may as well begin
        before all of them are there: the link mostly waits, or CPUs are left for it. Where both
        share CPUs and the memory's bandwidth, overlapping them brings no token sooner."""
        threads = self.device.threads or torch.get_num_threads()
        return self.link.paced or threads + self.link.threads <= syscalls.usable_cpus()

    def make_stream(self, clock: Clock, post: Callable[[Event], None]) -> MakeStream | None:
        def opened(transfer_id: int) -> None:
            post(FirstJobReadyEvent(transfer_id))

        tell = opened if self.copies_beside_jobs else None

        def make(spec: ModelSpec) -> HostStream:
            settled = RotationSettledEvent(spec.name)
            return HostStream(spec.name, self.link, clock, lambda: post(settled), tell)

        return make

    def allow(self, n_bytes: int) -> None:
        """Do nothing: this process's cap is the device's own."""

    def close(self) -> None:
        """Stop the link between devices."""
        if self.peer_link is not None:
            self.peer_link.close()
