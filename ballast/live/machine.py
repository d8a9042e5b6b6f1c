"""Define the protocol of a machine: provides a live device's memory, link, executors and runner.

Used by `LiveDevice`. Implemented by `CpuMachine`, `CudaMachine` and, for tensor-parallel groups,
`GroupMachine`; all that differs between these devices is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.report import GraphReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.engine.layer_stream import MakeStream
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.live.cuda_reads import HostKernels
from ballast.live.runner import Executor, Keeper, LaneRunner, Record
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.transfer import HostLink, Link
from ballast.memory.vm import Vm
from ballast.models.executor import ModelExecutor
from ballast.weights.checkpoint import THREADS
from ballast.weights.host import HostModel, HostTier


class Cap(Keeper, Protocol):
    """Cap on memory that jobs allocate beside pages; methods as of
    `ballast.memory.arena.AllocatorCap`."""

    @property
    def n_bytes(self) -> int: ...

    def exempt(self, n_bytes: int) -> None: ...

    def pause(self) -> None: ...

    def renew(self, n_bytes: int, forget: Callable[[], None]) -> None: ...


class Machine(Protocol):
    """Memory, link and models of one device. Must be closed after its vm and link."""

    @property
    def device(self) -> DeviceSettings:
        """Settings of the device, as the loop uses them."""

    @property
    def vm(self) -> Vm: ...

    @property
    def link(self) -> Link: ...

    @property
    def peer_link(self) -> HostLink | None:
        """Link over which passes read KV on borrowed pages, in place; None: it has no pace."""

    @property
    def host_kernels(self) -> HostKernels | None:
        """Kernels that read weights in host memory at addresses of its own; None: passes find them
        at the model's addresses, or not at all."""

    @property
    def copies_beside_jobs(self) -> bool:
        """Whether a model's first job begins while its last layers are still copied."""

    @property
    def graphs(self) -> GraphReport | None:
        """Report of CUDA graphs; None: the machine has none. Read by any thread."""

    @property
    def reach(self) -> GpuReach | None:
        """A GPU's id and the GPUs whose memory it can use; None for a CPU."""

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """Load a model into the host tier, and measure its jobs where possible. Raises as
        `load_host_model`."""

    def unload(self, host: HostModel) -> None:
        """Unload a model from the host tier. No copy from it may be in flight."""

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        """Copy bytes within the device; done when it returns."""

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        """Make a model's executor for each lane, each with one of `workspaces`.

        `segments`: addresses of its weights. A model runs on one lane at a time, so that its
        executors share all that is not bound to a lane."""

    def cap(self, n_bytes: int) -> Cap:
        """Make the cap on memory that jobs allocate; called once, after the models are made."""

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner: ...

    def make_stream(self, clock: Clock, post: Callable[[Event], None]) -> MakeStream | None:
        """Return what makes streams of models' layers; None: no layer can stream here."""

    def allow(self, n_bytes: int) -> None:
        """Set the bytes that activations may take, from now on; called between jobs."""

    def when_lost(self, call: WhenLost) -> None:
        """Set a callback for the loss of the device, after which the process must be replaced.

        Called once, by any thread."""

    def close(self) -> None: ...


MakeMachine = Callable[[FleetSettings, Clock, Callable[[Event], None]], Machine]
