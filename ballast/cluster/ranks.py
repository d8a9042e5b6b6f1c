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
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ballast.core.actions import Short
from ballast.core.clock import Clock
from ballast.core.errors import BallastError, BrokenPromise, ConfigError, DeviceError
from ballast.core.event import Event, TransferDone
from ballast.core.job import SequenceWork
from ballast.core.link import Direction, LinkRates
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.engine.machine import CpuMachine, Machine
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.memory.copies import Copy, copy_now
from ballast.memory.transfer import ACTIVATIONS, HostLink
from ballast.memory.vm import Exported, Latch, Range
from ballast.memory.vm_group import GroupVm
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.fused import FusedModel
from ballast.models.gloo import GlooExchange
from ballast.models.parallel import ParallelModel
from ballast.transport.ranks import (
    Allow,
    Carry,
    Compute,
    CopyNow,
    Discard,
    JoinGroup,
    Lacking,
    Landed,
    Load,
    Loaded,
    Look,
    Map,
    Populate,
    RankConnection,
    RankGone,
    Release,
    Reserve,
    Reserved,
    Seen,
    Serve,
    Unload,
    Unmap,
)
from ballast.weights.checkpoint import THREADS, load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast.cluster.rank")
_CONNECTIONS = ("memory", "models", "jobs", "events")
_LAST_SECONDS = 5.0
"""For a rank to end once its connections are closed; it is killed then."""
EXIT_CODE = 3
"""Of a first rank that has lost another."""
_SAMPLED = Sampling()
"""Stands for any: a rank needs to know that there is something to sample, and no more."""


