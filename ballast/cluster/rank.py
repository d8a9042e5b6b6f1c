"""The process of one further rank of a tensor-parallel group: `python -m ballast.cluster.rank`.

It decides nothing: the first rank, a worker, asks over three connections, each with a thread of its
own here, so that a job or a load keeps no memory operation waiting. It ends with the first rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from ballast.cluster.logs import FORMAT_VARIABLE, set_up
from ballast.cluster.member import KvPlace, MakeMember, Meeting
from ballast.cluster.members import member_of
from ballast.core.errors import BallastError, BrokenPromise, DeviceError, DeviceLost
from ballast.core.event import Event, TransferDone
from ballast.isolation.calls import Isolation
from ballast.isolation.orphan import die_with
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.live.inbox import MonotonicClock
from ballast.live.machine import Cap
from ballast.memory.arena import confine_allocator
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import WhenLost
from ballast.memory.vm import Range
from ballast.models.gpu.parallel import GpuParallelModel
from ballast.models.parallel.model import ParallelModel
from ballast.transport.tensor_parallel.rank_connections import FromRank, LeaderConnection, RankGone
from ballast.transport.tensor_parallel.rank_messages import (
    CopyMsg,
    DiscardPagesMsg,
    DoneReply,
    ForgetLayersMsg,
    InspectMappingsMsg,
    JoinGroupMsg,
    LayersSettledEvent,
    LoadModelMsg,
    MapPagesMsg,
    MappingsReply,
    MeetRanksMsg,
    ModelLoadedReply,
    PagesShortReply,
    PopulatePagesMsg,
    RangeReservedReply,
    RefusedReply,
    ReleaseRangeMsg,
    RemapLayersMsg,
    ReserveRangeMsg,
    RunJobMsg,
    ServeModelMsg,
    SetActivationLimitMsg,
    SettleLayersMsg,
    StartTransferMsg,
    ToRank,
    TransferLandedEvent,
    UnloadModelMsg,
    UnmapPagesMsg,
)
from ballast.weights.host import HostModel, HostTier
from ballast.weights.link_rotor import LinkRotor
from ballast.weights.manifest import fork_zygote
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

NAME = "ballast-rank"
"""Of the process, as operators see it."""
_DONE = DoneReply()


class Rank:
    """Memory, host tier, link and models of one rank."""

    def __init__(
        self,
        told: JoinGroupMsg,
        landed: Callable[[Event], None],
        quiet: Callable[[LayersSettledEvent], None],
        make: MakeMember = member_of,
        isolation: Isolation | None = None,
    ) -> None:
        """`isolation`: how checkpoints are examined."""
        confine_allocator()
        self.device = device = told.device
        shard = Shard(told.rank, device.tensor_parallel)
        self._clock = MonotonicClock()
        self._own = make(device, shard, told.pace, self._clock, landed)
        self._ranges: dict[int, Range] = {}
        self._tier = HostTier(isolation=isolation)
        self._hosts: dict[str, HostModel] = {}
        self._models: dict[str, ParallelModel | GpuParallelModel] = {}
        self._rotors: dict[str, LinkRotor] = {}
        self._quiet = quiet
        self._workspace = Workspace(device.budget_bytes)
        self._cap: Cap | None = None

    def meet(self, meeting: Meeting) -> None:
        """Before it does anything else; returns when all ranks have come."""
        self._own.meet(meeting)

    def enter(self) -> None:
        """By each thread that has it do something."""
        self._own.enter()

    def when_lost(self, call: WhenLost) -> None:
        """As `Member.when_lost`."""
        self._own.when_lost(call)

    def do(self, asked: ToRank) -> FromRank:
        """What is asked. Raises DeviceError and BrokenPromise with nothing done."""
        match asked:
            case RunJobMsg():
                with self._own.alongside():
                    self._models[asked.model].compute(asked.work, head=asked.head)
                if self._cap is not None:
                    self._cap.check(alone=True)
            case MapPagesMsg():
                where = self._range(asked.base)
                self._own.vm.map(
                    where, asked.at, asked.pages, alias=asked.alias, prefault=asked.prefault
                )
            case UnmapPagesMsg():
                self._own.vm.unmap(self._range(asked.base), asked.at, asked.n)
            case PopulatePagesMsg():
                short = self._own.vm.populate(asked.pages)
                if short is not None:
                    return PagesShortReply(short.pages)
            case DiscardPagesMsg():
                self._own.vm.discard(asked.pages)
            case CopyMsg():
                self._own.copy(asked.dst, asked.src, asked.n_bytes)
            case StartTransferMsg():
                copies = [Copy(*c) for c in asked.copies]
                self._own.link.start(asked.transfer_id, copies, asked.stream)
            case ReserveRangeMsg():
                made = self._own.vm.reserve(asked.n_bytes)
                self._ranges[made.base] = made
                return RangeReservedReply(made.base)
            case ReleaseRangeMsg():
                self._own.vm.release(self._range(asked.base))
                del self._ranges[asked.base]
            case InspectMappingsMsg():
                mapped = (
                    {} if asked.base is None else self._own.vm.os_pages(self._range(asked.base))
                )
                return MappingsReply(mapped, self._own.vm.mappings())
            case LoadModelMsg():
                host = self._own.load(asked.settings, self._tier, asked.threads)
                self._hosts[host.spec.name] = host
                return ModelLoadedReply(host.addresses)
            case UnloadModelMsg():
                self._models.pop(asked.model, None)
                self._rotors.pop(asked.model, None)
                self._own.unload(self._hosts.pop(asked.model))
            case ServeModelMsg():
                self._serve(asked)
            case SetActivationLimitMsg():
                self._allow(asked.n_bytes)
            case RemapLayersMsg():
                self._rotors[asked.model].turn(asked.rotation, asked.held, asked.missing)
            case SettleLayersMsg():
                self._rotors[asked.model].settle()
            case ForgetLayersMsg():
                self._rotors[asked.model].forget()
            case JoinGroupMsg() | MeetRanksMsg():
                raise BrokenPromise("it is a rank already")
        return _DONE

    def _range(self, base: int) -> Range:
        found = self._ranges.get(base)
        if found is None:
            raise BrokenPromise(f"no range at {base:#x}")
        return found

    def _serve(self, asked: ServeModelMsg) -> None:
        host = self._hosts[asked.model]
        kv = self._range(asked.kv_base)
        place = KvPlace(kv.base, kv.n_bytes, Layout.of(host.spec, self.device.page_bytes))
        made = self._own.model(host, asked.segments, place, self._workspace)
        self._models[asked.model] = made
        spec = host.spec
        parts = zip(asked.segments, host.addresses, spec.segment_bytes, strict=False)
        copies = [Copy(*part) for part in parts][1 : 1 + spec.n_layers]
        rotor = self._own.rotor(spec.name, copies, self._clock, lambda: self._settled(spec.name))
        if rotor is not None:
            made.barriers = self._rotors[spec.name] = rotor

    def _settled(self, model: str) -> None:
        self._quiet(LayersSettledEvent(model, self._rotors[model].held))

    def _allow(self, n_bytes: int) -> None:
        if self._cap is None:
            self._cap = self._own.cap(n_bytes)
        else:
            self._cap.renew(n_bytes, self._workspace.forget)


def _answer(rank: Rank, connection: LeaderConnection, threads: int | None = None) -> None:
    """Do what is asked over one connection, until the first rank ends; then this process does.

    So it does after a fault: in a job, ranks are out of step; elsewhere, it is a bug, or the GPU is
    lost.
    """
    try:
        rank.enter()
        if threads is not None:
            torch.set_num_threads(threads)
        while True:
            asked = connection.receive()
            try:
                said = rank.do(asked)
            except DeviceLost:
                raise
            except DeviceError as error:
                said = RefusedReply(error.call, error.reason)
            except BallastError as error:
                if isinstance(asked, RunJobMsg):
                    raise
                said = RefusedReply(
                    None if isinstance(error, BrokenPromise) else "load", str(error)
                )
            connection.send(said)
    except RankGone:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the process ends of it
        _end(error)


def _end(error: BaseException) -> NoReturn:
    log.critical("this rank ends", exc_info=error)
    logging.shutdown()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The process."""
    parser = argparse.ArgumentParser(prog="ballast.cluster.rank")
    parser.add_argument("--parent", type=int, required=True, help="process id of the first rank")
    for name in ("memory", "models", "jobs", "events"):
        parser.add_argument(f"--{name}", type=int, required=True, help="descriptor of a socket")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    Path("/proc/self/comm").write_text(NAME)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    set_up("rank", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    isolation = fork_zygote()
    follow(
        LeaderConnection(arguments.memory),
        LeaderConnection(arguments.models),
        LeaderConnection(arguments.jobs),
        LeaderConnection(arguments.events),
        isolation=isolation,
    )
    raise AssertionError("unreachable")


def follow(
    memory: LeaderConnection,
    models: LeaderConnection,
    jobs: LeaderConnection,
    events: LeaderConnection,
    make: MakeMember = member_of,
    isolation: Isolation | None = None,
) -> None:
    """Be the rank that the first one asks for, until that ends; then this process does."""
    rank = _join(memory, events, make, isolation)
    rank.when_lost(_end)
    for name, connection, threads in (
        ("models", models, None),
        ("jobs", jobs, rank.device.threads),
    ):
        served = (rank, connection, threads)
        threading.Thread(target=_answer, args=served, name=name, daemon=True).start()
    _answer(rank, memory)


def _join(
    memory: LeaderConnection,
    events: LeaderConnection,
    make: MakeMember,
    isolation: Isolation | None,
) -> Rank:
    """What it is told to be, once it has met the others; else the process ends."""

    def landed(done: Event) -> None:
        assert isinstance(done, TransferDone)
        events.send(TransferLandedEvent(done))

    try:
        told = memory.receive()
        assert isinstance(told, JoinGroupMsg)
        try:
            rank = Rank(told, landed, events.send, make, isolation)
        except BallastError as error:
            if isinstance(error, DeviceError):
                memory.send(RefusedReply(error.call, error.reason))
            else:
                memory.send(RefusedReply("join", str(error)))
            memory.receive()  # it goes
            raise
        memory.send(_DONE)
        where = memory.receive()
        assert isinstance(where, MeetRanksMsg)
        rank.meet(memory.receive_descriptor() if where.meeting is None else Path(where.meeting))
        memory.send(_DONE)
        return rank
    except RankGone:
        os._exit(0)
    except BaseException:
        # The others may wait for it without end: its death is what they notice.
        log.exception("this rank does not join")
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
