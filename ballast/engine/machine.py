"""What a live device is made of: its memory, its link, and what runs models there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.errors import ConfigError
from ballast.core.event import Event
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.memory.copies import copy_now
from ballast.memory.transfer import HostLink, Link
from ballast.memory.vm import Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.fused import FusedModel
from ballast.weights.checkpoint import THREADS, load_host_model
from ballast.weights.host import HostModel, HostTier


class Machine(Protocol):
    """Memory, link and models of one device. `close` comes last, after that of vm and link."""

    @property
    def device(self) -> DeviceSettings:
        """As the loop is to know it."""

    @property
    def vm(self) -> Vm: ...

    @property
    def link(self) -> Link: ...

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """A model in the host tier; raises as `load_host_model`."""

    def unload(self, host: HostModel) -> None:
        """Give it back. No copy from it may be on its way."""

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        """From one place of the device to another; has ended when it returns."""

    def fused(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: int,
        layout: Layout,
        workspace: Workspace,
    ) -> FusedModel:
        """What runs a model whose segments, and block 0 of its KV, are at these addresses."""

    def allow(self, n_bytes: int) -> None:
        """What activations may take between jobs, from now on."""

    def close(self) -> None: ...


MakeMachine = Callable[[FleetSettings, Clock, Callable[[Event], None]], Machine]


class CpuMachine:
    """This process, and no other."""

    def __init__(self, fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> None:
        self.device = device = fleet.of_one_device("this command")
        if device.tensor_parallel > 1:
            allowed = "this command takes devices of one rank"
            raise ConfigError("tensor_parallel", device.tensor_parallel, allowed)
        self.vm = MemfdVm(device.page_bytes, device.budget_bytes // device.page_bytes)
        self.link = HostLink(clock, post, fleet.link.pace)

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        return load_host_model(settings, tier, threads)

    def unload(self, host: HostModel) -> None:
        host.close()

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        copy_now(dst, src, n_bytes)

    def fused(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: int,
        layout: Layout,
        workspace: Workspace,
    ) -> FusedModel:
        rows, sampled = self.device.step_tokens, self.device.step_logits
        return FusedModel(host, segments, kv, layout, workspace, rows, sampled)

    def allow(self, n_bytes: int) -> None:
        """The cap of this process is the device's own."""

    def close(self) -> None:
        """Nothing is left."""
