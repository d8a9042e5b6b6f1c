"""A tensor-parallel group as its first rank has it: a machine whose memory, link and models are
those of several processes.

::

    worker = rank 0: loop, pool, policies ── memory ──> rank 1, 2, ..: no loop, no pool
                                          ── models ──>
                                          ── jobs ────>
                                          <── events ──

A rank's death is the group's: the first one ends itself, the others end with it, and its controller
starts a worker anew, as after any crash.
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

from ballast.cluster.member import KvPlace, MakeMember, of_rank
from ballast.cluster.members import member_of
from ballast.cluster.remote import RemoteRank
from ballast.cluster.remote_vm import RemoteVm
from ballast.cluster.rotors import GroupRotor
from ballast.core.capability import Reach
from ballast.core.clock import Clock
from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.core.event import Event, Settled, TransferDone
from ballast.core.job import SequenceWork
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.report import GraphReport
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.kv.swapper import MakeSwapper
from ballast.live.machine import Cap
from ballast.live.runner import Executor, LaneRunner, Record
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.group.link import GroupLink, share_of
from ballast.memory.group.vm import GroupVm
from ballast.memory.transfer import HostLink
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
from ballast.weights.rotor import MakeRotor
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

EXIT_CODE = 3
"""Of a first rank that has lost another."""
_SAMPLED = Sampling()
"""Stands for any: a rank needs to know that there is something to sample, and no more."""


class GroupMachine:
    """Implements `ballast.live.machine.Machine` over the processes of all ranks."""

    graphs: GraphReport | None = None
    copies_beside_jobs = False
    """Its rotors do not follow the links (`GroupRotor.bring`)."""
    reach: Reach | None = None
    """It lends no memory, and borrows none."""

    def __init__(
        self,
        whole: DeviceSettings,
        link: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
        others: Sequence[RemoteRank],
        make: MakeMember = member_of,
    ) -> None:
        """`whole`: of all ranks; `link`: the pace of all. Returns when all ranks have met."""
        self.device = device = of_rank(whole)
        self._closing = False
        self._parting = ExitStack()
        """What is done when the ranks part, however they do."""
        ranks = whole.tensor_parallel
        pace = None if link is None else share_of(link, ranks)
        self._ranks = others
        with ExitStack() as failing:
            failing.enter_context(self._parting)
            failing.callback(self._leave)
            for other in others:
                other.listen(self._landed, self._quiet, self._lost)
                own = of_rank(whole, other.rank)
                other.memory.send(JoinGroupMsg(other.rank, own, pace))
            self._own = make(device, Shard(0, ranks), pace, clock, self._landed)
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
        self.link = GroupLink(self._own.link, post, self._carry, ranks)
        self._rotors: dict[str, GroupRotor] = {}
        self._hosts: dict[int, tuple[int, ...]] = {}
        """By the address of a segment in this process: where the others have theirs."""

    def _meet(self, whole: DeviceSettings) -> None:
        """At a file, or in memory that all of them map."""
        if whole.meets_in_memory:
            shared = os.memfd_create("ballast-meeting")
            for other in self._ranks:
                other.memory.send(MeetRanksMsg(None))
                other.memory.send_descriptor(shared)
            self._own.meet(shared)
            os.close(shared)
        else:
            where = tempfile.TemporaryDirectory(prefix="ballast-")
            self._parting.callback(where.cleanup)
            file = Path(where.name) / "meeting"
            for other in self._ranks:
                other.memory.send(MeetRanksMsg(str(file)))
            self._own.meet(file)
        for other in self._ranks:
            other.memory.receive()

    # -- models -----------------------------------------------------------------------------------

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """All ranks read their parts at the same time; where one cannot, none has the model."""
        host: HostModel | None = None
        failed: BallastError | None = None
        for other in self._ranks:
            other.models.send(LoadModelMsg(settings, threads))
        try:
            host = self._own.load(settings, tier, threads)
        except BallastError as error:
            failed = error
        found: list[tuple[int, ...]] = []
        loaded: list[RemoteRank] = []
        for other in self._ranks:
            try:
                told = other.models.receive()
            except DeviceError as error:
                failed = failed or DeviceError(f"rank {other.rank}", error.reason)
                continue
            assert isinstance(told, ModelLoadedReply)
            loaded.append(other)
            found.append(told.addresses)
        if failed is not None or host is None:
            for other in loaded:
                other.models.call(UnloadModelMsg(settings.name))
            if host is not None:
                self._own.unload(host)
            raise failed or BrokenPromise(f"{settings.name} was not loaded")
        for i, address in enumerate(host.addresses):
            self._hosts[address] = tuple(addresses[i] for addresses in found)
        return host

    def unload(self, host: HostModel) -> None:
        if not self._closing:
            for other in self._ranks:
                other.models.call(UnloadModelMsg(host.spec.name))
        self._own.unload(host)

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[ModelExecutor, ...]:
        places = [self.vm.where(address) for address in (*segments, kv.base)]
        for i, other in enumerate(self._ranks, 1):
            *theirs, their_kv = (place[i] for place in places)
            other.models.call(ServeModelMsg(host.spec.name, tuple(theirs), their_kv))
        (workspace,) = workspaces
        place = KvPlace(kv.base, kv.range.range.n_bytes, kv.layout)
        return (self._own.model(host, segments, place, workspace, followers=self),)

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

    def make_rotor(self, clock: Clock, post: Callable[[Event], None]) -> MakeRotor | None:
        """Each rank brings its parts of a layer over its own link; layers of GPUs' groups do not
        rotate yet."""
        if self.device.gpu is not None:
            return None

        def make(spec: ModelSpec, copies: Sequence[Copy]) -> GroupRotor:
            settled = Settled(spec.name)
            link = self._own.link
            assert isinstance(link, HostLink)
            others = [other.memory for other in self._ranks]
            rotor = GroupRotor(spec.name, copies, link, clock, lambda: post(settled), others)
            self._rotors[spec.name] = rotor
            return rotor

        return make

    def make_swapper(self, clock: Clock, dirty: bool) -> MakeSwapper | None:
        """KV is not swapped on groups yet."""
        return None

    def allow(self, n_bytes: int) -> None:
        for other in self._ranks:
            other.models.call(SetActivationLimitMsg(n_bytes))

    def when_lost(self, call: WhenLost) -> None:
        """The group ends with the process of its first rank, as with that of any other."""
        self._own.when_lost(lambda error: self._end(str(error)))

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        targets, sources = self.vm.where(dst), self.vm.where(src)
        for i, other in enumerate(self._ranks, 1):
            other.memory.call(CopyMsg(targets[i], sources[i], n_bytes))
        self._own.copy(dst, src, n_bytes)

    def close(self) -> None:
        """The other ranks end, and what they have with them."""
        self._leave()
        self._own.close()
        self._parting.close()

    def _leave(self) -> None:
        self._closing = True
        for other in self._ranks:
            other.close()

    # -- jobs, on the lane ------------------------------------------------------------------------

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        told = RunJobMsg(model, tuple(_without_words(w) for w in work), head)
        for other in self._ranks:
            other.jobs.send(told)

    def end(self) -> None:
        for other in self._ranks:
            other.jobs.receive()

    def broken(self, error: BaseException) -> NoReturn:
        self._end(f"a job broke off: {type(error).__name__}: {error}")

    # -- transfers --------------------------------------------------------------------------------

    def _carry(self, transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        """Have the other ranks begin their parts of a transfer."""
        places = [(self.vm.where(c.dst), self._hosts[c.src], c.n_bytes) for c in copies]
        for i, other in enumerate(self._ranks):
            theirs = [(to[1 + i], source[i], n) for to, source, n in places]
            other.memory.call(StartTransferMsg(transfer_id, theirs, stream))

    def _landed(self, done: Event) -> None:
        """On some rank."""
        assert isinstance(done, TransferDone)
        self.link.landed(done)

    def _quiet(self, told: LayersSettledEvent) -> None:
        """On some other rank."""
        self._rotors[told.model].quiet(told.held)

    # -- deaths -----------------------------------------------------------------------------------

    def _lost(self, other: RemoteRank) -> None:
        if not self._closing:
            self._end(f"rank {other.rank} is gone ({other.epitaph()})")

    def _end(self, why: str) -> NoReturn:
        """A group that is not whole can compute nothing: this process ends, and all with it."""
        log.critical("%s: the group ends: %s", self.device.name, why)
        self._parting.close()
        logging.shutdown()
        os._exit(EXIT_CODE)


def _without_words(work: SequenceWork) -> SequenceWork:
    """What only whoever samples needs stays here."""
    sample = None if work.sample is None else _SAMPLED
    return replace(work, sample=sample, history=None, prompt_tokens=0)
