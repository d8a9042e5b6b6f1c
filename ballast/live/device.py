"""A live device: memory, host tier, models and the loop, behind five methods."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ballast.core import migration
from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.cost import StepCosts
from ballast.core.entries import Sink, both
from ballast.core.errors import BallastError, ConfigError, DeviceError, brief
from ballast.core.event import Event, Output
from ballast.core.lease import Lease, LendingMessage, PagesLentEvent, PeerMetEvent
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.story import Story
from ballast.engine.build import Hosted, build_state, check_room
from ballast.engine.loop import Loop
from ballast.engine.migration import MakeKvBytes
from ballast.engine.model import ModelState
from ballast.engine.report import report
from ballast.engine.story_file import StoryFile
from ballast.isolation.calls import Isolation
from ballast.kernels.workspace import Workspace
from ballast.kv.event_swapper import EventSwapper
from ballast.kv.link_swapper import LinkSwapper
from ballast.kv.swapper import MakeSwapper
from ballast.live.command_executor import CommandExecutor
from ballast.live.cpu_machine import CpuMachine
from ballast.live.grammar_compiler import GrammarCompiler
from ballast.live.inbox import MonotonicClock, QueueInbox
from ballast.live.machine import MakeMachine
from ballast.live.never_run import WHERE as NEVER_RUN_WHERE
from ballast.live.never_run import never_run
from ballast.live.runner import Executor, Record
from ballast.live.swap_executor import KvSwapExecutor
from ballast.memory.arena import confine_allocator
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.reserve import PopulatedReserve
from ballast.memory.vm import Exported
from ballast.policy.presets import Preset, preset_of
from ballast.weights.checkpoint import THREADS, clipped_context
from ballast.weights.event_rotor import EventRotor
from ballast.weights.host import HostModel, HostTier, SegmentExchange
from ballast.weights.link_rotor import LinkRotor

log = logging.getLogger(__name__)


class LiveDevice:
    """Serves a fleet on a device of this machine.

    `outbox` gets outputs on the loop's thread and must not block. Checkpoints are loaded by the
    constructor; a model that cannot be read, sized or placed is listed in `failed`, with the
    reason, and does not stop the rest. `costs` are what policies may know of each model's speed;
    `sink` gets the story beside the file, if any; `record` is told which requests are in flight;
    `progress` is called for each part of the weights that was loaded; `exchange` knows those that
    other processes have; `isolation` is how checkpoints are examined, and is the caller's to close.
    `vet` raises BallastError for a model that shall not be loaded; `make_kv_bytes`: what reads the
    KV of requests that come from other devices, None: it is computed anew.
    """

    def __init__(
        self,
        fleet: FleetSettings,
        outbox: Callable[[list[Output]], None],
        *,
        costs: Mapping[str, StepCosts] | None = None,
        clock: Clock | None = None,
        sink: Sink | None = None,
        record: Record | None = None,
        progress: Callable[[], object] = lambda: None,
        exchange: SegmentExchange | None = None,
        isolation: Isolation | None = None,
        vet: Callable[[ModelSettings], object] = lambda settings: None,
        make_machine: MakeMachine = CpuMachine,
        make_kv_bytes: MakeKvBytes | None = None,
    ) -> None:
        confine_allocator()
        self.fleet = fleet
        self.failed: dict[str, str] = {}
        self.tier = HostTier(progress, exchange, isolation)
        self._progress, self._vet = progress, vet
        self._make_kv_bytes = make_kv_bytes
        self.clock = clock or MonotonicClock()
        self.inbox = QueueInbox(self.clock)
        self.hosts: dict[str, HostModel] = {}
        """By name, in the fleet's order; replaced, never changed."""
        with ExitStack() as closing:
            self._make(fleet, outbox, costs or {}, sink, record, make_machine, closing)
            self._closing = closing.pop_all()

    def _make(
        self,
        fleet: FleetSettings,
        outbox: Callable[[list[Output]], None],
        costs: Mapping[str, StepCosts],
        sink: Sink | None,
        record: Record | None,
        make_machine: MakeMachine,
        closing: ExitStack,
    ) -> None:
        """What has to be closed: all of it, should anything fail."""
        preset = preset_of(fleet)
        self.machine = make_machine(fleet, self.clock, self.post)
        closing.callback(self.machine.close)
        self.machine.when_lost(self.inbox.break_off)
        self.vm = self.machine.vm
        closing.callback(self._unload)
        closing.callback(self.vm.close)
        closing.callback(self.machine.link.close)
        if unproven := never_run(fleet, fleet.device):
            name, what = fleet.device.name, "; ".join(unproven)
            log.warning("%s uses what no GPU has ever run: %s (%s)", name, what, NEVER_RUN_WHERE)
        device = _with_parts(self.machine.device)
        self._load(device, layered=preset.requires.kv_swapping)
        self.state = build_state(
            device,
            [Hosted(h.spec, h.addresses) for h in self.hosts.values()],
            self.vm,
            self.machine.link,
            self.clock,
            self.machine.copy,
            costs,
            # Layers wait for one thing or the other.
            None if preset.requires.kv_swapping else self.machine.make_rotor(self.clock, self.post),
            self._make_swapper(preset),
            self._refuse,
        )
        self._reserve = PopulatedReserve(self.state.pool)
        self._reserve.start()
        closing.callback(self._reserve.close)
        self.workspaces = [Workspace(device.budget_bytes) for _ in range(device.lanes)]
        """Of the fast path. Memory comes where a job first writes, which the arena stands for."""
        self._compiling = GrammarCompiler(
            self.post, self.inbox.break_off, self.beside_jobs, lambda n: self.cap.exempt(n)
        )
        closing.callback(self._compiling.close)
        self.state.grammars = self._compiling
        self.executors: dict[str, tuple[Executor, ...]] = {}
        """By model, what runs it on each lane."""
        self._set_up()
        for name, why in self.failed.items():
            log.error("model %s is not served: %s", name, why)
        # Between jobs the C allocator keeps no more than the arena stands for.
        self.cap = self.machine.cap(self.state.arena.pages * device.page_bytes)
        self.machine.allow(self.cap.n_bytes)
        self.runner = self.machine.runner(
            self.executors, self.post, self.clock, device, self.cap, record
        )
        closing.callback(self.runner.close)
        self.runner.when_lost(self.inbox.break_off)
        self.state.activating = self.runner.activating
        if fleet.story_path:
            file = StoryFile(fleet.story_path, device.name, fleet.story_bytes, fleet.story_parts)
            closing.callback(file.close)
            sink = both(sink, file.write)
        self.story = Story(
            sink=sink,
            key=os.urandom(32),
            began=time.time() - self.clock.now(),
        )
        if self._make_kv_bytes is not None:
            self.state.migration.bytes = moves = self._make_kv_bytes(self.post)
            closing.callback(moves.close)
            self.state.migration.exports = self.export() is not None
        self._operator = CommandExecutor(self)
        closing.callback(self._operator.close)
        self.loop = Loop(
            self.state,
            preset,
            self.inbox,
            self.runner,
            self.clock,
            outbox,
            self.story,
            self._operator.answer,
        )

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The models that serve, by name."""
        return {name: m.spec for name, m in self.state.models.items()}

    def post(self, event: Event) -> None:
        """Hand an event in, from any thread."""
        self.inbox.post(event)

    @property
    def reach(self) -> GpuReach | None:
        """Of a GPU."""
        return self.machine.reach

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        """For other processes, so that they can map its pages, of a GPU just these; None: it lends
        none. From any thread, like what follows."""
        try:
            return self.vm.export(pages)
        except DeviceError:
            return None

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        """Pages of a lease of which none has come back; none: there is no such lease."""
        return self.state.lending.offered.get((borrower, epoch, lease), ())

    def open(self, exported: Exported) -> Exported:
        """Pages of another GPU, ready to be used; closes the descriptors. Raises DeviceError."""
        if not isinstance(self.vm, CudaVm):
            raise DeviceError("import", "this device is no GPU")
        return self.vm.open(exported)

    def take(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        """Pages of another GPU are lent to this one."""
        self.state.lending.opened[lease.lender, lease.epoch, lease.id] = opened
        self.post(PagesLentEvent(lease))

    def meet(self, peer: str, epoch: int, exported: Exported) -> None:
        """Another process's device may lend and borrow."""
        self.state.lending.exports[peer, epoch] = exported
        self.post(PeerMetEvent(peer, epoch, exported.n_pages))

    def tell_peers(self, say: Callable[[LendingMessage], None]) -> None:
        """What it has to say to others goes to `say`; before `run`."""
        self.state.lending.say = say

    def migrate(self, order: migration.MigrationStep) -> None:
        """Carry out a step of a request's move, from any thread."""
        moves = self.state.migration
        if isinstance(order, migration.ImportKvEvent) and moves.bytes is None:
            moves.say(migration.KvImportedAnswer(order.wanted.id, 0))
        else:
            self.post(order)

    def tell_controller(self, say: Callable[[migration.MigrationAnswer], None]) -> None:
        """What it has to say of requests that move goes to `say`; before `run`."""
        self.state.migration.say = say

    def command(self, order: DeviceCommand, done: Callable[[CommandOutcome], None]) -> None:
        """Carry out an operator's order; `done` is called once, by any thread."""
        self._operator.carry_out(order, done)

    def populate(self) -> None:
        """Give all free pages physical memory now instead of in the background."""
        self._reserve.populate_all()

    def run(self) -> None:
        """Run the loop on the calling thread; returns once drained or stopped. Raises DeviceLost,
        with requests unanswered, where the device cannot be used any more."""
        self.loop.run()

    def snapshot(self) -> DeviceReport:
        """The device as it is now; from any thread."""
        return report(self.state, self.fleet.device.name, self.machine.graphs)

    def decisions(self) -> tuple[dict[str, Any], ...]:
        """Those since the last call, as the story tells them; by one thread."""
        return self.story.take()

    def busy(self) -> tuple[float, float]:
        """Seconds that the loop's present turn and the oldest job in flight have lasted."""
        now = self.clock.now()
        turn, job = self.loop.turn_since, self.runner.job_since
        return (0.0 if turn is None else now - turn, 0.0 if job is None else now - job)

    def close(self) -> None:
        """Give everything back to the operating system. The loop must have returned."""
        self._closing.close()

    def _unload(self) -> None:
        for host in self.hosts.values():
            self.machine.unload(host)

    def _load(self, device: DeviceSettings, *, layered: bool) -> None:
        """Bring the fleet's models into the host tier; `layered`: as of `check_room`."""
        for settings in self.fleet.models:
            name = settings.name
            try:
                others = [h.spec for h in self.hosts.values()]
                host = self.hosts[name] = self.load(settings)
                check_room(host.spec, others, device, layered=layered)
                self.failed |= host.failed
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are served
                self._refuse(name, error)
            self._progress()

    def load(self, settings: ModelSettings, threads: int = THREADS) -> HostModel:
        """A model in the host tier. Raises as `load_host_model`, and what `vet` raises."""
        self._vet(settings)
        host = self.machine.load(settings, self.tier, threads)
        if (clipped := clipped_context(settings, host.spec)) is not None:
            log.warning("%s: %s", settings.name, clipped)
        return host

    def _set_up(self) -> None:
        """Make what runs each model that has been placed."""
        for name, m in list(self.state.models.items()):
            try:
                self.executors[name] = self.executors_of(self.hosts[name], m)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are served
                self._compiling.forget(name)
                self.state.unname(m)
                self.state.strike(m)
                self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        """A model is not served; what it has is given back."""
        if not isinstance(error, BallastError):
            log.error("model %s", name, exc_info=error)
        host = self.hosts.pop(name, None)
        if host is not None:
            self.machine.unload(host)
        settings = next(m for m in self.fleet.models if m.name == name)
        base = f"its base {name} is not served"
        self.failed |= dict.fromkeys((a.name for a in settings.adapters), base)
        self.failed[name] = str(error) if isinstance(error, BallastError) else brief(error)

    def _make_swapper(self, preset: Preset) -> MakeSwapper | None:
        """None: the preset swaps no KV. Raises ConfigError where this machine cannot."""
        if not preset.requires.kv_swapping:
            return None
        made = self.machine.make_swapper(self.clock, preset.requires.dirty)
        assert made is not None, "the preset's requirements are met"
        return made

    def executors_of(self, host: HostModel, m: ModelState) -> tuple[Executor, ...]:
        """What runs a model on each lane, all of a lane's in one workspace."""
        segments = [m.weights.segment_address(i) for i in range(len(host.spec.segment_bytes))]
        made = self.machine.executors(host, segments, m.kv, self.workspaces)
        for executor in made:
            executor.grammars = made[0].grammars  # requests may run on any lane
            if isinstance(m.weights.rotor, LinkRotor | EventRotor):
                executor.barriers = m.weights.rotor
        self._compiling.serve(host.spec.name, made[0].grammars)
        swapper = m.swapper
        if isinstance(swapper, LinkSwapper | EventSwapper):
            return tuple(KvSwapExecutor(executor, swapper) for executor in made)
        return made

    def renew(self) -> None:
        """What is there between jobs, from the next such moment on, is not theirs."""
        n_bytes = self.state.arena.pages * self.vm.page_bytes
        self.cap.renew(n_bytes, self._forget)
        self.machine.allow(n_bytes)

    @contextmanager
    def beside_jobs(self) -> Iterator[None]:
        """What is allocated meanwhile by any thread, and kept, is no activation."""
        self.cap.pause()
        try:
            yield
        finally:
            self.renew()

    def forget_model(self, name: str) -> None:
        """A model has been removed, or has not joined."""
        self.executors.pop(name, None)
        self._compiling.forget(name)

    def _forget(self) -> None:
        for workspace in self.workspaces:
            workspace.forget()


def _with_parts(device: DeviceSettings) -> DeviceSettings:
    """Several lanes need to know what they divide. Raises ConfigError where that is too little."""
    if device.lanes == 1 or device.gpu is not None:
        return device
    threads = device.threads or torch.get_num_threads()
    if threads < device.lanes:
        allowed = f"at most as many as the device has threads: {threads}"
        raise ConfigError(f"lanes of {device.name}", device.lanes, allowed)
    return replace(device, threads=threads)