def machine_of(fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> Machine:
    """Of one process, or of several, as the fleet's device says."""
    if fleet.of_one_device("this command").tensor_parallel > 1:
        return GroupMachine(fleet, clock, post)
    return CpuMachine(fleet, clock, post)


def of_one_rank(device: DeviceSettings) -> DeviceSettings:
    """A rank's equal part of what the device has. Raises ConfigError."""
    ranks = device.tensor_parallel
    if device.lanes > 1:
        allowed = "one lane: ranks meet in the order of jobs, of which there is one at a time"
        raise ConfigError(f"lanes of {device.name}", device.lanes, allowed)
    threads = device.threads or len(os.sched_getaffinity(0))
    budget = device.budget_bytes // ranks
    if budget < device.page_bytes:
        raise ConfigError(f"the budget of {device.name}", device.budget_bytes, "a page each")
    return replace(device, budget_bytes=budget, threads=max(1, threads // ranks))


class GroupMachine:
    """Implements `ballast.engine.machine.Machine` over the processes of all ranks."""

    def __init__(self, fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> None:
        """Starts the other ranks; returns when all have met. Raises DeviceError, ConfigError."""
        whole = fleet.of_one_device("this command")
        self.device = device = of_one_rank(whole)
        self._closing = False
        ranks = device.tensor_parallel
        n_pages = device.budget_bytes // device.page_bytes
        pace = None if fleet.link.pace is None else _share(fleet.link.pace, ranks)
        self._ranks = [RemoteRank(rank, device.name, self._lost) for rank in range(1, ranks)]
        with tempfile.TemporaryDirectory(prefix="ballast-") as meeting:
            file = Path(meeting) / "meeting"
            for other in self._ranks:
                other.memory.tell(
                    JoinGroup(
                        str(file),
                        other.rank,
                        ranks,
                        device.page_bytes,
                        n_pages,
                        device.threads or 1,
                        device.step_tokens,
                        device.step_logits,
                        pace,
                    )
                )
            self._exchange = GlooExchange(file, Shard(0, ranks))
            for other in self._ranks:
                other.memory.answer()
        own = MemfdVm(device.page_bytes, n_pages)
        self.vm = GroupVm(
            own, [RemoteVm(r.memory, device.page_bytes, n_pages) for r in self._ranks]
        )
        self.link = GroupLink(HostLink(clock, self._landed, pace), post, self._carry, ranks)
        self._hosts: dict[int, tuple[int, ...]] = {}
        """By the address of a segment in this process: where the others have theirs."""
        for other in self._ranks:
            other.listen(self.link.landed)

    # -- models -----------------------------------------------------------------------------------

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """All ranks read their parts at the same time; where one cannot, none has the model."""
        shard = Shard(0, self.device.tensor_parallel)
        host: HostModel | None = None
        failed: BallastError | None = None
        for other in self._ranks:
            other.models.tell(Load(settings, threads))
        try:
            host = load_host_model(settings, tier, threads, shard)
        except BallastError as error:
            failed = error
        found: list[tuple[int, ...]] = []
        loaded: list[RemoteRank] = []
        for other in self._ranks:
            try:
                told = other.models.answer()
            except DeviceError as error:
                failed = failed or DeviceError(f"rank {other.rank}", error.reason)
                continue
            assert isinstance(told, Loaded)
            loaded.append(other)
            found.append(told.addresses)
        if failed is not None or host is None:
            for other in loaded:
                other.models.ask(Unload(settings.name))
            if host is not None:
                host.close()
            raise failed or BrokenPromise(f"{settings.name} was not loaded")
        for i, address in enumerate(host.addresses):
            self._hosts[address] = tuple(addresses[i] for addresses in found)
        return host

    def unload(self, host: HostModel) -> None:
        if not self._closing:
            for other in self._ranks:
                other.models.ask(Unload(host.spec.name))
        host.close()

    def fused(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: int,
        layout: Layout,
        workspace: Workspace,
    ) -> FusedModel:
        places = [self.vm.where(address) for address in (*segments, kv)]
        for i, other in enumerate(self._ranks, 1):
            *theirs, their_kv = (place[i] for place in places)
            other.models.ask(Serve(host.spec.name, tuple(theirs), their_kv))
        rows, sampled = self.device.step_tokens, self.device.step_logits
        where = (segments, kv, layout, workspace, rows, sampled)
        return ParallelModel(host, *where, exchange=self._exchange, followers=self)

    def allow(self, n_bytes: int) -> None:
        for other in self._ranks:
            other.models.ask(Allow(n_bytes))

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        targets, sources = self.vm.where(dst), self.vm.where(src)
        for i, other in enumerate(self._ranks, 1):
            other.memory.ask(CopyNow(targets[i], sources[i], n_bytes))
        copy_now(dst, src, n_bytes)

    def close(self) -> None:
        """The other ranks end, and what they have with them."""
        self._closing = True
        for other in self._ranks:
            other.close()

    # -- jobs, on the lane ------------------------------------------------------------------------

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        told = Compute(model, tuple(_without_words(w) for w in work), head)
        for other in self._ranks:
            other.jobs.tell(told)

    def end(self) -> None:
        for other in self._ranks:
            other.jobs.answer()

    def broken(self, error: BaseException) -> NoReturn:
        self._end(f"a job broke off: {type(error).__name__}: {error}")

    # -- transfers --------------------------------------------------------------------------------

    def _carry(self, transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        """Have the other ranks begin their parts of a transfer."""
        places = [(self.vm.where(c.dst), self._hosts[c.src], c.n_bytes) for c in copies]
        for i, other in enumerate(self._ranks):
            theirs = [(to[1 + i], source[i], n) for to, source, n in places]
            other.memory.ask(Carry(transfer_id, theirs, stream))

    def _landed(self, done: TransferDone) -> None:
        self.link.landed(done)

    # -- deaths -----------------------------------------------------------------------------------

    def _lost(self, other: RemoteRank) -> None:
        if not self._closing:
            self._end(f"rank {other.rank} is gone ({other.epitaph()})")

    def _end(self, why: str) -> NoReturn:
        """A group that is not whole can compute nothing: this process ends, and all with it."""
        log.critical("%s: the group ends: %s", self.device.name, why)
        logging.shutdown()
        os._exit(EXIT_CODE)


class RemoteRank:
    """One of the other ranks: its process and its connections."""

    def __init__(self, rank: int, device: str, lost: Callable[[RemoteRank], None]) -> None:
        """Starts it. `lost` is called, by any thread, once it is gone, before `close` or after."""
        self.rank = rank
        self._lost = lost
        self._landed: Callable[[TransferDone], None] | None = None
        with ExitStack() as theirs:
            pairs = {name: socket.socketpair() for name in _CONNECTIONS}
            for _, end in pairs.values():
                theirs.callback(end.close)  # so that its end is noticed
            options = [
                text for n, (_, end) in pairs.items() for text in (f"--{n}", str(end.fileno()))
            ]
            self._process = subprocess.Popen(
                (*COMMAND, "--parent", str(os.getpid()), *options),
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno() for _, end in pairs.values()],
            )
        ours = {name: RankConnection(end) for name, (end, _) in pairs.items()}
        self.memory, self.models, self.jobs = ours["memory"], ours["models"], ours["jobs"]
        self._events = ours["events"]
        name = f"rank{rank} of {device}"
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)

    def listen(self, landed: Callable[[TransferDone], None]) -> None:
        """From now on it is told which transfers have landed, and noticed if it ends."""
        self._landed = landed
        self._listener.start()

    def epitaph(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return "it runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """It ends by itself, or is killed."""
        for connection in (self.jobs, self.models, self.memory, self._events):
            connection.close()
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("rank %d is killed", self.rank)
            self._process.kill()
            self._process.wait()
        if self._listener.is_alive():
            self._listener.join()

    def _listen(self) -> None:
        try:
            while True:
                told = self._events.answer()
                if isinstance(told, Landed) and self._landed is not None:
                    self._landed(told.done)
        except RankGone:
            self._lost(self)


class RemoteVm:
    """The vm of another rank; implements as much of `Vm` as a group asks of it."""

    def __init__(self, memory: RankConnection, page_bytes: int, n_pages: int) -> None:
        self.page_bytes, self.n_pages = page_bytes, n_pages
        self._memory = memory

    def reserve(self, n_bytes: int) -> Range:
        told = self._memory.ask(Reserve(n_bytes))
        assert isinstance(told, Reserved)
        return Range(told.base, -(-n_bytes // self.page_bytes), self.page_bytes)

    def release(self, range: Range) -> None:
        self._memory.ask(Release(range.base))

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        self._memory.ask(Map(range.base, at, list(pages), alias, prefault))

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._memory.ask(Unmap(range.base, at, n))

    def populate(self, pages: Sequence[int]) -> Short | None:
        told = self._memory.ask(Populate(list(pages)))
        return Short(told.pages) if isinstance(told, Lacking) else None

    def discard(self, pages: Sequence[int]) -> None:
        self._memory.ask(Discard(list(pages)))

    def os_mapped(self, range: Range) -> int:
        return len(self.os_pages(range))

    def os_pages(self, range: Range) -> dict[int, int]:
        return self._look(range.base).mapped

    def mappings(self) -> int:
        return self._look(None).mappings

    def fence(self) -> Latch:
        """What was asked has been done when the answer came."""
        return Latch(done=True)

    def attach(self, exported: Exported) -> int:
        raise DeviceError("attach", "a rank borrows no pages")

    def detach(self, first: int) -> None:
        raise BrokenPromise(f"no device is attached at {first}")

    def export(self, pages: Sequence[int]) -> Exported:
        raise DeviceError("export", "a rank lends no pages")

    def close(self) -> None:
        """Its memory goes with its process."""

    def _look(self, base: int | None) -> Seen:
        told = self._memory.ask(Look(base))
        assert isinstance(told, Seen)
        return told


class GroupLink:
    """Implements `Link`: a transfer has landed when all ranks have their parts."""

    def __init__(
        self,
        own: HostLink,
        on_done: Callable[[TransferDone], None],
        carry: Callable[[int, Sequence[Copy], str], None],
        ranks: int,
    ) -> None:
        """`carry` has the other ranks begin theirs; whoever hears of an end tells `landed`."""
        self._own, self._on_done, self._carry, self._ranks = own, on_done, carry, ranks
        self._ends: dict[int, list[TransferDone]] = {}
        self._lock = threading.Lock()

    @property
    def bytes_per_second(self) -> float:
        """Of one rank's part, as all sizes that the loop knows are."""
        return self._own.bytes_per_second

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        if direction is not Direction.TO_DEVICE:
            raise DeviceError("link", "a group's ranks carry weights, and to the device alone")
        with self._lock:
            self._ends[transfer_id] = []
        self._carry(transfer_id, copies, stream)
        self._own.start(transfer_id, copies, stream)

    def landed(self, done: TransferDone) -> None:
        """On one rank; from any thread."""
        with self._lock:
            ends = self._ends[done.transfer_id]
            ends.append(done)
            if len(ends) < self._ranks:
                return
            del self._ends[done.transfer_id]
        errors = [e.error for e in ends if e.error is not None]
        seconds = max(e.seconds for e in ends)
        self._on_done(
            TransferDone(done.transfer_id, done.n_bytes, seconds, errors[0] if errors else None)
        )

    def close(self) -> None:
        self._own.close()


def _share(whole: LinkRates, ranks: int) -> LinkRates:
    """A rank's equal part of a link."""
    return LinkRates(
        whole.to_device / ranks,
        whole.to_host / ranks,
        whole.to_device_mixed / ranks,
        whole.to_host_mixed / ranks,
    )


def _without_words(work: SequenceWork) -> SequenceWork:
    """What only whoever samples needs stays here."""
    sample = None if work.sample is None else _SAMPLED
    return replace(work, sample=sample, history=None, prompt_tokens=0)
