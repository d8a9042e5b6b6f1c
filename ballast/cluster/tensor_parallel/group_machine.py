"""Present a tensor-parallel group as one machine to the device, in the process of its first rank.

Built by `machine_choice`; the loop and the policies see one device. Every operation on memory,
models and transfers is sent to all ranks. The death of a rank ends the group: the first rank ends
its own process, the others end with it, and the controller starts a new worker.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ballast.cluster.tensor_parallel.group_stream import GroupStream
from ballast.cluster.tensor_parallel.rank_machine import KvPlace, RankMachine, settings_of_rank
from ballast.cluster.tensor_parallel.remote_rank import RemoteRank
from ballast.cluster.tensor_parallel.remote_vm import RemoteVm
from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.core.event import Event, RotationSettledEvent, TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.report import GraphReport
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.engine.layer_stream import MakeStream
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.live.machine import Cap
from ballast.live.runner import Executor, LaneRunner, Record
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.group.link import GroupLink, share_of
from ballast.memory.group.vm import GroupVm
from ballast.models.executor import ModelExecutor
from ballast.transport.tensor_parallel.rank_messages import (
    CopyMsg,
    JoinGroupMsg,
    LayersSettledEvent,
    LoadModelMsg,
    MeetRanksMsg,
    ModelLoadedReply,
    RunJobMsg,
    ServeModelMsg,
    SetActivationLimitMsg,
    StartTransferMsg,
    UnloadModelMsg,
)
from ballast.weights.checkpoint import THREADS
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

EXIT_CODE = 3
"""Exit code of a first rank that has lost another rank."""
_SAMPLED = Sampling()
"""Sent in place of a request's own: a further rank needs to know only that it is sampled."""


class _GroupJobs:
    """Sends the first rank's jobs to the further ranks, on its lane; implements `Followers`."""

    def __init__(self, others: Sequence[RemoteRank], end_group: Callable[[str], NoReturn]) -> None:
        self._others, self._end_group = others, end_group

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        command = RunJobMsg(model, tuple(_without_sampling(w) for w in work), head)
        for other in self._others:
            other.jobs.send(command)

    def end(self) -> None:
        for other in self._others:
            other.jobs.receive()

    def broken(self, error: BaseException) -> NoReturn:
        self._end_group(f"a job broke off: {type(error).__name__}: {error}")


