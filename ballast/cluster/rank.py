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
from ballast.cluster.orphan import die_with
from ballast.core.errors import BallastError, BrokenPromise, DeviceError
from ballast.core.event import TransferDone
from ballast.engine.inbox import MonotonicClock
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.memory.arena import AllocatorCap, confine_allocator
from ballast.memory.copies import Copy, copy_now
from ballast.memory.transfer import HostLink
from ballast.memory.vm import Range
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.gloo import GlooExchange
from ballast.models.parallel import Exchange, ParallelModel
from ballast.models.shared import SharedExchange
from ballast.transport.ranks import (
    Allow,
    Carry,
    Compute,
    CopyNow,
    Discard,
    FromRank,
    JoinGroup,
    Lacking,
    Landed,
    LeaderConnection,
    Load,
    Loaded,
    Look,
    Map,
    Ok,
    Populate,
    RankGone,
    Refused,
    Release,
    Reserve,
    Reserved,
    Seen,
    Serve,
    ToRank,
    Unload,
    Unmap,
)
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

NAME = "ballast-rank"
"""Of the process, as operators see it."""
_DONE = Ok()


class Rank:
    """Memory, host tier, link and models of one rank."""

    def __init__(
        self, told: JoinGroup, shared: int | None, landed: Callable[[TransferDone], None]
    ) -> None:
        """`shared`: descriptor of the memory in which ranks meet; None: they meet through gloo, and
        this returns when all have come."""
        confine_allocator()
        self._told = told
        self._shard = Shard(told.rank, told.ranks)
        self._vm = MemfdVm(told.page_bytes, told.n_pages)
        self._ranges: dict[int, Range] = {}
        self._tier = HostTier()
        self._hosts: dict[str, HostModel] = {}
        self._models: dict[str, ParallelModel] = {}
        self._workspace = Workspace(told.n_pages * told.page_bytes)
        self._link = HostLink(MonotonicClock(), landed, told.pace)
        self._cap: AllocatorCap | None = None
        capacity = told.n_pages * told.page_bytes
        self._exchange: Exchange
        if told.meeting is not None:
            self._exchange = GlooExchange(Path(told.meeting), self._shard)
        else:
            assert shared is not None
            self._exchange = SharedExchange(shared, self._shard, capacity)

    def do(self, asked: ToRank) -> FromRank:
        """What is asked. Raises DeviceError and BrokenPromise with nothing done."""
        match asked:
            case Compute():
                self._models[asked.model].compute(asked.work, head=asked.head)
                if self._cap is not None:
                    self._cap.check()
            case Map():
                where = self._range(asked.base)
                self._vm.map(
                    where, asked.at, asked.pages, alias=asked.alias, prefault=asked.prefault
                )
            case Unmap():
                self._vm.unmap(self._range(asked.base), asked.at, asked.n)
            case Populate():
                short = self._vm.populate(asked.pages)
                if short is not None:
                    return Lacking(short.pages)
            case Discard():
                self._vm.discard(asked.pages)
            case CopyNow():
                copy_now(asked.dst, asked.src, asked.n_bytes)
            case Carry():
                copies = [Copy(*c) for c in asked.copies]
                self._link.start(asked.transfer_id, copies, asked.stream)
            case Reserve():
                made = self._vm.reserve(asked.n_bytes)
                self._ranges[made.base] = made
                return Reserved(made.base)
            case Release():
                self._vm.release(self._range(asked.base))
                del self._ranges[asked.base]
            case Look():
                mapped = {} if asked.base is None else self._vm.os_pages(self._range(asked.base))
                return Seen(mapped, self._vm.mappings())
            case Load():
                host = load_host_model(asked.settings, self._tier, asked.threads, self._shard)
                self._hosts[host.spec.name] = host
                return Loaded(host.addresses)
            case Unload():
                self._models.pop(asked.model, None)
                host = self._hosts.pop(asked.model)
                host.close()
            case Serve():
                self._serve(asked)
            case Allow():
                self._allow(asked.n_bytes)
            case JoinGroup():
                raise BrokenPromise("it is a rank already")
        return _DONE

    def _range(self, base: int) -> Range:
        found = self._ranges.get(base)
        if found is None:
            raise BrokenPromise(f"no range at {base:#x}")
        return found

    def _serve(self, asked: Serve) -> None:
        told, host = self._told, self._hosts[asked.model]
        self._models[asked.model] = ParallelModel(
            host,
            asked.segments,
            asked.kv_base,
            Layout.of(host.spec, told.page_bytes),
            self._workspace,
            told.step_tokens,
            told.step_logits,
            exchange=self._exchange,
        )

    def _allow(self, n_bytes: int) -> None:
        if self._cap is None:
            self._cap = AllocatorCap(n_bytes)
        else:
            self._cap.renew(n_bytes, self._workspace.forget)


def _answer(rank: Rank, connection: LeaderConnection, threads: int | None = None) -> None:
    """Do what is asked over one connection, until the first rank ends; then this process does.

    So it does after a fault: in a job, ranks are out of step; elsewhere, it is a bug.
    """
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        while True:
            asked = connection.next()
            try:
                said = rank.do(asked)
            except DeviceError as error:
                said = Refused(error.call, error.reason)
            except BallastError as error:
                if isinstance(asked, Compute):
                    raise
                said = Refused(None if isinstance(error, BrokenPromise) else "load", str(error))
            connection.say(said)
    except RankGone:
        os._exit(0)
    except BaseException:
        log.exception("this rank ends")
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
    events = LeaderConnection(arguments.events)
    memory = LeaderConnection(arguments.memory)
    try:
        told = memory.next()
        assert isinstance(told, JoinGroup)
        shared = memory.take() if told.meeting is None else None
        rank = Rank(told, shared, lambda done: events.say(Landed(done)))
        memory.say(_DONE)
    except RankGone:
        os._exit(0)
    for name, fd, threads in (
        ("models", arguments.models, None),
        ("jobs", arguments.jobs, told.threads),
    ):
        served = (rank, LeaderConnection(fd), threads)
        threading.Thread(target=_answer, args=served, name=name, daemon=True).start()
    _answer(rank, memory)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
