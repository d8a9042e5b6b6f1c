"""Build and run a live device of a fleet: memory, host tier, models, policies and the loop.

Used by worker processes, and by `bench` in its own process. `LiveDevice` only connects the parts;
policies and the engine decide.
"""

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
from ballast.core.command import DeviceCommand
from ballast.core.cost import StepCosts
from ballast.core.entries import Sink, both
from ballast.core.errors import ConfigError, DeviceError
from ballast.core.event import Event, Output
from ballast.core.lease import Lease, LendingMessage, PagesLentEvent, PeerMetEvent
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.story import Story
from ballast.core.units import ceil_div
from ballast.engine.build import Hosted, build_state
from ballast.engine.loop import Loop
from ballast.engine.migration import MakeKvBytes
from ballast.engine.model import ModelState
from ballast.engine.report import report
from ballast.engine.story_file import StoryFile
from ballast.isolation.calls import Isolation
from ballast.kernels.workspace import Workspace
from ballast.live.command_executor import CommandExecutor, OnOutcome
from ballast.live.cpu_machine import CpuMachine
from ballast.live.event_stream import EventStream
from ballast.live.grammar_compiler import GrammarCompiler
from ballast.live.host_stream import HostStream
from ballast.live.hosted_models import HostedModels
from ballast.live.in_place_reads import paced, peer_rate
from ballast.live.inbox import MonotonicClock, QueueInbox
from ballast.live.kv_tiers import KvConnection, tiers_of
from ballast.live.machine import MakeMachine
from ballast.live.never_run import WHERE as NEVER_RUN_WHERE
from ballast.live.never_run import never_run
from ballast.live.runner import Executor, Record
from ballast.memory.arena import confine_allocator
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.reserve import PopulatedReserve
from ballast.memory.vm import Exported
from ballast.policy.presets import Preset, preset_of
from ballast.weights.host import HostModel, HostTier
from ballast.weights.segment_exchange import SegmentExchange

log = logging.getLogger(__name__)


