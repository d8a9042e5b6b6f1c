"""The protocol of a machine: what gives a live device its memory, its link and its executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.report import GraphReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.kv.swapper import MakeSwapper
from ballast.live.runner import Executor, Keeper, LaneRunner, Record
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.models.executor import ModelExecutor
from ballast.weights.checkpoint import THREADS
from ballast.weights.host import HostModel, HostTier
from ballast.weights.rotor import MakeRotor


class Cap(Keeper, Protocol):
    """On what jobs allocate beside pages; `ballast.memory.arena.AllocatorCap` says of each."""

    @property
    def n_bytes(self) -> int: ...

    def exempt(self, n_bytes: int) -> None: ...

    def pause(self) -> None: ...

    def renew(self, n_bytes: int, forget: Callable[[], None]) -> None: ...


class Machine(Protocol):
    """Memory, link and models of one device. `close` comes last, after that of vm and link."""

    @property
    def device(self) -> DeviceSettings:
        """As the loop is to know it."""

    @property
    def vm(self) -> Vm: ...

    @property
    def link(self) -> Link: ...

    @property
    def copies_beside_jobs(self) -> bool:
        """Whether a model's first job begins while its last layers are still copied."""

    @property
    def graphs(self) -> GraphReport | None:
        """CUDA graphs, now; None: it has none. From any thread."""

    @property
    def reach(self) -> GpuReach | None:
        """Of a GPU."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """A model in the host tier, its jobs measured where that is possible; raises as
        `load_host_model`."""

    def unload(self, host: HostModel) -> None:
        """Give it back. No copy from it may be on its way."""

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        """From one place of the device to another; has ended when it returns."""

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        """What runs a model on each lane, which has one of `workspaces`; `segments`: where its
        weights are. It runs on one lane at a time, so what is not bound to one is there once."""

    def cap(self, n_bytes: int) -> Cap:
        """On what jobs allocate; made once, after the models."""

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner: ...

    def make_rotor(self, clock: Clock, post: Callable[[Event], None]) -> MakeRotor | None:
        """For layers that rotate; None: none can."""

    def make_swapper(self, clock: Clock, dirty: bool) -> MakeSwapper | None:
        """For KV that is swapped layer by layer, `dirty` as `LinkSwapper` says; None: none can."""

    def allow(self, n_bytes: int) -> None:
        """What activations may take between jobs, from now on."""

    def when_lost(self, call: WhenLost) -> None:
        """Have `call` called once, by any thread, if the device cannot be used any more and the
        process has to be replaced."""

    def close(self) -> None: ...


MakeMachine = Callable[[FleetSettings, Clock, Callable[[Event], None]], Machine]