class GroupMachine:
    """Implements `ballast.live.machine.Machine` over the processes of all ranks."""

    graphs: GraphReport | None = None
    copies_beside_jobs = False
    """False: a load cannot be followed by jobs while it runs (`GroupStream.start_load`)."""
    reach: GpuReach | None = None
    """None: a group lends no memory and borrows none."""
    peer_link = None
    host_kernels = None

    def __init__(
        self,
        whole: DeviceSettings,
        link: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
        others: Sequence[RemoteRank],
    ) -> None:
        """Return when all ranks have met.

        `whole`, `link`: settings and pace of all ranks together; `others`: the further ranks, whose
        processes have been started.
        """
        self.device = device = settings_of_rank(whole)
        self._closing = False
        self._cleanup = ExitStack()
        """Run when the group ends, whatever the cause."""
        ranks = whole.tensor_parallel
        pace = None if link is None else share_of(link, ranks)
        self._others = others
        self._jobs = _GroupJobs(others, self._end)
        with ExitStack() as failing:
            failing.enter_context(self._cleanup)
            failing.callback(self._close_others)
            for other in others:
                other.listen(self._transfer_landed, self._layers_settled, self._rank_lost)
                other.memory.send(JoinGroupMsg(other.rank, device, pace))
            self._own = RankMachine(device, Shard(0, ranks), pace, clock, self._transfer_landed)
            for part in (self._own, self._own.vm, self._own.link):
                failing.callback(part.close)
            for other in others:
                other.memory.receive()
            self._meet(whole)
            failing.pop_all()
        n_pages = device.budget_bytes // device.page_bytes
        self.vm = GroupVm(
            self._own.vm, [RemoteVm(r.memory, device.page_bytes, n_pages) for r in others]
        )
        self.link = GroupLink(self._own.link, post, self._start_transfers, ranks)
        self._layer_streams: dict[str, GroupStream] = {}
        self._remote_segments: dict[int, tuple[int, ...]] = {}
        """Addresses of a segment in each further rank, by its address in this process."""

    def _meet(self, whole: DeviceSettings) -> None:
        """Have all ranks meet, in memory that they share or at a file."""
        if whole.meets_in_memory:
            shared = os.memfd_create("ballast-meeting")
            for other in self._others:
                other.memory.send(MeetRanksMsg(None))
                other.memory.send_descriptor(shared)
            self._own.meet(shared)
            os.close(shared)
        else:
            directory = tempfile.TemporaryDirectory(prefix="ballast-")
            self._cleanup.callback(directory.cleanup)
            file = Path(directory.name) / "meeting"
            for other in self._others:
                other.memory.send(MeetRanksMsg(str(file)))
            self._own.meet(file)
        for other in self._others:
            other.memory.receive()

    # -- models -----------------------------------------------------------------------------------

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """Load a model on all ranks at the same time; if one fails, all of them drop it."""
        host: HostModel | None = None
        failed: BallastError | None = None
        for other in self._others:
            other.models.send(LoadModelMsg(settings, threads))
        try:
            host = self._own.load(settings, tier, threads)
        except BallastError as error:
            failed = error
        addresses_by_rank: list[tuple[int, ...]] = []
        loaded: list[RemoteRank] = []
        for other in self._others:
            try:
                reply = other.models.receive()
            except DeviceError as error:
                failed = failed or DeviceError(f"rank {other.rank}", error.reason)
                continue
            assert isinstance(reply, ModelLoadedReply)
            loaded.append(other)
            addresses_by_rank.append(reply.addresses)
        if failed is not None or host is None:
            for other in loaded:
                other.models.call(UnloadModelMsg(settings.name))
            if host is not None:
                self._own.unload(host)
            raise failed or BrokenPromise(f"{settings.name} was not loaded")
        for i, address in enumerate(host.addresses):
            self._remote_segments[address] = tuple(theirs[i] for theirs in addresses_by_rank)
        return host

    def unload(self, host: HostModel) -> None:
        if not self._closing:
            for other in self._others:
                other.models.call(UnloadModelMsg(host.spec.name))
        self._own.unload(host)

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        addresses = [self.vm.ranges.where(address) for address in (*segments, kv.base)]
        for i, other in enumerate(self._others, 1):
            *segments_there, kv_there = (address[i] for address in addresses)
            other.models.call(ServeModelMsg(host.spec.name, tuple(segments_there), kv_there))
        (workspace,) = workspaces
        place = KvPlace(kv.base, kv.addresses.n_bytes, kv.layout)
        return (self._own.model(host, segments, place, workspace, followers=self._jobs),)

    def cap(self, n_bytes: int) -> Cap:
        return self._own.cap(n_bytes)

    def runner(
        self,
        executors: Mapping[str, Sequence[Executor]],
        post: Callable[[Event], None],
        clock: Clock,
        device: DeviceSettings,
        cap: Cap,
        record: Record | None,
    ) -> LaneRunner:
        return self._own.runner(executors, post, clock, device, cap, record)

    def make_stream(self, clock: Clock, post: Callable[[Event], None]) -> MakeStream:
        """Return what makes streams whose ranks load their parts over their own links. KV of groups
        does not stream."""

        def make(spec: ModelSpec) -> GroupStream:
            settled = RotationSettledEvent(spec.name)
            link = self._own.link
            others = [other.memory for other in self._others]
            made = GroupStream(spec.name, link, clock, lambda: post(settled), others)
            self._layer_streams[spec.name] = made
            return made

        return make

    def allow(self, n_bytes: int) -> None:
        for other in self._others:
            other.models.call(SetActivationLimitMsg(n_bytes))

    def when_lost(self, call: WhenLost) -> None:
        """Do nothing: a group on CPUs is lost only with a process of its own."""

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        targets, sources = self.vm.ranges.where(dst), self.vm.ranges.where(src)
        for i, other in enumerate(self._others, 1):
            other.memory.call(CopyMsg(targets[i], sources[i], n_bytes))
        self._own.copy(dst, src, n_bytes)

    def close(self) -> None:
        """End the other ranks, and free this rank's resources."""
        self._close_others()
        self._own.close()
        self._cleanup.close()

    def _close_others(self) -> None:
        self._closing = True
        for other in self._others:
            other.close()

    # -- transfers --------------------------------------------------------------------------------

    def _start_transfers(self, transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        """Have the other ranks start their parts of a transfer."""
        places = [
            (self.vm.ranges.where(c.dst), self._remote_segments[c.src], c.n_bytes) for c in copies
        ]
        for i, other in enumerate(self._others):
            theirs = [(to[1 + i], source[i], n) for to, source, n in places]
            other.memory.call(StartTransferMsg(transfer_id, theirs, stream))

    def _transfer_landed(self, done: Event) -> None:
        """Note that a rank's part of a transfer has ended."""
        assert isinstance(done, TransferDoneEvent)
        self.link.landed(done)

    def _layers_settled(self, event: LayersSettledEvent) -> None:
        """Note that another rank's layers of a model have settled."""
        self._layer_streams[event.model].rank_settled(event.held)

    # -- deaths -----------------------------------------------------------------------------------

    def _rank_lost(self, other: RemoteRank) -> None:
        """End the group, unless the rank has been closed."""
        if not self._closing:
            self._end(f"rank {other.rank} is gone ({other.exit_reason()})")

    def _end(self, why: str) -> NoReturn:
        """End this process, and with it the others: a group that lacks a rank computes nothing."""
        log.critical("%s: the group ends: %s", self.device.name, why)
        self._cleanup.close()
        logging.shutdown()
        os._exit(EXIT_CODE)


def _without_sampling(work: SequenceWork) -> SequenceWork:
    """Drop the sampling parameters and history, which only the first rank needs: it samples."""
    sample = None if work.sample is None else _SAMPLED
    return replace(work, sample=sample, history=None, prompt_tokens=0)
