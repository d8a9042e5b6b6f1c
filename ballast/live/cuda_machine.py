"""Provide a live GPU's memory (CUDA VMM), link (copy streams), executors and runner (lanes).

Implements `Machine`; made by the worker's choice of machine and used by `LiveDevice`. `cpu_machine`
is its counterpart on CPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ballast.core.clock import Clock
from ballast.core.errors import ConfigError, DeviceError, DeviceLost, UnsupportedModel
from ballast.core.event import Event, RotationSettledEvent
from ballast.core.model import ModelSpec, uniform_kv
from ballast.core.report import GraphReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB, format_bytes
from ballast.engine.layer_stream import MakeStream
from ballast.kernels.gpu.batch import Scratch
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.kv.layout import fitted
from ballast.live.cuda_reads import HostKernels
from ballast.live.cuda_runner import AllocatorOnDevice, CudaRunner, GpuCompute, TorchOnGpu
from ballast.live.cuda_streams import lane_streams
from ballast.live.event_stream import EventStream
from ballast.live.machine import Cap
from ballast.live.runner import Executor, LaneRunner, Record
from ballast.memory.cuda.bandwidth import measure_bandwidth
from ballast.memory.cuda.calls import Attribute, Driver, WhenLost
from ballast.memory.cuda.devices import reach_of
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.link import CudaLink
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.vm import CudaVm
from ballast.models.executor import ModelExecutor
from ballast.models.gpu.executor import GpuExecutor, GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from ballast.models.gpu.graphs import GraphCache
from ballast.policy.c2cserve_knob import KnobSetting
from ballast.policy.presets import Preset, preset_of
from ballast.weights.checkpoint import THREADS, load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.segment import whole_pages

log = logging.getLogger(__name__)

MEASURED_BYTES = 64 * MiB
"""Bytes of each copy by which rates are measured as a device is opened that reads host memory."""
NOT_LOCKED = (
    "its weights cannot be page-locked and mapped into the GPU, so that no pass can read them"
)


class CudaMachine:
    """Implements `Machine`: this process, and one GPU or MIG slice."""

    def __init__(
        self,
        fleet: FleetSettings,
        clock: Clock,
        post: Callable[[Event], None],
        driver: Driver | None = None,
        compute: GpuCompute | None = None,
    ) -> None:
        """`driver` and `compute` stand in for the real ones.

        Raises ConfigError where there is no such GPU, or it cannot have such pages.
        """
        self.device = device = fleet.of_one_device("this command")
        ordinal = device.gpu
        if ordinal is None:
            raise ConfigError("devices", device.name, "a GPU is called cuda: and its number")
        self._driver = driver = driver or driver_of(device.name)
        if ordinal >= (n := driver.count()):
            allowed = f"CUDA shows {n} device(s) to this process, counted from cuda:0"
            raise ConfigError("devices", device.name, allowed)
        number = driver.device(ordinal)
        least = driver.granularity(number)
        if device.page_bytes % least:
            allowed = f"a multiple of {format_bytes(least)}, what its driver maps at once"
            raise ConfigError(f"page of {device.name}", format_bytes(device.page_bytes), allowed)
        self._compute = compute or TorchOnGpu(ordinal)
        self._allocator: AllocatorOnDevice | None = None
        self.reach = reach_of(driver, ordinal)
        self.peer_link = None
        self._number, self._context = number, driver.retain_context(number)
        driver.set_current(self._context)
        preset = preset_of(fleet)
        self._reads_host = preset.requires.in_place
        reads = self._reads_host or bool(preset.values.get("in_place"))
        self.host_kernels = self._kernels_on_host(preset, ordinal) if reads else None
        n_pages = device.budget_bytes // device.page_bytes
        self.vm = CudaVm(driver, ordinal, device.page_bytes, n_pages)
        self.vm.maps_host = reads
        self.link = CudaLink(driver, ordinal, clock, post)
        self.pins = PinnedMemory(driver, ordinal)
        self._pinned: Counter[int] = Counter()
        """Number of this device's models that use a host segment, by its address."""
        self._copies = driver.new_stream()
        self._streams = lane_streams(driver, number, device.lanes)
        for stream in self._streams.all:
            self.vm.watch(stream)
        self._common = Scratch(self._compute.device) if device.lanes == 1 else None
        """Each model has its own where jobs of several run at the same time."""
        self._executors: dict[str, list[GpuExecutor]] = {}
        """Executors by model."""
        self._layer_streams: dict[str, EventStream] = {}
        """What streams layers, by model."""
        self._graphs: GraphCache | None = None
        if n_bytes := device.graph_bytes:
            self._graphs = GraphCache(
                n_bytes, lambda stream: self._compute.recorder(self._streams.twin(stream))
            )

    def _kernels_on_host(self, preset: Preset, ordinal: int) -> HostKernels:
        """Return how passes read weights in host memory, by rates that are measured now."""
        bandwidth = None
        try:
            bandwidth = measure_bandwidth(self._driver, ordinal, MEASURED_BYTES)
        except DeviceLost:
            raise
        except DeviceError as error:
            log.warning("`os_share` stays as it is: rates cannot be measured: %s", error)
        count = self._driver.attribute(self._number, Attribute.MULTIPROCESSORS)
        knob = KnobSetting.of(preset.values)
        return HostKernels(self._driver, self._compute.current, count, knob, bandwidth)

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """Load with unpacked matrices, and page-lock them. Raises ConfigError for CPU-only
        options, and UnsupportedModel where passes are to read host memory that is not locked."""
        if settings.linear == "packed":
            allowed = f"{self.device.name} is a GPU: that is of CPUs"
            raise ConfigError(f"{settings.name}: linear", settings.linear, allowed)
        tier.make_writable(not self.pins.reads_only)
        host = self._read(replace(settings, linear="plain"), tier, threads)
        if host.spec.states or host.spec.pooling:
            host.close()
            what = "encoders run" if host.spec.pooling else "recurrent states are kept"
            raise UnsupportedModel(f"{settings.name}: {what} on CPUs alone")
        spec = host.spec
        if any(not kv.latent and spec.kv_heads % kv.heads for kv in spec.layer_kv):
            host.close()
            raise UnsupportedModel(f"{settings.name}: its layers' heads differ; CPUs serve it")
        # GPUs keep the keys and values of all heads, in one size.
        host.spec = uniform_kv(spec)
        host.spec = fitted(host.spec, settings.block_tokens, self.device.page_bytes)
        segments = (*host.segments, *(a.segment for a in host.adapters))
        for segment, address in zip(segments, host.addresses, strict=True):
            if not self._pinned[address]:
                self.pins.pin(address, whole_pages(segment))
            self._pinned[address] += 1
        if self.vm.maps_host and self._pointers(host) is None:
            if self._reads_host:
                self.unload(host)
                raise UnsupportedModel(f"{settings.name}: {NOT_LOCKED}")
            self.vm.maps_host = False
        return host

    def _pointers(self, host: HostModel) -> list[int] | None:
        """Return where kernels find each segment in host memory; None: they do not."""
        found = [self.pins.device_address(address) for address in host.addresses]
        return None if None in found else [at for at in found if at is not None]

    def _read(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        return load_host_model(settings, tier, threads)

    @property
    def copies_beside_jobs(self) -> bool:
        """False: layers do not follow the link (`EventStream.start_load`)."""
        return False

    @property
    def graphs(self) -> GraphReport | None:
        return None if self._graphs is None else self._graphs.report()

    def unload(self, host: HostModel) -> None:
        if self._graphs is not None:
            self._driver.set_current(self._context)
            self._graphs.forget(host.spec.name)
        self._close_executors(host.spec.name)
        if (stream := self._layer_streams.pop(host.spec.name, None)) is not None:
            stream.close()
        for address in host.addresses:
            if self._pinned[address] == 1:
                self.pins.unpin(address)
            if self._pinned[address]:
                self._pinned[address] -= 1
        host.close()

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        self._driver.set_current(self._context)
        self._driver.copy_within(dst, src, n_bytes, self._copies)
        self._driver.finish(self._copies)

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        """Make executors. Only the number of `workspaces` is used: jobs use PyTorch's allocator."""
        compute = self._compute
        where = (segments, kv.base, kv.layout, kv.addresses.n_bytes, compute.device)
        kind = GpuFusedModel if host.fused else GpuTransformersModel
        _report_dependence(host, self.device)
        shared = (compute.attention, self._graphs, self._common)
        pointers = self._pointers(host) if self.vm.maps_host else None
        made = kind(
            host, *where, *shared, invariant=self.device.is_invariant, host_pointers=pointers
        )
        self.keep(made)
        return (made,) * len(workspaces)

    def keep(self, executor: GpuExecutor) -> None:
        """Close an executor with its model, or with the machine, before streams are destroyed."""
        self._executors.setdefault(executor.spec.name, []).append(executor)

    def _close_executors(self, model: str) -> None:
        for executor in self._executors.pop(model, ()):
            executor.close()

    def cap(self, n_bytes: int) -> Cap:
        """Graphs keep what they compute in memory of the same allocator."""
        more = self.device.graph_bytes
        self._allocator = self._compute.allocator(n_bytes + more)
        return DeviceCap(self._allocator, more)

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner:
        return CudaRunner(
            executors,
            post,
            clock,
            self._driver,
            self._context,
            self._compute,
            self._streams,
            device.lanes,
            cap,
            record,
            self._graphs,
            rest=self._rest,
        )

    def _rest(self) -> None:
        for stream in self._layer_streams.values():
            stream.rest()

    def make_stream(self, clock: Clock, post: Callable[[Event], None]) -> MakeStream | None:
        def make(spec: ModelSpec) -> EventStream:
            settled, lane = RotationSettledEvent(spec.name), self._compute.current
            known = (self._driver, self._context, lane, lambda: post(settled))
            made = EventStream(*known, self.pins)
            self._layer_streams[spec.name] = made
            return made

        return make

    def allow(self, n_bytes: int) -> None:
        """The cap of this process is the device's own."""

    def when_lost(self, call: WhenLost) -> None:
        self._driver.when_lost(call)

    def close(self) -> None:
        self._driver.set_current(self._context)
        if self._graphs is not None:
            self._graphs.close()
        for model in list(self._executors):
            self._close_executors(model)
        self._compute.release_pinned()
        for stream in self._layer_streams.values():
            stream.close()
        if self._allocator is not None:
            self._allocator.close()
        self.pins.close()
        self._streams.close()
        self._driver.destroy_stream(self._copies)
        self._driver.release_context(self._number)


class DeviceCap:
    """Implements `Cap` for the memory of a GPU; what jobs allocate on the host is no part of it."""

    def __init__(self, allocator: AllocatorOnDevice, more: int = 0) -> None:
        """`more`: bytes that the allocator may have for something else than jobs."""
        self._allocator, self._more = allocator, more
        self._next: int | None = None
        """Cap in bytes to be set at the next moment without a job; None: no change."""

    @property
    def n_bytes(self) -> int:
        return self._allocator.n_bytes - self._more

    @property
    def renewing(self) -> bool:
        return self._next is not None

    def check(self, *, alone: bool = True) -> bool:
        """Free cached memory if the cap is exceeded; return whether the cap holds now."""
        if self._next is not None and alone:
            n_bytes, self._next = self._next, None
            return self._allocator.resize(n_bytes + self._more)
        return self._allocator.check()

    def exempt(self, n_bytes: int) -> None:
        """Do nothing: memory allocated beside jobs is host memory."""

    def pause(self) -> None:
        """Do nothing: memory loaded beside jobs is host memory."""

    def renew(self, n_bytes: int, forget: Callable[[], None]) -> None:
        forget()
        self._next = n_bytes


def driver_of(name: str) -> CudaDriver:
    """Return the driver for the device of that name. Raises ConfigError if there is none."""
    try:
        return CudaDriver()
    except DeviceError as error:
        allowed = f"this machine has no GPU that CUDA can use: {error}"
        raise ConfigError("devices", name, allowed) from error


def _report_dependence(host: HostModel, device: DeviceSettings) -> None:
    """Log why a model's texts can depend on what else is served, if they can."""
    name, dtype = host.spec.name, host.spec.dtype
    if dtype == "float32":
        return
    if not device.is_invariant:
        cure = "`invariant: 1` of the device prevents it, and costs more than a tenth"
        log.info("%s: in %s a text can depend on what else is served; %s", name, dtype, cure)
    elif not host.fused or host.adapters:
        why = "adapters multiply" if host.fused else "its generic path multiplies"
        log.warning(
            "%s: `invariant` is not kept: %s in an order that depends on other rows", name, why
        )