class LiveDevice:
    """Serves a fleet on a device of this machine: construct it, `run` it on a thread, `close` it.

    The constructor loads checkpoints. A model that cannot be read, sized or placed is listed in
    `failed`, with the reason, and the others are served.

    - `outbox` receives outputs on the loop's thread, and must not block.
    - `costs`: by model, the costs that policies know; those of other models are learned.
    - `sink` receives the story, beside the story file.
    - `record` receives the ids of requests in flight, before and after each job.
    - `progress` is called for each part of the weights that was loaded.
    - `exchange` shares host segments with other processes.
    - `isolation` examines checkpoints; the caller closes it.
    - `vet` raises BallastError for a model that shall not be loaded.
    - `make_kv_bytes` makes the reader of other devices' KV; None: KV of requests that come from
      there is computed anew.
    - `kv_store`: the host's; None: one of this process's own, if the fleet has a KV host tier.
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
        kv_store: KvConnection | None = None,
    ) -> None:
        confine_allocator()
        self.fleet = fleet
        self.tier = HostTier(progress, exchange, isolation)
        self.clock = clock or MonotonicClock()
        self.inbox = QueueInbox(self.clock)
        preset = preset_of(fleet)
        # If a step fails, what the steps before it have opened is closed.
        with ExitStack() as closing:
            self._open_machine(make_machine, vet, closing)
            device = _with_threads(self.machine.device)
            self.models.load_all(device, progress, preset.requires)
            self._build_state(device, preset, costs or {}, closing)
            self._start_grammar_compiler(closing)
            self._make_all_executors()
            self._start_runner(device, record, closing)
            self._open_story(sink, closing)
            if make_kv_bytes is not None:
                self._enable_migration(make_kv_bytes, closing)
            self._enable_tiers(kv_store, closing)
            self._make_loop(preset, outbox, closing)
            self._closing = closing.pop_all()

    # -- the steps of making it -------------------------------------------------------------------

    def _open_machine(
        self,
        make_machine: MakeMachine,
        vet: Callable[[ModelSettings], object],
        closing: ExitStack,
    ) -> None:
        """Open the device's memory and link."""
        self.machine = make_machine(self.fleet, self.clock, self.post)
        closing.callback(self.machine.close)
        self.machine.when_lost(self.inbox.break_off)
        self.vm = self.machine.vm
        self.models = HostedModels(self.fleet, self.machine, self.tier, vet)
        closing.callback(self.models.unload_all)
        closing.callback(self.vm.close)
        closing.callback(self.machine.link.close)
        if unproven := never_run(self.fleet, self.fleet.device):
            name, what = self.fleet.device.name, "; ".join(unproven)
            log.warning("%s uses what no GPU has ever run: %s (%s)", name, what, NEVER_RUN_WHERE)

    def _build_state(
        self,
        device: DeviceSettings,
        preset: Preset,
        costs: Mapping[str, StepCosts],
        closing: ExitStack,
    ) -> None:
        """Divide the device's memory among its models, and begin to populate it."""
        needs = preset.requires
        make_stream = self.machine.make_stream(self.clock, self.post)
        assert make_stream is not None or not needs.kv_staging, "its requirements are met"
        self.state = build_state(
            device,
            [Hosted(h.spec, h.addresses) for h in self.models.by_name.values()],
            self.vm,
            self.machine.link,
            self.clock,
            self.machine.copy,
            costs,
            make_stream,
            self.models.refuse,
            needs.kv_staging,
        )
        keep = device.keep_free
        kept = None if keep is None else ceil_div(keep, device.page_bytes)
        self.reserve = PopulatedReserve(self.state.pool, kept)
        self.reserve.start()
        closing.callback(self.reserve.close)

    def _start_grammar_compiler(self, closing: ExitStack) -> None:
        """Start the thread that compiles grammars."""
        self._grammar_compiler = GrammarCompiler(
            self.post, self.inbox.break_off, self.beside_jobs, lambda n: self.cap.exempt(n)
        )
        closing.callback(self._grammar_compiler.close)
        self.state.grammars = self._grammar_compiler

    def _make_all_executors(self) -> None:
        """Make the executors of each model that has been placed; log which models are refused."""
        settings = self.state.settings
        self.workspaces = [Workspace(settings.budget_bytes) for _ in range(settings.lanes)]
        """Workspaces of the fast path, by lane. Jobs populate them; the arena accounts for them."""
        self.executors: dict[str, tuple[Executor, ...]] = {}
        """Executors of each model, one for each lane."""
        for name, m in list(self.state.models.items()):
            try:
                self.executors[name] = self.executors_of(self.models.by_name[name], m)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are served
                self._grammar_compiler.forget(name)
                self.state.stop_accepting(m)
                self.state.remove_model(m)
                self.models.refuse(name, error)
        for name, why in self.models.failed.items() - self.fleet.faults.items():
            log.error("model %s is not served: %s", name, why)

    def _start_runner(
        self, device: DeviceSettings, record: Record | None, closing: ExitStack
    ) -> None:
        """Start the lanes, with a cap on what their jobs allocate."""
        # Between jobs the C allocator keeps no more than the arena accounts for.
        self.cap = self.machine.cap(self.state.arena.pages * device.page_bytes)
        self.machine.allow(self.cap.n_bytes)
        self.runner = self.machine.runner(
            self.executors, self.post, self.clock, device, self.cap, record
        )
        closing.callback(self.runner.close)
        self.runner.when_lost(self.inbox.break_off)
        self.state.activating = self.runner.activating

    def _open_story(self, sink: Sink | None, closing: ExitStack) -> None:
        """Begin the story, which goes to `sink` and to the fleet's story file, if any."""
        fleet = self.fleet
        if fleet.story_path:
            name = self.state.settings.name
            file = StoryFile(fleet.story_path, name, fleet.story_bytes, fleet.story_parts)
            closing.callback(file.close)
            sink = both(sink, file.write)
        began = time.time() - self.clock.now()
        self.story = Story(sink=sink, key=os.urandom(32), began=began)

    def _enable_migration(self, make_kv_bytes: MakeKvBytes, closing: ExitStack) -> None:
        """Let requests come with their KV, and leave with it where this memory can be exported."""
        self.state.migration.bytes = kv_bytes = make_kv_bytes(self.post)
        closing.callback(kv_bytes.close)
        self.state.migration.exports = self.export() is not None

    def _enable_tiers(self, store: KvConnection | None, closing: ExitStack) -> None:
        """Keep KV in tiers below the device, if the fleet has any."""
        tiers = tiers_of(self.fleet, self.machine.device, self.machine.link, store, self.post)
        self.state.tiers.copies = tiers
        if tiers is not None:
            closing.callback(tiers.close)

    def _make_loop(
        self, preset: Preset, outbox: Callable[[list[Output]], None], closing: ExitStack
    ) -> None:
        """Make the loop, and the executor of commands beside it."""
        self._command_executor = CommandExecutor(self)
        closing.callback(self._command_executor.close)
        self.loop = Loop(
            self.state,
            preset,
            self.inbox,
            self.runner,
            self.clock,
            outbox,
            self.story,
            self._command_executor.command_ended,
        )

    # -- what others use --------------------------------------------------------------------------

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The models that serve, by name."""
        return {name: m.spec for name, m in self.state.models.items()}

    @property
    def failed(self) -> dict[str, str]:
        """Models and adapters of the fleet that are not served, with the reason."""
        return self.models.failed

    def post(self, event: Event) -> None:
        """Put an event in the inbox, from any thread."""
        self.inbox.post(event)

    @property
    def reach(self) -> GpuReach | None:
        """The GPU's id and the GPUs whose memory it can use; None for a CPU."""
        return self.machine.reach

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        """Export the memory for other processes to map: all of a CPU's, these pages of a GPU.

        Returns None where it cannot be exported. From any thread, like the methods up to `command`.
        """
        try:
            return self.vm.export(pages)
        except DeviceError:
            return None

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        """Return the pages of a lease of which none has been returned; empty: no such lease."""
        return self.state.lending.offered.get((borrower, epoch, lease), ())

    def import_pages(self, exported: Exported) -> Exported:
        """Import pages of another GPU, and close the descriptors. Raises DeviceError."""
        if not isinstance(self.vm, CudaVm):
            raise DeviceError("import", "this device is no GPU")
        return self.vm.open(exported)

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        """Accept a lease of another GPU's pages, which `import_pages` has imported."""
        self.state.lending.opened[lease.lender, lease.epoch, lease.id] = opened
        self.post(PagesLentEvent(lease))

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None:
        """Introduce another process's device, which may lend and borrow from now on."""
        self.state.lending.exports[peer, epoch] = exported
        self.post(PeerMetEvent(peer, epoch, exported.n_pages))

    def set_lending_outbox(self, send: Callable[[LendingMessage], None]) -> None:
        """Set where messages to other devices go. Before `run`."""
        self.state.lending.send, self.state.lending.bytes_per_second = send, peer_rate(self.machine)

    def migrate(self, step: migration.MigrationStep) -> None:
        """Carry out a step of a request's migration."""
        state = self.state.migration
        if isinstance(step, migration.ImportKvEvent) and state.bytes is None:
            state.send(migration.KvImportedAnswer(step.wanted.id, 0, step.attempt))
        else:
            self.post(step)

    def set_migration_outbox(self, send: Callable[[migration.MigrationAnswer], None]) -> None:
        """Set where answers about migrations go. Before `run`."""
        self.state.migration.send = send

    def command(self, command: DeviceCommand, done: OnOutcome, by: str = "operator") -> None:
        """Carry out a command that `by` ordered; `done` is called once, by any thread."""
        self._command_executor.carry_out(command, done, by)

    def populate(self) -> None:
        """Give all free pages physical memory now instead of in the background."""
        self.reserve.populate_all()

    def run(self) -> None:
        """Run the loop on the calling thread; returns once drained or stopped. Raises DeviceLost,
        with requests unanswered, where the device cannot be used any more."""
        self.loop.run()

    def snapshot(self) -> DeviceReport:
        """Return the state of the device as it is now, from any thread."""
        return report(self.state, self.fleet.device.name, self.machine.graphs)

    def decisions(self) -> tuple[dict[str, Any], ...]:
        """Return the story's decisions since the last call; from one thread."""
        return self.story.take_decisions()

    def busy(self) -> tuple[float, float]:
        """Return for how many seconds the present turn and the oldest job in flight have lasted."""
        now = self.clock.now()
        turn, job = self.loop.turn_since, self.runner.job_since
        return (0.0 if turn is None else now - turn, 0.0 if job is None else now - job)

    def close(self) -> None:
        """Give everything back to the operating system. The loop must have returned."""
        self._closing.close()

    def executors_of(self, host: HostModel, m: ModelState) -> tuple[Executor, ...]:
        """Make a model's executor for each lane; all models of a lane share its workspace."""
        segments = [m.weights.segment_address(i) for i in range(len(host.spec.segment_bytes))]
        made = self.machine.executors(host, segments, m.kv, self.workspaces)
        for executor in made:
            executor.grammars = made[0].grammars  # requests may run on any lane
            stream = m.weights.stream
            if isinstance(stream, HostStream | EventStream):
                slots = self.fleet.link.peer_slot_bytes
                executor.barriers = paced(stream, m, self.machine, self.clock, executor, slots)
        self._grammar_compiler.serve(host.spec.name, made[0].grammars)
        return made

    def renew(self) -> None:
        """Measure the cap anew at the next moment between jobs: memory that is allocated then does
        not count as activations."""
        n_bytes = self.state.arena.pages * self.vm.page_bytes
        self.cap.renew(n_bytes, self._forget)
        self.machine.allow(n_bytes)

    @contextmanager
    def beside_jobs(self) -> Iterator[None]:
        """Exempt from the cap what any thread allocates meanwhile, and keeps."""
        self.cap.pause()
        try:
            yield
        finally:
            self.renew()

    def forget_model(self, name: str) -> None:
        """Forget the executors of a model that has been removed, or has not joined."""
        self.executors.pop(name, None)
        self._grammar_compiler.forget(name)

    def _forget(self) -> None:
        for workspace in self.workspaces:
            workspace.forget()


def _with_threads(device: DeviceSettings) -> DeviceSettings:
    """Set the number of threads that several CPU lanes divide. Raises ConfigError where there are
    fewer threads than lanes."""
    if device.lanes == 1 or device.gpu is not None:
        return device
    threads = device.threads or torch.get_num_threads()
    if threads < device.lanes:
        allowed = f"at most as many as the device has threads: {threads}"
        raise ConfigError(f"lanes of {device.name}", device.lanes, allowed)
    return replace(device, threads=threads)
