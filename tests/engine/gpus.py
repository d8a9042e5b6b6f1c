"""A GPU for the live engine that is none: the driver's stand-in, and tensors of host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ballast.bench import inprocess
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.settings import FleetSettings
from ballast.kernels.plain.attention import PlainAttention
from ballast.live.cuda_machine import CudaMachine
from ballast.live.cuda_runner import AllocatorOnDevice
from ballast.live.machine import MakeMachine
from tests.memory.fake_cuda import FakeDriver
from tests.models.fake_graphs import FakeRecorder, Recorders


class Allocator:
    """Counts nothing; remembers what it was told."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.checks = 0

    def resize(self, n_bytes: int) -> bool:
        self.n_bytes = n_bytes
        return self.check()

    def check(self) -> bool:
        self.checks += 1
        return True

    def close(self) -> None:
        """Nothing is capped."""


class OnHost:
    """Implements `GpuCompute`: launches end at once, on the CPU."""

    device = torch.device("cpu")

    def __init__(
        self,
        attention: type[PlainAttention] = PlainAttention,
        recorders: Recorders | None = None,
    ) -> None:
        self.attention = attention
        self.recorders = recorders or Recorders()
        self._here = threading.local()
        self.streams: list[int] = []
        """That work went to, in order."""

    def on(self, stream: int) -> AbstractContextManager[object]:
        self.streams.append(stream)
        self._here.stream = stream
        return nullcontext()

    def current(self) -> int:
        return int(self._here.stream)

    def allocator(self, n_bytes: int) -> AllocatorOnDevice:
        return Allocator(n_bytes)

    def release_pinned(self) -> None:
        """Nothing is pinned."""

    def recorder(self, stream: int) -> FakeRecorder:
        return self.recorders(stream)


class AtOnce(FakeDriver):
    """Streams do what they wait for when they are told to: as `OnHost` computes, which no stream
    of this driver sees."""

    def wait_for(self, stream: int, event: int) -> None:
        super().wait_for(stream, event)
        self.run(stream)


def serving(
    fleet: FleetSettings, driver: FakeDriver, compute: OnHost | None = None
) -> inprocess.InProcess:
    """The fleet's device in this process, as a GPU."""
    made = machine_over(driver, compute or OnHost())
    return inprocess.InProcess(fleet, make_machine=made)


def machine_over(driver: FakeDriver, compute: OnHost) -> MakeMachine:
    def make(fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> CudaMachine:
        return CudaMachine(fleet, clock, post, driver, compute)

    return make


def on_gpu(fleet: FleetSettings, lanes: int = 1, graphs: int = 0) -> FleetSettings:
    """`graphs`: bytes for them."""
    device = replace(fleet.device, name="cuda:0", threads=None, lanes=lanes, graphs=graphs)
    return replace(fleet, device=device)


def beside(fleet: FleetSettings, pages: int) -> FleetSettings:
    """`fleet`, of a GPU, with so many pages beside those for activations and graphs."""
    device = fleet.device
    roomy = replace(device, name="cuda:0", budget_bytes=1 << 30)
    asked = replace(fleet, device=roomy, story_path=None)
    with serving(asked, FakeDriver(n_bytes=2 << 30)) as server:
        pages += server.device.state.set_aside
    return replace(fleet, device=replace(device, budget_bytes=pages * device.page_bytes))
