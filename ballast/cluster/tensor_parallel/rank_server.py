"""Execute the first rank's commands on a further rank's memory, models and rotating layers.

Used by `rank_process`. Decides nothing: all allocation, scheduling and sampling is the first
rank's.
"""

from __future__ import annotations

from collections.abc import Callable

from ballast.cluster.tensor_parallel.rank_machine import KvPlace, MeetingPlace, RankMachine
from ballast.core.errors import BrokenPromise
from ballast.core.event import Event
from ballast.isolation.calls import Isolation
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.live.host_stream import HostStream
from ballast.live.inbox import MonotonicClock
from ballast.live.machine import Cap
from ballast.memory.arena import confine_allocator
from ballast.memory.copies import Copy
from ballast.memory.vm import Range
from ballast.models.parallel.model import ParallelModel
from ballast.transport.tensor_parallel.rank_messages import (
    CopyMsg,
    DiscardPagesMsg,
    DoneReply,
    FindWindowMsg,
    ForgetLayersMsg,
    InspectMappingsMsg,
    JoinGroupMsg,
    LayersSettledEvent,
    LoadModelMsg,
    MapPagesMsg,
    MappingsReply,
    MeetRanksMsg,
    MemoryCommand,
    ModelLoadedReply,
    PagesShortReply,
    PopulatePagesMsg,
    RangeReservedReply,
    RankReply,
    ReleaseRangeMsg,
    RemapLayersMsg,
    ReserveRangeMsg,
    RunJobMsg,
    ServeModelMsg,
    SetActivationLimitMsg,
    SettleLayersMsg,
    StartTransferMsg,
    ToRank,
    UnloadModelMsg,
    UnmapPagesMsg,
)
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard

DONE = DoneReply()
"""Reply to a command without a result."""


class RankServer:
    """Owns the machine, host tier and models of a further rank, and executes commands on them."""

    def __init__(
        self,
        group: JoinGroupMsg,
        transfer_landed: Callable[[Event], None],
        layers_settled: Callable[[LayersSettledEvent], None],
        isolation: Isolation | None = None,
    ) -> None:
        """Build the rank's machine. Raises ConfigError and DeviceError.

        `transfer_landed`, `layers_settled`: called by any thread, to send the event to the first
        rank; `isolation`: examines checkpoints.
        """
        confine_allocator()
        self.device = device = group.device
        shard = Shard(group.rank, device.tensor_parallel)
        self._clock = MonotonicClock()
        self._machine = RankMachine(device, shard, group.pace, self._clock, transfer_landed)
        window = self._machine.vm.window
        self._ranges: dict[int, Range] = {window.base: window}
        self._tier = HostTier(isolation=isolation)
        self._hosts: dict[str, HostModel] = {}
        self._models: dict[str, ParallelModel] = {}
        self._layer_streams: dict[str, HostStream] = {}
        self._layers_settled = layers_settled
        self._workspace = Workspace(device.budget_bytes)
        self._cap: Cap | None = None

    def meet(self, place: MeetingPlace) -> None:
        """Join the other ranks, before the first command; returns when all have joined."""
        self._machine.meet(place)

    def execute(self, command: ToRank) -> RankReply:
        """Carry out a command. Raises DeviceError and BrokenPromise with nothing changed."""
        match command:
            case RunJobMsg():
                self._run_job(command)
            case LoadModelMsg():
                host = self._machine.load(command.settings, self._tier, command.threads)
                self._hosts[host.spec.name] = host
                return ModelLoadedReply(host.addresses)
            case UnloadModelMsg():
                self._models.pop(command.model, None)
                self._layer_streams.pop(command.model, None)
                self._machine.unload(self._hosts.pop(command.model))
            case ServeModelMsg():
                self._serve(command)
            case SetActivationLimitMsg():
                self._limit_activations(command.n_bytes)
            case RemapLayersMsg():
                self._layer_streams[command.model].remap(
                    command.rotation, command.held, command.missing
                )
            case SettleLayersMsg():
                self._layer_streams[command.model].settle()
            case ForgetLayersMsg():
                self._layer_streams[command.model].forget()
            case JoinGroupMsg() | MeetRanksMsg():
                raise BrokenPromise("it is a rank already")
            case _:
                return self._execute_on_memory(command)
        return DONE

    def _execute_on_memory(self, command: MemoryCommand) -> RankReply:
        vm = self._machine.vm
        match command:
            case FindWindowMsg():
                return RangeReservedReply(vm.window.base)
            case ReserveRangeMsg():
                reserved = vm.reserve(command.n_bytes)
                self._ranges[reserved.base] = reserved
                return RangeReservedReply(reserved.base)
            case ReleaseRangeMsg():
                vm.release(self._range(command.base))
                del self._ranges[command.base]
            case MapPagesMsg():
                mapped_in = self._range(command.base)
                vm.map(
                    mapped_in,
                    command.at,
                    command.pages,
                    alias=command.alias,
                    prefault=command.prefault,
                )
            case UnmapPagesMsg():
                vm.unmap(self._range(command.base), command.at, command.n)
            case PopulatePagesMsg():
                short = vm.populate(command.pages)
                if short is not None:
                    return PagesShortReply(short.pages)
            case DiscardPagesMsg():
                vm.discard(command.pages)
            case InspectMappingsMsg():
                return MappingsReply(vm.os_pages(self._range(command.base)))
            case CopyMsg():
                self._machine.copy(command.dst, command.src, command.n_bytes)
            case StartTransferMsg():
                copies = [Copy(*c) for c in command.copies]
                self._machine.link.start(command.transfer_id, copies, command.stream)
        return DONE

    def _run_job(self, job: RunJobMsg) -> None:
        self._models[job.model].compute(job.work, head=job.head)
        if self._cap is not None:
            self._cap.check(alone=True)

    def _range(self, base: int) -> Range:
        found = self._ranges.get(base)
        if found is None:
            raise BrokenPromise(f"no range at {base:#x}")
        return found

    def _serve(self, command: ServeModelMsg) -> None:
        host = self._hosts[command.model]
        kv = self._range(command.kv_base)
        place = KvPlace(kv.base, kv.n_bytes, Layout.of(host.spec, self.device.page_bytes))
        model = self._machine.model(host, command.segments, place, self._workspace)
        self._models[command.model] = model
        spec = host.spec
        parts = zip(command.segments, host.addresses, spec.segment_bytes, strict=False)
        copies = [Copy(*part) for part in parts][1 : 1 + spec.n_layers]
        stream = self._machine.layer_stream(
            spec.name, copies, self._clock, lambda: self._report_settled(spec.name)
        )
        model.barriers = self._layer_streams[spec.name] = stream

    def _report_settled(self, model: str) -> None:
        self._layers_settled(LayersSettledEvent(model, self._layer_streams[model].held))

    def _limit_activations(self, n_bytes: int) -> None:
        if self._cap is None:
            self._cap = self._machine.cap(n_bytes)
        else:
            self._cap.renew(n_bytes, self._workspace.forget)
