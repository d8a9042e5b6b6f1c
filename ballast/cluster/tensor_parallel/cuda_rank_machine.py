"""Provide memory, link and models of one tensor-parallel rank on a GPU of its own.

Implements `RankMachine`; built by `rank_machine_choice`, in the first rank and in further ones.
Layers of such groups do not rotate yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ballast.cluster.tensor_parallel.rank_machine import KvPlace, MeetingPlace
from ballast.core.clock import Clock
from ballast.core.errors import BrokenPromise, ConfigError, DeviceError
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.kernels.workspace import Workspace
from ballast.live.cuda_machine import CudaMachine, driver_of
from ballast.live.cuda_runner import GpuCompute
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.devices import find_gpus
from ballast.memory.cuda.fences import EventPool
from ballast.models.gpu.parallel import GpuExchange, GpuParallelModel
from ballast.models.parallel.model import Followers
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard


class CudaRankMachine(CudaMachine):
    """Implements `RankMachine` with a GPU that no other rank uses."""

    def __init__(
        self,
        device: DeviceSettings,
        shard: Shard,
        pace: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
        driver: Driver | None = None,
        compute: GpuCompute | None = None,
        nvml: Any = None,
    ) -> None:
        """`driver`, `compute` and `nvml` stand in for the real ones; a GPU's link has no `pace`.

        Raises ConfigError as `CudaMachine`, also where there is no GPU for a later rank, and for a
        MIG slice.
        """
        driver = driver or driver_of(device.name)
        _check_devices(driver, device, shard, nvml)
        super().__init__(FleetSettings(models=(), device=device), clock, post, driver, compute)
        self._shard = shard
        self._exchange: GpuExchange | None = None
        self._events = EventPool(self._driver)

    def meet(self, place: MeetingPlace) -> None:
        """Raises ConfigError and DeviceError as `GpuCompute.exchange`."""
        if not isinstance(place, Path):
            raise BrokenPromise("GPUs do not meet in the host's memory")
        self.prepare_thread()
        self._exchange = self._compute.exchange(place, self._shard)

    def prepare_thread(self) -> None:
        """Make the GPU's context current on the calling thread."""
        self._driver.set_current(self._context)

    def model(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvPlace,
        workspace: Workspace,
        followers: Followers | None = None,
    ) -> GpuParallelModel:
        assert self._exchange is not None
        memory = (segments, kv.base, kv.layout, kv.n_bytes, self._compute.device)
        made = GpuParallelModel(
            host,
            *memory,
            self._compute.attention,
            self._graphs,
            self._common,
            exchange=self._exchange,
            followers=followers,
        )
        self.keep(made)
        return made

    def layer_stream(
        self, model: str, copies: Sequence[Copy], clock: Clock, on_settled: Callable[[], None]
    ) -> None:
        """Return None: layers of groups of GPUs do not rotate yet."""

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        (stream,) = self._streams.all
        try:
            with self._compute.on(stream):
                yield
        finally:
            event = self._events.acquire()
            self._driver.record(event, stream)
            self._driver.wait(event)
            self._events.release(event)

    def close(self) -> None:
        self.prepare_thread()
        if self._exchange is not None:
            self._exchange.close()
        self._events.close()
        super().close()

    def _read(self, settings: ModelSettings, tier: HostTier, threads: int) -> HostModel:
        return load_host_model(settings, tier, threads, self._shard)


def _check_devices(driver: Driver, device: DeviceSettings, shard: Shard, nvml: Any) -> None:
    """Raise ConfigError for a MIG slice, and where the rank's GPU is missing.

    CUDA shows a process one slice at most, so that without NVML a slice looks like a missing GPU.
    """
    n = driver.count()
    with suppress(DeviceError):
        for gpu in find_gpus(driver, nvml):
            if gpu.ordinal == device.gpu and gpu.slice_of is not None:
                allowed = f"{device.name} is a MIG slice, and NCCL joins whole GPUs: 1"
                raise ConfigError("tensor_parallel", shard.ranks, allowed)
    if device.gpus[-1] - shard.rank >= n:
        allowed = f"each rank has a GPU, and CUDA shows {n} to this process, counted from cuda:0"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)
